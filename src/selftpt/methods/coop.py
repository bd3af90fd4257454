"""CoOp: the prompt learns by cross-entropy alone, and is used as it is."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from selftpt.adaptation import adapt
from selftpt.config import AdaptConfig, LearnConfig, setting
from selftpt.errors import SelfTPTError
from selftpt.methods.method import Fitted, Job, Method

Recipe = Literal["paper", "coop"]
MANY = 500  # classes of ImageNet's base half, from which on CoOp takes 50 epochs


@dataclass(frozen=True)
class Settings:
    """Cross-entropy alone, in the set-up of the Self-TPT paper or in CoOp's own."""

    learn: LearnConfig = field(default_factory=lambda: LearnConfig(cpt=0, gm=0))
    recipe: Recipe = setting("paper", "whose batch and epochs, where learn does not change them: paper or coop")

    def __post_init__(self) -> None:
        if self.recipe not in get_args(Recipe):
            raise SelfTPTError(f"recipe must be one of {', '.join(get_args(Recipe))}, not {self.recipe!r}")


def coops_own(learn: LearnConfig, shots: int, classes: int) -> LearnConfig:
    """`learn` with CoOp's batch and epochs for so many shots and classes, each if it is still the default.

    All else that CoOp's few-shot recipe has, its rate too, is the default already.
    """
    long = 50 if shots == 1 or classes >= MANY else 100 if shots <= 4 else 200
    batch = 32 if learn.batch == LearnConfig.batch else learn.batch
    epochs = long if learn.epochs == LearnConfig.epochs else learn.epochs
    return dataclasses.replace(learn, batch=batch, epochs=epochs)


def fit(job: Job, settings: Settings) -> Fitted:
    """Stage 1 without CPT and GM, no stage 2."""
    learn = settings.learn
    if settings.recipe == "coop":
        few = job.teacher.few(learn.shots, learn.seed)
        learn = coops_own(learn, max(Counter(few.labels).values()), len(few.names))
    prompt = job.prompt(learn)
    return lambda names, _template: adapt(job.model, prompt, names, AdaptConfig(steps=0))


COOP = Method(
    "coop",
    "a prompt learned by cross-entropy",
    "Zhou et al., IJCV 2022",
    Settings(),
    fit,
    papers_epochs=lambda settings: settings.recipe == "paper",
)
