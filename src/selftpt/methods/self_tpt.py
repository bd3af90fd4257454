"""Self-TPT, and Self-TPT-v, which also uses 63 random crops of each image."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from selftpt.adaptation import adapt
from selftpt.classifier import Classifier, merge_views
from selftpt.config import AdaptConfig, Config, LearnConfig, setting
from selftpt.data.views import ViewSpec, image_and_crops
from selftpt.learning import prompt_training
from selftpt.methods.method import FitContext, FittedMethod, Method, PredictFunction, always
from selftpt.models.tokenizer import class_tokens
from selftpt.prompt import Prompt
from selftpt.training import Training


@dataclass(frozen=True)
class SelfTptConfig(Config):
    """Settings of stages 1 and 2."""

    learn: LearnConfig = field(default_factory=LearnConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    own_template: bool = setting(
        False, "start the prompt from the words of the dataset's template, and use it as the hand-crafted view"
    )


@dataclass(frozen=True)
class SelfTptVConfig(SelfTptConfig):
    """Settings of stages 1 and 2, and the views of stage 3."""

    views: int = setting(64, "views of an image: itself and random crops", above=0)
    confidence_ratio: float = setting(
        1.0, "share of the views that is averaged, the most confident ones", above=0, maximum=1
    )


PROMPT_TENSORS = {"context": "M d", "w1": "E D", "b1": "E", "w2": "F E", "b2": "F"}


def learn_config(_context: FitContext, config: Any) -> LearnConfig:
    """Return the configuration of stage 1."""
    learn: LearnConfig = config.learn
    return learn


def templated_learn_config(context: FitContext, config: SelfTptConfig) -> LearnConfig:
    """Return the configuration of stage 1, with the template of the dataset if `own_template` is set."""
    if not config.own_template:
        return config.learn
    words = context.template.partition("{}")[0].strip()
    contrast = dataclasses.replace(config.learn.contrast, template=context.template)
    return dataclasses.replace(config.learn, words=words or config.learn.words, contrast=contrast)


def train(context: FitContext, config: LearnConfig) -> Training:
    """Prepare stage 1."""
    tokens = class_tokens(context.model.text.tokenizer, context.source.names, config.length, config.contrast)
    return prompt_training(context.model, tokens, *context.features(config), config)


def prompt_of(fitted: FittedMethod) -> Prompt:
    """Return the prompt of a method that was fitted with `train`."""
    origin = {"stage": "learn", "method": fitted.method.name, "classes": fitted.data["classes"]}
    return Prompt.of(fitted.tensors, fitted.config.learn.contrast, fitted.model_id, origin)


def classify(fitted: FittedMethod, names: Sequence[str], template: str) -> Classifier:
    """Run stage 2."""
    config: SelfTptConfig = fitted.config
    stage_2 = config.adapt
    if config.own_template and stage_2.template is None:
        stage_2 = dataclasses.replace(stage_2, template=template)
    return adapt(fitted.model, prompt_of(fitted), names, stage_2)


def classify_views(fitted: FittedMethod, names: Sequence[str], template: str) -> PredictFunction:
    """Run stage 2, and make a function that averages over the most confident views of an image."""
    classifier = classify(fitted, names, template)

    def probabilities(features: Tensor) -> Tensor:
        return merge_views(classifier.probabilities(features), fitted.config.confidence_ratio)

    return probabilities


def views(config: SelfTptVConfig) -> list[ViewSpec]:
    return image_and_crops(config.views)


SELF_TPT = Method(
    "self-tpt",
    SelfTptConfig(),
    classify,
    train,
    templated_learn_config,
    tensors=PROMPT_TENSORS,
    uses_protocol_epochs=always,
)
SELF_TPT_V = Method(
    "self-tpt-v",
    SelfTptVConfig(),
    classify_views,
    train,
    templated_learn_config,
    views=views,
    inputs="views",
    tensors=PROMPT_TENSORS,
    uses_protocol_epochs=always,
)
