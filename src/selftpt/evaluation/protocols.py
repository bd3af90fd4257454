"""The paper's three protocols: which data a method learns from and which data it is tested on."""

from __future__ import annotations

from dataclasses import dataclass

from selftpt.data.datasets.table import DATASETS
from selftpt.errors import SelfTPTError


@dataclass(frozen=True)
class Protocol:
    """Source and target data of a benchmark, and for how long methods learn.

    Attributes:
        source: Dataset to learn from; None if the base classes of each target dataset are the source.
        targets: Datasets to test on.
        epochs: Epochs of methods that are trained as in the paper.
        uses_dataset_template: Whether zero-shot uses each dataset's own template or the general one, as in the paper.
    """

    source: str | None
    targets: tuple[str, ...]
    epochs: int
    uses_dataset_template: bool


TEN = tuple(name for name in DATASETS if not name.startswith("imagenet"))
VARIANTS = tuple(name for name in DATASETS if name.startswith("imagenet"))
PROTOCOLS: dict[str, Protocol] = {
    "base-to-new": Protocol(None, ("imagenet", *TEN), 10, uses_dataset_template=True),
    "cross-dataset": Protocol("imagenet", TEN, 5, uses_dataset_template=False),
    "domain": Protocol("imagenet", VARIANTS, 5, uses_dataset_template=False),
}


def chosen_protocol(name: str) -> Protocol:
    """The protocol called `name`.

    Raises:
        SelfTPTError: If there is none.
    """
    if name not in PROTOCOLS:
        raise SelfTPTError(f"no protocol is called {name!r}: choose one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]
