"""Plans of benchmarks: which runs there are, with which settings and on which images. No model is needed.

Missing datasets and invalid methods or settings are reported here, before a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selftpt.config import BenchConfig, change, kind_of
from selftpt.data.datasets import DATASETS, Dataset, read_dataset
from selftpt.data.datasets.sampling import fraction, half, limit, some_classes
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError
from selftpt.evaluation.protocols import find_protocol
from selftpt.evaluation.records import Record
from selftpt.methods import METHODS
from selftpt.methods.selection import check_uses_prompt, did_you_mean_setting, find_method

# Settings with an option of their own, which --set cannot change.
OPTION_OF_SETTING = {"seed": "--seeds", "learn.seed": "--seeds", "learn.shots": "--shots"}


@dataclass(frozen=True)
class Run:
    """One method on one dataset with one seed. `seed` is None if the result does not depend on a seed."""

    method: str
    dataset: str
    seed: int | None


@dataclass
class Plan:
    """What a benchmark runs.

    Attributes:
        name: The name of the protocol.
        data: The folder of the paper's datasets; None if only folders of the user's own are used.
        config: How much of the data is used.
        changes: Settings to change, such as `"learn.lr": 0.02`, in the methods that have them.
        source: A dataset to learn from instead of the protocol's source.
        given_prompt: Whether the methods use an existing prompt instead of learning one.

    Raises:
        SelfTPTError: There is no such protocol, or two options exclude each other.
    """

    name: str
    data: Path | None = None
    config: BenchConfig = field(default_factory=BenchConfig)
    changes: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None
    given_prompt: bool = False

    def __post_init__(self) -> None:
        self.protocol = find_protocol(self.name)
        self._datasets: dict[str, Dataset] = {}
        self._sources: dict[tuple[str, int], tuple[Source, Record]] = {}
        if self.given_prompt:
            self._check_nothing_to_learn()
        if self.source is not None:
            if self.protocol.source is None:
                raise SelfTPTError(f"{self.name} learns from the base classes of each dataset: remove --source")
            self.protocol = replace(self.protocol, source=self.source)

    def _check_nothing_to_learn(self) -> None:
        """Raise an error if an option that affects only learning is combined with a given prompt."""
        default = BenchConfig()
        given = ["--source"] if self.source is not None else []
        given += [
            f"--{name.replace('_', '-')}"
            for name in ("shots", "share", "source_classes")
            if getattr(self.config, name) != getattr(default, name)
        ]
        given += [f"--set {key}" for key in self.changes if key.startswith("learn.")]
        if given:
            raise SelfTPTError(f"nothing is learned with --prompt: remove {', '.join(given)}")

    def dataset(self, name: str) -> Dataset:
        """Return a dataset, which is read on first use.

        Raises:
            SelfTPTError: It is missing or incomplete.
        """
        if name not in self._datasets:
            self._datasets[name] = read_dataset(name, self.data)
        return self._datasets[name]

    def check_methods(self, methods: Sequence[str]) -> None:
        """Check the names of methods and the settings to change.

        Raises:
            SelfTPTError: A method or a setting does not exist, a value is not allowed, or a method cannot use the given
                prompt.
        """
        if not methods:
            raise SelfTPTError(f"--methods is empty: give at least one of {', '.join(METHODS)}")
        for name in methods:
            if name not in METHODS:  # all names are checked before the first method is imported
                find_method(name)
        for key in self.changes:
            if key in OPTION_OF_SETTING:
                raise SelfTPTError(f"{key} cannot be changed with --set: use {OPTION_OF_SETTING[key]}")
        if self.given_prompt:
            for name in methods:
                check_uses_prompt(METHODS[name])
        configs = [METHODS[name].config for name in methods]
        for key in self.changes:
            if not any(kind_of(config, key.split(".")) for config in configs):
                hint = did_you_mean_setting(key, configs)
                raise SelfTPTError(
                    f"no setting of {', '.join(methods)} is called {key!r}: {hint}`selftpt methods NAME` lists the "
                    "settings of a method"
                )
        for config in configs:
            change(config, {key: value for key, value in self.changes.items() if kind_of(config, key.split("."))})

    def runs(self, methods: Sequence[str], datasets: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """List the runs, ordered so that each method learns only once per source and seed.

        Raises:
            SelfTPTError: A dataset is missing, a method or a setting is invalid, or a method lacks data that it needs.
        """
        for dataset in datasets:
            count = len(self.dataset(dataset).test.names)
            if self.protocol.source is None and count < 4:
                raise SelfTPTError(f"{dataset} has {count} classes: base-to-new needs at least four, two per half")
        self.check_methods(methods)
        runs = [
            Run(method, dataset, seed)
            for method in methods
            for dataset in datasets
            for seed in (seeds if self._uses_seed(method) else [None])
        ]
        for run in runs:
            self.source_of(run)
            METHODS[run.method].data(self.settings(run))  # raises an error if the method lacks data
        # Base-to-new: all runs of a dataset together, because each dataset is the source of its own runs.
        place = {dataset: i if self.protocol.source is None else 0 for i, dataset in enumerate(datasets)}
        return sorted(runs, key=lambda run: (place[run.dataset], methods.index(run.method), run.seed or 0))

    def _uses_seed(self, name: str) -> bool:
        """Return whether the result of a method depends on a seed."""
        method = METHODS[name]
        return method.uses_seed or (method.needs_labels and not self.given_prompt)

    def settings(self, run: Run) -> Any:
        """Return the configuration of a run's method, with the protocol's epochs, the run's seed and the changes."""
        method = METHODS[run.method]
        changes = self.changes_of(run)
        # All shots, because the source has already been sampled.
        config = method.config if run.seed is None else method.seeded(run.seed, shots=None)
        config = change(config, changes)
        if method.uses_protocol_epochs(config) and "learn.epochs" not in changes:
            config = change(config, {"learn.epochs": self.protocol.epochs})
        return config

    def changes_of(self, run: Run) -> dict[str, Any]:
        """Return the changes to settings that a run's method has."""
        config = METHODS[run.method].config
        return {key: value for key, value in self.changes.items() if kind_of(config, key.split(".")) is not None}

    def source_of(self, run: Run) -> tuple[Source, Record] | None:
        """Return the images to learn from and their entry in the record, or None if the run learns nothing."""
        if self.given_prompt or not METHODS[run.method].needs_labels:
            return None
        assert run.seed is not None
        key = self.protocol.source or run.dataset, run.seed
        if key not in self._sources:
            self._sources[key] = self._sample(self.dataset(key[0]), run.seed)
        return self._sources[key]

    def _sample(self, data: Dataset, seed: int) -> tuple[Source, Record]:
        """Sample the images to learn from, and return them with their entry in the record."""
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

    def test_sets(self, run: Run) -> Iterator[tuple[str, Source]]:
        """Yield the test sets of a run, each with its part of the results: `base` and `new`, or `test`."""
        test = self.dataset(run.dataset).test
        parts = {"test": test}
        if self.protocol.source is None:
            parts = {"base": half(test, new=False), "new": half(test, new=True)}
        for part, images in parts.items():
            yield part, images if self.config.limit is None else limit(images, self.config.limit)

    def images_of(self, run: Run) -> tuple[object, object]:
        """Return JSON values that identify the images that a run learns from and those it is tested on."""
        source = self.source_of(run)
        learned_from = source and self._identify(self.protocol.source or run.dataset, source[0])
        return learned_from, [(part, self._identify(run.dataset, test)) for part, test in self.test_sets(run)]

    def _identify(self, dataset: str, source: Source) -> object:
        root = self.dataset(dataset).root
        # The paper's datasets have the same content in every folder.
        own = None if dataset in DATASETS else str(root.resolve())
        return own, source.names, [os.path.relpath(path, root) for path in source.paths], source.labels
