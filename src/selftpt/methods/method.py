"""What a method is: a way from source pictures and class names to probabilities."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selftpt.config import LearnConfig, TrainConfig
from selftpt.data.decoding import ImageError
from selftpt.data.features import FeatureStore, ViewSpec, stamp
from selftpt.data.sources import Source
from selftpt.data.threads import in_threads
from selftpt.errors import SelfTPTWarning
from selftpt.files import digest, read_tensors, write_tensors
from selftpt.learning import learn
from selftpt.models import Model
from selftpt.prompt import Prompt
from selftpt.training import RunFiles, source_features
from selftpt.version import __version__

BLOCK = 4096  # views of pictures whose features are in memory at once
PIXELS = 256  # and views whose pixels are

Predictor = Callable[[Tensor], Tensor]  # what pictures show [N, V, D or 3, S, S] to probabilities [N, C]
Fitted = Callable[[Sequence[str], str], Predictor]  # class names [C], and the dataset's sentence with {} for a name


@dataclass
class Job:
    """What a method is given to learn from. What it learns is kept in `folder`, and found there the next time.

    unreadable: how many pictures of the source could not be used.
    """

    model: Model
    source: Source | None
    folder: Path
    on_error: Callable[[ImageError], None]
    unreadable: int = 0

    @property
    def teacher(self) -> Source:
        """The source, which a method that learns is always given."""
        assert self.source is not None
        return self.source

    def file(self, kind: str, settings: Any) -> Path:
        """Where is kept what is learned from the source by these settings."""
        pictures = [stamp(path) for path in self.teacher.paths]
        made_of = dataclasses.asdict(settings), self.teacher.names, pictures, self.teacher.labels
        key = digest(__version__, self.model.id.digest, self.model.precision, *made_of)
        return self.folder / f"{kind}-{key}.safetensors"

    def prompt(self, config: LearnConfig) -> Prompt:
        """The prompt that `config` makes of the source."""
        file = self.file("prompt", config)
        before = file.is_file()
        prompt = (
            Prompt.load(file) if before else learn(self.model, self.teacher, config, out=file, on_error=self.on_error)
        )
        self._count(config, prompt.origin["pictures"], file if before else None)
        return prompt

    def learned(
        self,
        kind: str,
        settings: Any,
        make: Callable[[Any, Tensor, RunFiles], dict[str, Tensor]],
        see: Callable[..., tuple[Any, Tensor]] = source_features,
    ) -> dict[str, Tensor]:
        """What `make` learns of the source: of crops' features [N, crops, D], labels [N]; its checkpoints go to files.

        kind: names the file. settings: all that decides the result, with the `learn` of a `TrainConfig`.
        see: `source_crops` for one that learns of pixels.
        """
        file = self.file(kind, settings)
        if file.is_file():
            header, tensors = read_tensors(file, kind)
            self._count(settings.learn, header["pictures"], file)
            return tensors
        config: TrainConfig = settings.learn
        few = self.teacher.few(config.shots, config.seed)
        shown, labels = see(self.model, few, config, self.on_error)
        self._count(config, len(labels), None)
        files = RunFiles(file, digest(file.stem, labels.tolist()), self.model.id.meaningless)
        tensors = {name: tensor.detach().cpu() for name, tensor in make(shown, labels, files).items()}
        header = {
            "model": dataclasses.asdict(self.model.id),
            "meaningless": self.model.id.meaningless,
            "settings": dataclasses.asdict(settings),
            "classes": self.teacher.names,
            "pictures": len(labels),
        }
        files.finish(lambda path: write_tensors(path, kind, tensors, header))
        return tensors

    def _count(self, config: TrainConfig, used: int, file: Path | None) -> None:
        self.unreadable = len(self.teacher.few(config.shots, config.seed).paths) - used
        if file and self.unreadable:
            text = f"{self.unreadable} pictures could not be read when {file} was learned"
            warnings.warn(text, SelfTPTWarning, stacklevel=3)


@dataclass(frozen=True)
class Method:
    """A row of the table of methods.

    settings: its frozen settings, with the defaults of its authors. One that learns from labelled pictures has a
    `TrainConfig` there called `learn`; one that draws anything else has a `seed`.
    fit: the method proper.
    cost: what it does for each picture, in words. needs: what else than the model's image features, in words.
    looks: what it wants to see of a picture. pixels: whether it must see pixels, or the features of the model's own
    image tower will do, which are kept.
    whole: whether it wants all pictures at once, because it adapts to them.
    reads: files besides pictures that decide its answers.
    papers_epochs: whether it learns as long as Self-TPT does in the protocol, or as long as its settings say.
    """

    name: str
    summary: str
    reference: str
    settings: Any
    fit: Callable[[Job, Any], Fitted]
    cost: str = "1 view"
    needs: str = "features"
    looks: Callable[[Any], Sequence[ViewSpec]] = lambda _settings: [ViewSpec()]
    pixels: Callable[[Any, Model], bool] = lambda _settings, _model: False
    whole: bool = False
    reads: Callable[[Any], Sequence[Path]] = lambda _settings: ()
    papers_epochs: Callable[[Any], bool] = lambda _settings: False

    @property
    def learns(self) -> bool:
        """Whether it learns from source pictures."""
        return hasattr(self.settings, "learn")

    @property
    def trains_on(self) -> str:
        """What it learns from, in words."""
        return "labelled pictures" if self.learns else "nothing"

    @property
    def draws(self) -> bool:
        """Whether it has seeds."""
        return self.learns or hasattr(self.settings, "seed")

    def seeded(self, seed: int | None, **learn: Any) -> Any:
        """Its settings with a seed, and others of learning."""
        if self.learns:
            changed = dataclasses.replace(self.settings.learn, seed=seed, **learn)
            return dataclasses.replace(self.settings, learn=changed)
        return dataclasses.replace(self.settings, seed=seed) if self.draws else self.settings


class Eyes:
    """Shows pictures to predictors: features, which are kept, wherever they will do."""

    def __init__(self, model: Model, on_error: Callable[[ImageError], None]) -> None:
        self.model, self.on_error = model, on_error
        self._stores: dict[ViewSpec, FeatureStore] = {}

    def __call__(self, method: Method, settings: Any, paths: Sequence[Path]) -> Iterator[tuple[Tensor, Tensor]]:
        """Block by block, the indices of pictures that can be used [n] and what is shown of them [n, V, ...].

        That is unit features [n, V, D], or pixels, uint8 [n, V, 3, S, S].
        """
        looks = method.looks(settings)
        views = sum(look.views for look in looks)
        pixels = method.pixels(settings, self.model)
        size = max(1, len(paths) if method.whole else (PIXELS if pixels else BLOCK) // views)
        for start in range(0, len(paths), size):
            show = self._pixels if pixels else self._features
            usable, shown = show(looks, paths[start : start + size])
            if len(usable):
                yield start + usable, shown

    def _features(self, looks: Sequence[ViewSpec], paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
        usable, parts = torch.arange(len(paths)), list[Tensor]()
        for look in looks:
            if look not in self._stores:
                self._stores[look] = FeatureStore(self.model, look, self.on_error)
            parts.append(self._stores[look]([paths[i] for i in usable.tolist()]))
            bad = parts[-1].isnan().flatten(1).any(1)
            if bad.any():
                usable, parts = usable[~bad], [part[~bad] for part in parts]
        return usable, torch.cat(parts, 1)

    def _pixels(self, looks: Sequence[ViewSpec], paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
        def cut(path: Path) -> Tensor | ImageError:
            cuts = [look.cut(self.model.preprocess, path) for look in looks]
            errors = [cut for cut in cuts if isinstance(cut, ImageError)]
            return errors[0] if errors else torch.cat([cut for cut in cuts if isinstance(cut, Tensor)])

        usable, shown = [], []
        for i, seen in enumerate(in_threads(cut, paths, ahead=len(paths))):
            if isinstance(seen, ImageError):
                self.on_error(seen)
            else:
                usable.append(i)
                shown.append(seen)
        return torch.tensor(usable, dtype=torch.long), torch.stack(shown) if shown else torch.empty(0)
