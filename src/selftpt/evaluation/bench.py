"""Benchmarks: fit and test methods by a protocol, one record for each method, dataset and seed."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from selftpt.config import ContrastConfig
from selftpt.data.cache import Cache
from selftpt.data.decoding import ImageError, warn_of
from selftpt.data.features import Block, FeatureProvider
from selftpt.data.sources import Source
from selftpt.data.views import ViewSpec
from selftpt.errors import SelfTPTError
from selftpt.evaluation.memory import peak_megabytes, reset_peak
from selftpt.evaluation.metrics import all_metrics, harmonic_mean
from selftpt.evaluation.planning import Plan, Run
from selftpt.evaluation.records import Record
from selftpt.evaluation.runs import Runs
from selftpt.files import digest
from selftpt.methods import METHODS, FitContext, FittedMethod, Predictor
from selftpt.methods.selection import fit_prompt
from selftpt.models import Model
from selftpt.progress import Bar
from selftpt.prompt import Prompt
from selftpt.version import __version__

POLL_SECONDS = 1.0  # between checks of runs that other processes have claimed
VERSIONS = ("selftpt", "torch", "torchvision", "open_clip_torch", "timm", "pillow")


@dataclass(frozen=True)
class GivenPrompt:
    """A prompt that methods use instead of learning one.

    Attributes:
        prompt: The prompt.
        source: Where it is from: a file, or "embedded".
    """

    prompt: Prompt
    source: str


@dataclass
class Bench:
    """Runs a plan with one model and adds a record of each run to a folder.

    Args:
        model: The model.
        plan: What is run.
        recorded: The folder of records.
        on_error: Called for every image that cannot be used.
        cache: Where image features are cached.
        prompt: A prompt that is used instead of learning one.

    Raises:
        SelfTPTError: The prompt was learned for another model.
    """

    model: Model
    plan: Plan
    recorded: Runs
    on_error: Callable[[ImageError], None] = warn_of
    cache: Cache = field(default_factory=Cache)
    prompt: GivenPrompt | None = None

    def __post_init__(self) -> None:
        assert self.plan.given_prompt == (self.prompt is not None)
        if self.prompt:
            self.prompt.prompt.check(self.model)
        self._fitted: tuple[object, FittedMethod, int] | None = None
        self._unreadable = 0
        self._keys: dict[Run, str] = {}
        self._providers: dict[tuple[ViewSpec, ...], FeatureProvider] = {}

    def facts(self, run: Run) -> Record:
        """Return the part of the record of a run that is known before the run, without its key."""
        plan = self.plan
        data, source = plan.dataset(run.dataset), plan.source_of(run)
        settings = dataclasses.asdict(plan.settings(run))
        facts = {
            "protocol": plan.name,
            "method": run.method,
            "dataset": data.name,
            "seed": run.seed,
            "model": dataclasses.asdict(self.model.id),
            "precision": self.model.precision,
            "device": str(self.model.device),
            "random_init": self.model.id.random_init,
            "template": data.template if plan.protocol.uses_dataset_template else ContrastConfig.template,
            "source": source and source[1],
            "settings": settings,
            "changes": plan.changes_of(run),
        }
        if self.prompt:
            del settings["learn"]  # nothing is learned
            facts["prompt"] = {"source": self.prompt.source, "digest": self.prompt.prompt.digest}
        return facts

    def last_seconds(self, run: Run) -> float | None:
        """Return how many seconds the latest recorded run took that differs only in its seed; None if there is none."""
        return self.recorded.last_seconds({**self.facts(run), "data": {"limit": self.plan.config.limit}})

    def key(self, run: Run) -> str:
        """Identify a run: a digest of what is run, with what, and on which images."""
        if run not in self._keys:
            facts = self.facts(run)
            if self.prompt:
                facts["prompt"] = facts["prompt"]["digest"]
            data = METHODS[run.method].data(self.plan.settings(run))
            self._keys[run] = digest(__version__, facts, *self.plan.images_of(run), *([data] if data else []))
        return self._keys[run]

    def do_all(
        self, runs: Sequence[Run], on_wait: Callable[[Sequence[Run]], None] = lambda _runs: None
    ) -> Iterator[tuple[Run, Record | SelfTPTError | None]]:
        """Do each run once, also if other processes work on the same folder.

        Runs that another process has claimed come last: this process waits for them, and does those that the other
        process did not complete.

        Args:
            runs: The runs.
            on_wait: Called once with the runs that are waited for, when no other run is left.

        Yields:
            Each run with its record, with the error that it failed with, or with None if another process recorded it.
        """
        left, waiting = [(run, self.key(run)) for run in runs], False
        while left:
            claimed = []
            for run, key in left:
                result: Record | SelfTPTError | None = None
                with self.recorded.claim(key) as mine:
                    if mine:
                        try:
                            result = self.do(run)
                        except SelfTPTError as error:
                            result = error
                if result is None and key not in self.recorded.done():
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
        """Do one run: learn, adapt, predict, and compute the metrics.

        Returns:
            The record that was added to the folder, or the existing one if another process recorded the run first.
        """
        facts, data = self.facts(run), self.plan.dataset(run.dataset)
        reset_peak(self.model.device)
        encoded, clock = self.model.encoded, Clock()
        fitted, unreadable = self._fit(run, clock)
        self._unreadable = 0
        results: dict[str, Any] = {}
        for part, test in self.plan.test_sets(run):
            with clock("adapt"):
                predictor = fitted.for_classes(test.names, facts["template"])
            results[part] = self._evaluate(predictor, test, clock)
        if "new" in results:
            results["harmonic"] = harmonic_mean(results["base"]["top1"], results["new"]["top1"])
        return self.recorded.add(
            {
                **facts,
                "source": facts["source"] and {**facts["source"], "unreadable": unreadable},
                "data": {
                    "split": data.split,
                    "published": data.published,
                    "limit": self.plan.config.limit,
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

    def _fit(self, run: Run, clock: Clock) -> tuple[FittedMethod, int]:
        """Fit the method, or reuse the fit of the previous run if method, seed and source are the same.

        Returns:
            The fitted method, and the number of training images that could not be used.
        """
        method, settings, source = METHODS[run.method], self.plan.settings(run), self.plan.source_of(run)
        if self.prompt:
            return fit_prompt(method, self.model, self.prompt.prompt, settings), 0
        folder = self.recorded.folder / "learned"
        template = self.facts(run)["template"]
        context = FitContext(
            self.model, source and source[0], folder, cache=self.cache, on_error=self._report, template=template
        )
        if source is None:
            return method.fit(context, settings), 0
        key = run.method, run.seed, self.plan.protocol.source or run.dataset
        if self._fitted is None or self._fitted[0] != key:
            with clock("learn"):
                fitted = method.fit(context, settings)
            self._fitted = key, fitted, context.unreadable
        return self._fitted[1:]

    def _evaluate(self, predictor: Predictor, test: Source, clock: Clock) -> dict[str, float | int]:
        """Compute the metrics on the test images that can be read."""
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
        return all_metrics(torch.cat(answers), torch.tensor(test.labels)[torch.cat(usable)])

    def _report(self, error: ImageError) -> None:
        self._unreadable += 1
        self.on_error(error)


class Clock:
    """Measures seconds by stage: `with clock("learn"): ...`. An inner stage does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stages: list[str] = []
        self._begin = 0.0

    def __call__(self, stage: str) -> Clock:
        self._count()
        self._stages.append(stage)
        return self

    def _count(self) -> None:
        """Add the time since the last call to the current stage."""
        now = time.monotonic()
        if self._stages:
            self.seconds[self._stages[-1]] = self.seconds.get(self._stages[-1], 0.0) + now - self._begin
        self._begin = now

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._count()
        self._stages.pop()
