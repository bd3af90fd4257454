"""The three benchmarks: which data teaches, which data tests; one record for each method, dataset and seed."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import open_clip
import torch

from selftpt.datasets import DATASETS, Dataset, read_dataset
from selftpt.datasets.sampling import fraction, half, limit, some_classes
from selftpt.errors import SelfTPTError
from selftpt.evaluation.measures import harmonic, measure
from selftpt.evaluation.memory import forget_peak, peak_megabytes
from selftpt.evaluation.runs import Record, Runs
from selftpt.features import FeatureStore, Look
from selftpt.files import digest
from selftpt.images import PictureError, Source, warn_of
from selftpt.methods import METHODS, Fitted, Job, Predictor
from selftpt.models import Model
from selftpt.settings import BenchConfig, ContrastConfig
from selftpt.version import __version__

BLOCK = 4096  # views of test pictures in memory at once


@dataclass(frozen=True)
class Protocol:
    """Which data teaches, which data tests, and for how long it is learned.

    source: the dataset that teaches, or None where each dataset's first half of classes does. own_sentence: whether
    zero-shot takes the dataset's own sentence or the general one, as in the paper's tables.
    """

    source: str | None
    targets: tuple[str, ...]
    epochs: int
    own_sentence: bool


TEN = tuple(name for name in DATASETS if not name.startswith("imagenet"))
VARIANTS = tuple(name for name in DATASETS if name.startswith("imagenet"))
PROTOCOLS: dict[str, Protocol] = {
    "cross-dataset": Protocol("imagenet", TEN, 5, own_sentence=False),
    "base-to-new": Protocol(None, ("imagenet", *TEN), 10, own_sentence=True),
    "domain": Protocol("imagenet", VARIANTS, 5, own_sentence=False),
}


@dataclass(frozen=True)
class Run:
    """One measurement, not yet done."""

    method: str
    dataset: str
    seed: int | None


@dataclass
class Bench:
    """A protocol on the data of a folder, with one model; its records go to `runs`.

    changes: settings other than the methods' own, such as "learn.lr": 0.02.
    """

    model: Model
    name: str
    data: Path | None
    runs: Runs
    config: BenchConfig = field(default_factory=BenchConfig)
    changes: Mapping[str, Any] = field(default_factory=dict)
    on_error: Callable[[PictureError], None] = warn_of

    def __post_init__(self) -> None:
        self._read: dict[str, Dataset] = {}
        self._fitted: tuple[object, Fitted, Record] | None = None
        self._stores: dict[Look, FeatureStore] = {}
        self._unreadable: set[str] = set()

    @property
    def protocol(self) -> Protocol:
        return PROTOCOLS[self.name]

    def dataset(self, name: str) -> Dataset:
        """A dataset, read once."""
        if name not in self._read:
            self._read[name] = read_dataset(name, self.data)
        return self._read[name]

    def plan(self, methods: Sequence[str], datasets: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """What there is to do, in an order that learns from each source once."""
        runs = [
            Run(method, dataset, seed)
            for method in methods
            for dataset in datasets
            for seed in (seeds if METHODS[method].learns else [None])
        ]
        place = {dataset: i if self.protocol.source is None else 0 for i, dataset in enumerate(datasets)}
        return sorted(runs, key=lambda run: (place[run.dataset], methods.index(run.method), run.seed or 0))

    def settings(self, run: Run) -> Any:
        """The settings of a run's method with the changes, the protocol's epochs and the run's seed."""
        settings = METHODS[run.method].settings
        if run.seed is not None:
            learn = dataclasses.replace(settings.learn, epochs=self.protocol.epochs, seed=run.seed, shots=None)
            settings = dataclasses.replace(settings, learn=learn)
        for key, value in self.changes.items():
            settings = change(settings, key.split("."), value)
        return settings

    def key(self, run: Run) -> str:
        """What tells a run from all others: what is done, with what, on which pictures."""
        data = self.dataset(run.dataset)
        taught = None if run.seed is None else self.dataset(self.protocol.source or run.dataset).split
        facts = self.name, run.method, run.dataset, run.seed, dataclasses.asdict(self.settings(run))
        test = data.split, len(data.test.paths)
        return digest(
            __version__,
            self.model.id.digest,
            self.model.precision,
            facts,
            taught,
            test,
            dataclasses.asdict(self.config),
        )

    def do(self, run: Run) -> Record:
        """Learn, adapt, predict, measure: the record, which is added to the runs."""
        settings, data = self.settings(run), self.dataset(run.dataset)
        forget_peak(self.model.device)
        encoded, clock = self.model.encoded, Clock()
        fitted, source = self._fit(run, settings, clock)
        self._unreadable = set()
        template = data.template if self.protocol.own_sentence else ContrastConfig.template
        results: dict[str, Any] = {}
        for part, test in self._parts(data):
            with clock("adapt"):
                predictor = fitted(test.names, template)
            stores = [self._store(look) for look in METHODS[run.method].looks(settings)]
            results[part] = self._examine(predictor, stores, test, clock)
        if "new" in results:
            results["harmonic"] = harmonic(results["base"]["top1"], results["new"]["top1"])
        record = {
            "protocol": self.name,
            "method": run.method,
            "dataset": data.name,
            "seed": run.seed,
            "model": dataclasses.asdict(self.model.id),
            "precision": self.model.precision,
            "device": str(self.model.device),
            "meaningless": self.model.id.meaningless,
            "data": {
                "split": data.split,
                "published": data.published,
                "limit": self.config.limit,
                "unreadable": len(self._unreadable),
            },
            "source": source,
            "settings": dataclasses.asdict(settings),
            "results": results,
            "seconds": clock.seconds,
            "peak_memory_mb": peak_megabytes(self.model.device),
            "encoded": self.model.encoded - encoded,
            "versions": {
                "selftpt": __version__,
                "torch": torch.__version__,
                "open_clip": open_clip.__version__,
                "python": platform.python_version(),
            },
            "key": self.key(run),
        }
        return self.runs.add(record)

    def _fit(self, run: Run, settings: Any, clock: Clock) -> tuple[Fitted, Record | None]:
        """The fitted method and what it was fitted on; kept for the next run, which may be on another dataset."""
        job = Job(self.model, None, self.runs.folder / "learned", self._report)
        if run.seed is None:
            return METHODS[run.method].fit(job, settings), None
        teacher = self.protocol.source or run.dataset
        key = run.method, run.seed, teacher
        if self._fitted is None or self._fitted[0] != key:
            source, facts = self._source(teacher, run.seed)
            job.source = source
            with clock("learn"):
                fitted = METHODS[run.method].fit(job, settings)
            self._fitted = key, fitted, {**facts, "unreadable": job.unreadable}
        return self._fitted[1:]

    def _source(self, name: str, seed: int) -> tuple[Source, Record]:
        """The pictures to learn from, and what the record says of them."""
        data = self.dataset(name)
        config = self.config
        source, origin = data.few_shot(config.shots, seed)
        if self.protocol.source is None:
            source = half(source, new=False)
        if config.share < 1:
            source = fraction(source, config.share, seed)
        if config.source_classes is not None and config.source_classes < len(source.names):
            source = some_classes(source, config.source_classes, seed)
        facts = {
            "dataset": name,
            "split": data.split,
            "list": origin,
            "published": data.published,
            "shots": config.shots,
            "share": config.share,
            "classes": len(source.names),
            "pictures": len(source.paths),
        }
        return source, facts

    def _parts(self, data: Dataset) -> Iterator[tuple[str, Source]]:
        """The test pictures by the part of the results they are for."""
        tests = {"test": data.test}
        if self.protocol.source is None:
            tests = {"base": half(data.test, new=False), "new": half(data.test, new=True)}
        for part, test in tests.items():
            yield part, test if self.config.limit is None else limit(test, self.config.limit)

    def _store(self, look: Look) -> FeatureStore:
        if look not in self._stores:
            self._stores[look] = FeatureStore(self.model, look, self._report)
        return self._stores[look]

    def _examine(
        self, predictor: Predictor, stores: Sequence[FeatureStore], test: Source, clock: Clock
    ) -> dict[str, float | int]:
        """Measures of the predictions for test pictures; those that cannot be read are left out."""
        size = max(1, BLOCK // sum(store.look.views for store in stores))
        answers, labels = [], torch.tensor(test.labels)
        for start in range(0, len(test.paths), size):
            with clock("features"):
                features = torch.cat([store(test.paths[start : start + size]) for store in stores], 1)
            with clock("predict"):
                answers.append(predictor(features))
        probabilities = torch.cat(answers)
        usable = ~probabilities.isnan().any(1)
        if not usable.any():
            raise SelfTPTError(f"none of the {len(test.paths)} test pictures can be read, the first is {test.paths[0]}")
        return measure(probabilities[usable], labels[usable])

    def _report(self, error: PictureError) -> None:
        if str(error) not in self._unreadable:  # each look tells of it
            self._unreadable.add(str(error))
            self.on_error(error)


class Clock:
    """Seconds by stage: `with clock("learn"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str) -> Clock:
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + time.monotonic() - self._begin


def has(settings: Any, path: Sequence[str]) -> bool:
    """Whether settings have the field at `path`."""
    name, *rest = path
    return hasattr(settings, name) and (not rest or has(getattr(settings, name), rest))


def change(settings: Any, path: Sequence[str], value: Any) -> Any:
    """Settings with the field at `path` changed; those that have no such field stay as they are."""
    if not has(settings, path):
        return settings
    name, *rest = path
    old = getattr(settings, name)
    value = change(old, rest, value) if rest else tuple(value) if isinstance(old, tuple) else value
    return dataclasses.replace(settings, **{name: value})
