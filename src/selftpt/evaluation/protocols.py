"""The paper's three protocols: data to learn from, data to test on, and what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from selftpt.config import ContrastConfig
from selftpt.data.datasets.table import DATASETS
from selftpt.errors import SelfTPTError


@dataclass(frozen=True)
class Measure:
    """A number that a table shows of each run.

    Attributes:
        title: What it is, for the title of a table.
        path: Where it is in the results of a record.
        lower_is_better: Whether the lowest value is the best.
    """

    title: str
    path: tuple[str, ...]
    lower_is_better: bool = False


@dataclass(frozen=True)
class Protocol:
    """Source and target data of a benchmark, how long methods learn, and what is measured.

    Attributes:
        source: Dataset to learn from; None if the base classes of each target dataset are the source.
        targets: Datasets to test on.
        epochs: Epochs of methods that are trained as in the paper.
        uses_dataset_template: Whether zero-shot uses each dataset's own template or the general one, as in the paper.
        measures: What tables can show, by name; the first is what the paper prints.
        paper_table: The label of the paper's table.
        paper_std_table: The label of the table with the standard deviations of its values.
    """

    source: str | None
    targets: tuple[str, ...]
    epochs: int
    uses_dataset_template: bool
    measures: Mapping[str, Measure]
    paper_table: str
    paper_std_table: str

    @property
    def paper_measure(self) -> str:
        """The measure that the paper prints, which tables show by default."""
        return next(iter(self.measures))

    def template(self, dataset: str) -> str | None:
        """The template for zero-shot on a dataset; None for a dataset that is not the paper's and has its own."""
        if not self.uses_dataset_template:
            return ContrastConfig.template
        return DATASETS[dataset].template if dataset in DATASETS else None


def _measures(part: str, where: str, top1: str, prefix: str = "") -> dict[str, Measure]:
    """The measures of one part of the results."""
    return {
        top1: Measure(f"top-1 accuracy (%) on {where}", (part, "top1")),
        f"{prefix}top5": Measure(f"top-5 accuracy (%) on {where}", (part, "top5")),
        f"{prefix}ece": Measure(
            f"expected calibration error (%), the lower the better, on {where}", (part, "ece"), lower_is_better=True
        ),
    }


ON_TEST = _measures("test", "the test images", "test")
BASE_TO_NEW = {
    **_measures("new", "new classes", "new"),
    **_measures("base", "base classes", "base", "base-"),
    "harmonic": Measure("harmonic mean of top-1 accuracy (%) on base and on new classes", ("harmonic",)),
}
TEN = tuple(name for name in DATASETS if not name.startswith("imagenet"))
VARIANTS = tuple(name for name in DATASETS if name.startswith("imagenet"))
PROTOCOLS: dict[str, Protocol] = {
    "base-to-new": Protocol(
        source=None,
        targets=("imagenet", *TEN),
        epochs=10,
        uses_dataset_template=True,
        measures=BASE_TO_NEW,
        paper_table="tab:cmp_with_sota_b2n",
        paper_std_table="tab:b2n_error_bar",
    ),
    "cross-dataset": Protocol(
        source="imagenet",
        targets=TEN,
        epochs=5,
        uses_dataset_template=False,
        measures=ON_TEST,
        paper_table="tab:cmp_with_sota_cross_dataset",
        paper_std_table="tab:cross_dataset_error_bar",
    ),
    "domain": Protocol(
        source="imagenet",
        targets=VARIANTS,
        epochs=5,
        uses_dataset_template=False,
        measures=ON_TEST,
        paper_table="tab:domain_gen",
        paper_std_table="tab:domain_gen",
    ),
}


def chosen_protocol(name: str) -> Protocol:
    """The protocol called `name`.

    Raises:
        SelfTPTError: If there is none.
    """
    if name not in PROTOCOLS:
        raise SelfTPTError(f"no protocol is called {name!r}: choose one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
