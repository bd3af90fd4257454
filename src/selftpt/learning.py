"""Stage 1: learn a prompt on source data with cross-entropy, CPT and gradient matching."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from selftpt.config import VIEWS, LearnConfig
from selftpt.data.cache import Cache, code_digest, content_digest
from selftpt.data.decoding import ImageError, warn_of
from selftpt.data.sources import Source, SourceLike
from selftpt.errors import check_type
from selftpt.files import check_writable, digest
from selftpt.gradients import with_gradients
from selftpt.losses import Head
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import ClassTokens, class_tokens
from selftpt.objective import Batch, Task, joint_step
from selftpt.prompt import Prompt, initial_context, initial_head
from selftpt.training import Losses, RunFiles, State, Training, source_features
from selftpt.version import __version__

PARAMETERS = ("context", *Head._fields)


@with_gradients
def learn(
    model: Model,
    source: Source | SourceLike,
    config: LearnConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    initial: Mapping[str, Tensor] | None = None,
    cache: Cache | None = None,
    on_error: Callable[[ImageError], None] = warn_of,
) -> Prompt:
    """Learn a prompt from labelled images.

    Args:
        model: The frozen model.
        source: A `Source`, or anything that `Source.read` accepts: a folder with one folder per class, a CSV file of
            paths and class names, a torchvision dataset, or a Hugging Face dataset.
        config: The configuration; by default the paper's.
        out: The file to which the prompt is written. Two files are written next to it: `OUT.log.jsonl` with one line
            per step, and, during training, `OUT.checkpoint`, from which an interrupted run resumes bitwise-identically.
        initial: Initial values of `context` [M, d] or of the head's `w1`, `b1`, `w2`, `b2`.
        cache: Where image features are cached; by default the user's cache folder.
        on_error: Called for every image that cannot be used; the image is then left out. By default a warning is
            issued.

    Returns:
        The learned prompt.

    Raises:
        SelfTPTError: The source or an argument is invalid, `out` cannot be written, or the loss diverges.

    Example:
        >>> import selftpt
        >>> model = selftpt.load_model()
        >>> prompt = selftpt.learn(model, "photos/", out="prompt.safetensors")  # doctest: +SKIP
    """
    config = config or LearnConfig()
    check_type(model, Model, "model")
    check_type(config, LearnConfig, "config")
    if cache is not None:
        check_type(cache, Cache, "cache")
    path = Path(out) if out is not None else None
    if path:
        check_writable(path)
    few = Source.read(source).few(config.shots, config.seed)
    tokens = class_tokens(model.text.tokenizer, few.names, config.length, config.contrast)
    features, labels = source_features(model, few, config, cache or Cache(), on_error)
    return learn_from_features(model, tokens, features, labels, config, path, initial)


@with_gradients
def learn_from_features(
    model: Model,
    tokens: ClassTokens,
    features: Tensor,
    labels: Tensor,
    config: LearnConfig,
    out: Path | None = None,
    initial: Mapping[str, Tensor] | None = None,
    optional: bool = False,
) -> Prompt:
    """Learn a prompt from image features.

    Args:
        model: The frozen model.
        tokens: The class names.
        features: L2-normalised features of crops of each image, [N, crops, D]; each epoch uses the next crop.
        labels: [N].
        config: The configuration.
        out: As in `learn`.
        initial: As in `learn`.
        optional: Whether to warn instead of raising an error if a file cannot be written.
    """
    training = prompt_training(model, tokens, features, labels, config)
    training.start_from(initial or {})
    settings = dataclasses.asdict(config)
    key = _run_key(model, tokens, features, labels, settings, initial)
    files = RunFiles(out, key, model.id.random_init, optional)
    origin = {
        "stage": "learn",
        "settings": settings,
        "classes": list(tokens.names),
        "images": len(labels),
        "selftpt": __version__,
    }
    prompt = Prompt.of(training.run(files), config.contrast, model.id, origin)
    files.finish(prompt.save)
    return prompt


@with_gradients
def prompt_training(
    model: Model, tokens: ClassTokens, features: Tensor, labels: Tensor, config: LearnConfig
) -> Training:
    """Prepare the training run of stage 1, whose parameters are the context [M, d] and the head.

    Args:
        model: The frozen model.
        tokens: The class names.
        features: L2-normalised features of crops of each image, [N, crops, D].
        labels: [N].
        config: The configuration.
    """
    device = model.device
    generator = torch.Generator().manual_seed(config.seed)
    context = initial_context(model, config.length, config.words, generator)
    head = initial_head(model.dimension, config.hidden or model.dimension, config.projection, generator)
    parameters = [tensor.to(device) for tensor in (context, *head)]
    state = State.sgd(parameters, config, remembers={"average": parameters[0]})
    lists = ClassLists(model, tokens, config)

    def gradients(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        task, classes = lists.draw(labels[chosen].tolist(), f"classes {config.seed} {epoch} {number}")
        crops = features[chosen, epoch % features.shape[1]]
        batch = Batch(crops.to(device), classes.to(device), model.scale)
        prompt, *rest = state.parameters
        result = joint_step(task, prompt, Head(*rest), batch, state.memory.get("average"), config)
        state.memory["average"] = result.average_gradient
        return result.losses, [result.prompt_gradient, *result.head_gradients]

    return Training(PARAMETERS, state, gradients, len(labels), config)


def _run_key(
    model: Model,
    tokens: ClassTokens,
    features: Tensor,
    labels: Tensor,
    settings: Mapping[str, object],
    initial: Mapping[str, Tensor] | None,
) -> str:
    """Return a digest of everything that determines the result; only a checkpoint with the same digest is resumed."""
    hashes = [(name, content_digest(tensor)) for name, tensor in {"": features, **(initial or {})}.items()]
    return digest(code_digest(), model.id.digest, settings, tokens.names, hashes, labels.tolist())


class ClassLists:
    """Provides the class list of each step: all classes, or those of the batch and a random sample of the others.

    Args:
        model: The frozen model.
        tokens: All class names.
        config: Its `classes_per_step` is the number of classes of a step; None uses all.
    """

    def __init__(self, model: Model, tokens: ClassTokens, config: LearnConfig) -> None:
        self.model, self.tokens, self.config = model, tokens, config
        self.hand_crafted = None
        if config.contrasts and "hand_crafted" in config.contrast.views:
            self.hand_crafted = encode_template(model.text, tokens, config.contrast.template, config.chunk)
        self.all = None if config.classes_per_step else self._task(tokens, self.hand_crafted)

    def _task(self, tokens: ClassTokens, hand_crafted: Tensor | None) -> Task:
        config = self.config
        contrasted = config.contrast.learned if config.contrasts else ()
        views = [view for view in VIEWS if view == "end" or view in contrasted]  # Eq. 2 uses the end view
        encoder = TextEncoder(self.model.text, tokens, config.length, views, chunk=config.chunk)
        return Task(encoder, hand_crafted, tokens.name_ids.to(self.model.device), config.contrast)

    def draw(self, labels: Sequence[int], seed: str) -> tuple[Task, Tensor]:
        """Return the class list of a step, and the labels [B] of the batch as indices into it."""
        if self.all is not None:
            return self.all, torch.tensor(labels)
        in_batch = sorted(set(labels))
        others = sorted(set(range(len(self.tokens))) - set(in_batch))
        count = max(0, (self.config.classes_per_step or 0) - len(in_batch))
        chosen = in_batch + random.Random(seed).sample(others, min(count, len(others)))
        hand_crafted = (
            None
            if self.hand_crafted is None
            else self.hand_crafted[torch.tensor(chosen, device=self.hand_crafted.device)]
        )
        return self._task(self.tokens.subset(chosen), hand_crafted), torch.tensor(
            [chosen.index(label) for label in labels]
        )
