"""The paper's three protocols: data to learn from, data to test on, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from selftpt.config import ContrastConfig
from selftpt.data.datasets.table import DATASETS
from selftpt.errors import SelfTPTError


@dataclass(frozen=True)
class Metric:
    """A number that a table shows for each run.

    Attributes:
        title: What it is, for the title of a table.
        heading: What it is called in a table of several metrics.
        path: Where it is in the results of a record.
        lower_is_better: Whether the lowest value is the best.
    """

    title: str
    heading: str
    path: tuple[str, ...]
    lower_is_better: bool = False


@dataclass(frozen=True)
class Protocol:
    """Source and target data of a benchmark, how long methods learn, and the metrics.

    Attributes:
        source: Dataset to learn from; None if the base classes of each target dataset are the source.
        targets: Datasets to test on.
        epochs: Epochs of methods that are trained as in the paper.
        uses_dataset_template: Whether zero-shot uses each dataset's own template or the general one, as in the paper.
        metrics: What tables can show, by name; the first is what the paper prints.
        default_metrics: The names of those that a table shows by default.
        paper_table: The label of the paper's table.
        paper_std_table: The label of the table with the standard deviations of its values.
    """

    source: str | None
    targets: tuple[str, ...]
    epochs: int
    uses_dataset_template: bool
    metrics: Mapping[str, Metric]
    default_metrics: tuple[str, ...]
    paper_table: str
    paper_std_table: str

    @property
    def paper_metric(self) -> str:
        """The metric that the paper prints."""
        return next(iter(self.metrics))

    def template(self, dataset: str) -> str | None:
        """Return the template for zero-shot on a dataset; None for a dataset that is not one of the paper's."""
        if not self.uses_dataset_template:
            return ContrastConfig.template
        return DATASETS[dataset].template if dataset in DATASETS else None


def _metrics(part: str, where: str, top1: str, prefix: str = "") -> dict[str, Metric]:
    """Return the metrics of one part of the results."""
    ece = f"expected calibration error (%, lower is better) on {where}"
    return {
        top1: Metric(f"top-1 accuracy (%) on {where}", where, (part, "top1")),
        f"{prefix}top5": Metric(f"top-5 accuracy (%) on {where}", f"top-5, {where}", (part, "top5")),
        f"{prefix}ece": Metric(ece, f"ECE, {where}", (part, "ece"), lower_is_better=True),
    }


ON_TEST = _metrics("test", "the test images", "test")
BASE_TO_NEW = {
    **_metrics("new", "new classes", "new"),
    **_metrics("base", "base classes", "base", "base-"),
    "harmonic": Metric(
        "harmonic mean of top-1 accuracy (%) on base and on new classes", "harmonic mean of base and new", ("harmonic",)
    ),
}
TEN = tuple(name for name in DATASETS if not name.startswith("imagenet"))
VARIANTS = tuple(name for name in DATASETS if name.startswith("imagenet"))
PROTOCOLS: dict[str, Protocol] = {
    "base-to-new": Protocol(
        source=None,
        targets=("imagenet", *TEN),
        epochs=10,
        uses_dataset_template=True,
        metrics=BASE_TO_NEW,
        default_metrics=("base", "new", "harmonic"),
        paper_table="tab:cmp_with_sota_b2n",
        paper_std_table="tab:b2n_error_bar",
    ),
    "cross-dataset": Protocol(
        source="imagenet",
        targets=TEN,
        epochs=5,
        uses_dataset_template=False,
        metrics=ON_TEST,
        default_metrics=("test",),
        paper_table="tab:cmp_with_sota_cross_dataset",
        paper_std_table="tab:cross_dataset_error_bar",
    ),
    "domain": Protocol(
        source="imagenet",
        targets=VARIANTS,
        epochs=5,
        uses_dataset_template=False,
        metrics=ON_TEST,
        default_metrics=("test",),
        paper_table="tab:domain_gen",
        paper_std_table="tab:domain_gen",
    ),
}


def find_protocol(name: str) -> Protocol:
    """Find a protocol by its name.

    Raises:
        SelfTPTError: There is no such protocol.
    """
    if name not in PROTOCOLS:
        raise SelfTPTError(f"no protocol is called {name!r}: choose one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
