"""What a method is: a way from source pictures and class names to probabilities."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from selftpt.errors import SelfTPTWarning
from selftpt.features import Look, stamp
from selftpt.files import digest
from selftpt.images import PictureError, Source
from selftpt.learning import learn
from selftpt.models import Model
from selftpt.prompt import Prompt
from selftpt.settings import LearnConfig
from selftpt.version import __version__

Predictor = Callable[[Tensor], Tensor]  # features of the views of pictures [N, V, D] to probabilities [N, C]
Fitted = Callable[[Sequence[str], str], Predictor]  # class names [C], and the dataset's sentence with {} for a name


@dataclass
class Job:
    """What a method is given to learn from. What it learns is kept in `folder`, and found there the next time.

    unreadable: how many pictures of the source could not be used.
    """

    model: Model
    source: Source | None
    folder: Path
    on_error: Callable[[PictureError], None]
    unreadable: int = 0

    def file(self, config: LearnConfig) -> Path:
        """Where the prompt that `config` makes of the source is kept."""
        assert self.source is not None
        pictures = [stamp(path) for path in self.source.paths]
        made_of = dataclasses.asdict(config), self.source.names, pictures, self.source.labels
        key = digest(__version__, self.model.id.digest, self.model.precision, *made_of)
        return self.folder / f"prompt-{key}.safetensors"

    def prompt(self, config: LearnConfig) -> Prompt:
        """The prompt that `config` makes of the source."""
        assert self.source is not None
        file = self.file(config)
        before = file.is_file()
        prompt = (
            Prompt.load(file) if before else learn(self.model, self.source, config, out=file, on_error=self.on_error)
        )
        self.unreadable = len(self.source.paths) - prompt.origin["pictures"]
        if before and self.unreadable:
            text = f"{self.unreadable} pictures could not be read when {file} was learned"
            warnings.warn(text, SelfTPTWarning, stacklevel=2)
        return prompt


@dataclass(frozen=True)
class Method:
    """A row of the table of methods.

    settings: its frozen settings, with the defaults of its paper; a field `learn` is filled with seed and epochs.
    fit: the method proper. looks: what it wants to see of a picture.
    """

    name: str
    summary: str
    reference: str
    settings: Any
    fit: Callable[[Job, Any], Fitted]
    looks: Callable[[Any], Sequence[Look]] = lambda _settings: [Look()]

    @property
    def learns(self) -> bool:
        """Whether it learns from source pictures, and so has seeds."""
        return hasattr(self.settings, "learn")
