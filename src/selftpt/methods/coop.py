"""CoOp in the set-up of the Self-TPT paper: the prompt learns by cross-entropy alone, and is used as it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from selftpt.adaptation import adapt
from selftpt.methods.method import Fitted, Job, Method
from selftpt.settings import AdaptConfig, LearnConfig


@dataclass(frozen=True)
class Settings:
    """Cross-entropy alone."""

    learn: LearnConfig = field(default_factory=lambda: LearnConfig(cpt=0, gm=0))


def fit(job: Job, settings: Settings) -> Fitted:
    """Stage 1 without CPT and GM, no stage 2."""
    prompt = job.prompt(settings.learn)
    return lambda names, _template: adapt(job.model, prompt, names, AdaptConfig(steps=0))


COOP = Method(
    "coop", "a prompt learned by cross-entropy", "Zhou et al., IJCV 2022", Settings(), fit, papers_epochs=True
)
