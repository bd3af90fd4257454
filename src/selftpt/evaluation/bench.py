"""Benchmarks: fit and test methods by a protocol, one record for each method, dataset and seed."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from selftpt.config import BenchConfig, ContrastConfig, change, kind_of
from selftpt.data.cache import Cache
from selftpt.data.datasets import DATASETS, Dataset, read_dataset
from selftpt.data.datasets.sampling import fraction, half, limit, some_classes
from selftpt.data.decoding import ImageError, warn_of
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import Source
from selftpt.data.views import ViewSpec
from selftpt.errors import SelfTPTError
from selftpt.evaluation.measures import harmonic, measure
from selftpt.evaluation.memory import forget_peak, peak_megabytes
from selftpt.evaluation.protocols import chosen_protocol
from selftpt.evaluation.records import Record
from selftpt.evaluation.runs import Runs
from selftpt.files import digest
from selftpt.methods import METHODS, FitContext, FittedMethod, Predictor
from selftpt.models import Model
from selftpt.progress import Bar
from selftpt.version import __version__

POLL_SECONDS = 1.0  # between looks at runs that other processes have claimed
VERSIONS = ("selftpt", "torch", "torchvision", "open_clip_torch", "timm", "pillow")


@dataclass(frozen=True)
class Run:
    """One measurement, not yet done. The seed is None for a method that draws nothing."""

    method: str
    dataset: str
    seed: int | None


@dataclass
class Bench:
    """A protocol on the data of a folder, with one model; its records go to `runs`.

    source: another dataset to learn from than the protocol's. changes: settings other than the methods' own, such as
    "learn.lr": 0.02, which those have that know them. cache: where image features are cached.
    """

    model: Model
    name: str
    data: Path | None
    runs: Runs
    config: BenchConfig = field(default_factory=BenchConfig)
    changes: Mapping[str, Any] = field(default_factory=dict)
    on_error: Callable[[ImageError], None] = warn_of
    source: str | None = None
    cache: Cache = field(default_factory=Cache)

    def __post_init__(self) -> None:
        self.protocol = chosen_protocol(self.name)
        if self.source is not None:
            if self.protocol.source is None:
                raise SelfTPTError(f"{self.name} learns from a half of each dataset: leave --source out")
            self.protocol = dataclasses.replace(self.protocol, source=self.source)
        self._read: dict[str, Dataset] = {}
        self._sources: dict[tuple[str, int], tuple[Source, Record]] = {}
        self._fitted: tuple[object, FittedMethod, int] | None = None
        self._unreadable = 0
        self._keys: dict[Run, str] = {}
        self._providers: dict[tuple[ViewSpec, ...], FeatureProvider] = {}

    def dataset(self, name: str) -> Dataset:
        """A dataset, read once."""
        if name not in self._read:
            self._read[name] = read_dataset(name, self.data)
        return self._read[name]

    def plan(self, methods: Sequence[str], datasets: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """What there is to do, in an order that learns from each source once; refused now if it cannot be done."""
        for dataset in datasets:
            count = len(self.dataset(dataset).test.names)
            if self.protocol.source is None and count < 4:
                raise SelfTPTError(f"{dataset} has {count} classes: base-to-new takes four, two in each half")
        runs = [
            Run(method, dataset, seed)
            for method in methods
            for dataset in datasets
            for seed in (seeds if METHODS[method].stochastic else [None])
        ]
        for run in runs:
            self.source_of(run)
        place = {dataset: i if self.protocol.source is None else 0 for i, dataset in enumerate(datasets)}
        return sorted(runs, key=lambda run: (place[run.dataset], methods.index(run.method), run.seed or 0))

    def settings(self, run: Run) -> Any:
        """The settings of a run's method with the protocol's epochs, the run's seed and the changes."""
        method = METHODS[run.method]
        changes = self._changes(run)
        settings = method.seeded(run.seed, shots=None) if method.needs_labels else method.seeded(run.seed)
        settings = change(settings, changes)
        if method.uses_protocol_epochs(settings) and "learn.epochs" not in changes:
            settings = change(settings, {"learn.epochs": self.protocol.epochs})
        return settings

    def _changes(self, run: Run) -> dict[str, Any]:
        settings = METHODS[run.method].config
        return {key: value for key, value in self.changes.items() if kind_of(settings, key.split(".")) is not None}

    def facts(self, run: Run) -> Record:
        """What a record says of a run before it is done, beside its key."""
        data, source = self.dataset(run.dataset), self.source_of(run)
        return {
            "protocol": self.name,
            "method": run.method,
            "dataset": data.name,
            "seed": run.seed,
            "model": dataclasses.asdict(self.model.id),
            "precision": self.model.precision,
            "device": str(self.model.device),
            "random_init": self.model.id.random_init,
            "template": data.template if self.protocol.uses_dataset_template else ContrastConfig.template,
            "source": source and source[1],
            "settings": dataclasses.asdict(self.settings(run)),
            "changes": self._changes(run),
        }

    def last_seconds(self, run: Run) -> float | None:
        """How long a run took the last time that it was done, with whatever seed; None if it was not."""
        return self.runs.last_seconds({**self.facts(run), "data": {"limit": self.config.limit}})

    def key(self, run: Run) -> str:
        """What tells a run from all others: what is done, with what, on which images."""
        if run in self._keys:
            return self._keys[run]
        facts, source = self.facts(run), self.source_of(run)
        learned_from = source and self._listed(self.protocol.source or run.dataset, source[0])
        tests = [(part, self._listed(run.dataset, test)) for part, test in self._parts(run)]
        own = METHODS[run.method].data(self.settings(run))
        self._keys[run] = digest(__version__, facts, learned_from, tests, *([own] if own else []))
        return self._keys[run]

    def _listed(self, dataset: str, source: Source) -> object:
        root = self.dataset(dataset).root
        own = None if dataset in DATASETS else str(root.resolve())  # the paper's are the same wherever they lie
        return own, source.names, [os.path.relpath(path, root) for path in source.paths], source.labels

    def do_all(
        self, runs: Sequence[Run], on_wait: Callable[[Sequence[Run]], None] = lambda _runs: None
    ) -> Iterator[tuple[Run, Record | SelfTPTError | None]]:
        """Do runs that other processes may be doing as well, each once.

        Runs that another process has claimed come last: this one waits for them, and does those whose owner ended
        without a record.

        Args:
            runs: What there is to do.
            on_wait: Called once with the runs that are waited for, if nothing else is left.

        Yields:
            Each run with its record, with the error that it failed with, or with None if another process recorded it.
        """
        left, waiting = [(run, self.key(run)) for run in runs], False
        while left:
            claimed = []
            for run, key in left:
                result: Record | SelfTPTError | None = None
                with self.runs.claim(key) as mine:
                    if mine:
                        try:
                            result = self.do(run)
                        except SelfTPTError as error:
                            result = error
                if result is None and key not in self.runs.done():
                    claimed.append((run, key))
                else:
                    yield run, result
            if len(claimed) == len(left):
                if not waiting:
                    on_wait([run for run, _ in claimed])
                    waiting = True
                time.sleep(POLL_SECONDS)
            left = claimed

    def do(self, run: Run) -> Record:
        """Learn, adapt, predict, measure.

        Returns:
            The record, which is added to the runs; the one that is there if another process was faster.
        """
        facts, settings, data = self.facts(run), self.settings(run), self.dataset(run.dataset)
        forget_peak(self.model.device)
        encoded, clock = self.model.encoded, Clock()
        fitted, unreadable = self._fit(run, settings, clock)
        self._unreadable = 0
        results: dict[str, Any] = {}
        for part, test in self._parts(run):
            with clock("adapt"):
                predictor = fitted.for_classes(test.names, facts["template"])
            results[part] = self._evaluate(predictor, test, clock)
        if "new" in results:
            results["harmonic"] = harmonic(results["base"]["top1"], results["new"]["top1"])
        return self.runs.add(
            {
                **facts,
                "source": facts["source"] and {**facts["source"], "unreadable": unreadable},
                "data": {
                    "split": data.split,
                    "published": data.published,
                    "limit": self.config.limit,
                    "unreadable": self._unreadable,
                },
                "results": results,
                "seconds": clock.seconds,
                "peak_memory_mb": peak_megabytes(self.model.device),
                "encoded": self.model.encoded - encoded,
                "versions": {name: version(name) for name in VERSIONS} | {"python": platform.python_version()},
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "key": self.key(run),
            }
        )

    def _fit(self, run: Run, settings: Any, clock: Clock) -> tuple[FittedMethod, int]:
        """The fitted method and the number of images it could not use; kept for the next run, on another dataset."""
        source = self.source_of(run)
        folder = self.runs.folder / "learned"
        context = FitContext(self.model, source and source[0], folder, cache=self.cache, on_error=self._report)
        if source is None:
            return METHODS[run.method].fit(context, settings), 0
        key = run.method, run.seed, self.protocol.source or run.dataset
        if self._fitted is None or self._fitted[0] != key:
            with clock("learn"):
                fitted = METHODS[run.method].fit(context, settings)
            self._fitted = key, fitted, context.unreadable
        return self._fitted[1:]

    def source_of(self, run: Run) -> tuple[Source, Record] | None:
        """The images to learn from, and what the record says of them; None for a method that learns nothing."""
        if not METHODS[run.method].needs_labels:
            return None
        assert run.seed is not None
        teacher = self.protocol.source or run.dataset
        if (teacher, run.seed) not in self._sources:
            self._sources[teacher, run.seed] = self._draw(self.dataset(teacher), run.seed)
        return self._sources[teacher, run.seed]

    def _draw(self, data: Dataset, seed: int) -> tuple[Source, Record]:
        config = self.config
        source, origin, published = data.few_shot(config.shots, seed)
        if self.protocol.source is None:
            source = half(source, new=False)
        if config.share < 1:
            source = fraction(source, config.share, seed)
        if config.source_classes is not None and config.source_classes < len(source.names):
            source = some_classes(source, config.source_classes, seed)
        facts = {
            "dataset": data.name,
            "split": data.split,
            "list": origin,
            "published": data.published and published,
            "shots": config.shots,
            "share": config.share,
            "classes": len(source.names),
            "images": len(source.paths),
        }
        return source, facts

    def _parts(self, run: Run) -> Iterator[tuple[str, Source]]:
        """The test images by the part of the results they are for."""
        test = self.dataset(run.dataset).test
        tests = {"test": test}
        if self.protocol.source is None:
            tests = {"base": half(test, new=False), "new": half(test, new=True)}
        for part, images in tests.items():
            yield part, images if self.config.limit is None else limit(images, self.config.limit)

    def _evaluate(self, predictor: Predictor, test: Source, clock: Clock) -> dict[str, float | int]:
        """Measures of the predictions for test images; those that cannot be read are left out."""
        specs = tuple(predictor.fitted.method.views(predictor.fitted.config))
        if specs not in self._providers:
            provider = FeatureProvider(self.model, specs, self.cache, fixed_batch=True, on_error=self._report)
            self._providers[specs] = provider
        usable, answers = [], []

        def timed(blocks: Iterator[Block]) -> Iterator[Block]:
            while True:
                with clock("features"):
                    block = next(blocks, None)
                if block is None:
                    return
                yield block
                bar.step(len(block.indices))

        with Bar("test images", len(test)) as bar, clock("predict"):
            pixels = predictor.fitted.inputs == "pixels"
            blocks = self._providers[specs].blocks(test.images, pixels=pixels)
            for block, probabilities in predictor.stream(timed(blocks)):
                usable.append(block.indices)
                answers.append(probabilities.cpu())
        if not usable:
            raise SelfTPTError(f"none of the {len(test)} test images can be read, the first is {test.images[0]}")
        return measure(torch.cat(answers), torch.tensor(test.labels)[torch.cat(usable)])

    def _report(self, error: ImageError) -> None:
        self._unreadable += 1
        self.on_error(error)


class Clock:
    """Seconds by stage: `with clock("learn"): ...`. Time in an inner stage does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stages: list[str] = []
        self._begin = 0.0

    def __call__(self, stage: str) -> Clock:
        self._turn()
        self._stages.append(stage)
        return self

    def _turn(self) -> None:
        """Count the time since the last turn for the current stage."""
        now = time.monotonic()
        if self._stages:
            self.seconds[self._stages[-1]] = self.seconds.get(self._stages[-1], 0.0) + now - self._begin
        self._begin = now

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._turn()
        self._stages.pop()
