"""Stage 2: tune a prompt to the class names of a task by minimising the CPT loss, without images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from selftpt.classifier import Classifier
from selftpt.config import VIEWS, AdaptConfig, ContrastConfig, View
from selftpt.errors import SelfTPTError, check_type
from selftpt.gradients import differentiable, with_gradients
from selftpt.losses import Head
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import class_tokens
from selftpt.objective import Task, contrast_step
from selftpt.progress import Bar
from selftpt.prompt import Prompt


@with_gradients
def zero_shot(
    model: Model, names: Sequence[str], template: str = ContrastConfig.template, chunk: int | None = AdaptConfig.chunk
) -> Classifier:
    """Make the zero-shot classifier of a template, without a learned prompt.

    Args:
        model: The model.
        names: Class names, [C].
        template: A template with {} for the class name.
        chunk: Number of classes encoded at once; None encodes all at once.

    Returns:
        A classifier with class vectors [C, D].

    Raises:
        SelfTPTError: The names or the template are invalid, or a name is too long for the model.

    Example:
        >>> import selftpt
        >>> model = selftpt.load_model(device="cpu")
        >>> selftpt.zero_shot(model, ["forest", "river"], template="a centered satellite photo of {}.")
        Classifier(2 classes: 'forest', 'river'; model selftpt-tiny)
    """
    check_type(model, Model, "model")
    contrast = ContrastConfig(template=template)
    tokens = class_tokens(model.text.tokenizer, names, 0, contrast)
    weights = F.normalize(encode_template(model.text, tokens, template, chunk), dim=-1)
    return Classifier.of(model, tokens.names, weights, stage="zero-shot", template=template)


@with_gradients
def adapt(model: Model, prompt: Prompt, names: Sequence[str], config: AdaptConfig | None = None) -> Classifier:
    """Tune a prompt to the class names of a task by CPT, and make its classifier (Algorithm 1, stage 2).

    Args:
        model: The model that the prompt was learned for.
        prompt: A prompt of `learn`, or `Prompt.embedded()`. It is not changed.
        names: Class names, [C].
        config: The configuration; by default the paper's.

    Returns:
        A classifier with class vectors [C, D].

    Raises:
        SelfTPTError: The prompt does not fit the model, the names are invalid, or the loss diverges.

    Example:
        >>> import selftpt
        >>> model = selftpt.load_model(device="cpu")
        >>> selftpt.adapt(model, selftpt.Prompt.embedded(), ["golden retriever", "tabby cat"])
        Classifier(2 classes: 'golden retriever', 'tabby cat'; model selftpt-tiny)
    """
    config = config or AdaptConfig()
    check_type(model, Model, "model")
    check_type(prompt, Prompt, "prompt", "Prompt.load reads a file")
    check_type(config, AdaptConfig, "config")
    prompt.check(model)
    contrast, length, device = prompt.contrast, len(prompt.context), model.device
    if config.template is not None:
        contrast = dataclasses.replace(contrast, template=config.template)
    tokens = class_tokens(model.text.tokenizer, names, length, contrast)
    context = prompt.context.to(device).clone()
    head = Head(*(differentiable(t.to(device)) for t in prompt.head))
    if config.steps:
        hand_crafted = None
        if "hand_crafted" in contrast.views:
            hand_crafted = encode_template(model.text, tokens, contrast.template, config.chunk)
        encoder = TextEncoder(model.text, tokens, length, contrast.learned, chunk=config.chunk)
        task = Task(encoder, hand_crafted, tokens.name_ids.to(device), contrast)
        optimizer = torch.optim.SGD([context], lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
        forwards = config.steps * (
            len(encoder.forwards) + (0 if encoder.single_pass else len(encoder.no_graph_forwards))
        )
        with Bar("adapting", forwards) as bar:
            encoder.on_forward = bar.step
            for _ in range(config.steps):
                loss, context.grad = contrast_step(task, context, head)
                if not math.isfinite(loss):
                    raise SelfTPTError(
                        "the loss of stage 2 is not finite: lower its learning rate (AdaptConfig.lr, --lr)"
                    )
                optimizer.step()
    views: Sequence[View] = ("end",) if config.vectors == "end" else VIEWS
    with torch.no_grad():
        features = TextEncoder(model.text, tokens, length, views, chunk=config.chunk)(context)
    weights = F.normalize(F.normalize(features, dim=-1).mean(0), dim=-1)
    made_by = {"settings": dataclasses.asdict(config), "prompt": dict(prompt.origin)}
    return Classifier.of(model, tokens.names, weights, stage="adapt", **made_by)
