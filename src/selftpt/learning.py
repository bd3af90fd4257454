"""Stage 1: soft prompts are learned on source data with cross-entropy, CPT and gradient matching."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from selftpt.config import VIEWS, LearnConfig
from selftpt.data.decoding import ImageError, warn_of
from selftpt.data.sources import Source, read_folder
from selftpt.files import check_writable, digest
from selftpt.losses import Head
from selftpt.models import Model
from selftpt.models.text import TextEncoder, encode_template
from selftpt.models.tokenizer import ClassTokens, class_tokens
from selftpt.objective import Batch, Task, joint_step
from selftpt.prompt import Prompt, initial_context, initial_head
from selftpt.training import Losses, RunFiles, State, source_features, train
from selftpt.version import __version__


def learn(
    model: Model,
    source: str | os.PathLike[str] | Source,
    config: LearnConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    on_error: Callable[[ImageError], None] = warn_of,
) -> Prompt:
    """Learn a prompt from labelled pictures.

    source: a folder with a folder a class, or a `Source`.
    out: where the prompt is written; beside it `OUT.log.jsonl`, a line a step, and while it learns
    `OUT.checkpoint`, from which a run that was killed goes on to the same bits.
    on_error: is told of every picture that cannot be used; the others go on.
    """
    config = config or LearnConfig()
    path = Path(out) if out is not None else None
    if path:
        check_writable(path)
    few = (source if isinstance(source, Source) else read_folder(source)).few(config.shots, config.seed)
    tokens = class_tokens(model.text.tokenizer, few.names, config.length, config.contrast)
    features, labels = source_features(model, few, config, on_error)
    return learn_from_features(model, tokens, features, labels, config, path)


def learn_from_features(
    model: Model, tokens: ClassTokens, features: Tensor, labels: Tensor, config: LearnConfig, out: Path | None = None
) -> Prompt:
    """Stage 1 proper, which touches no pixel.

    features: [N, crops, D], unit features of crops of each picture, which the epochs take in turn; labels: [N].
    """
    device = model.device
    generator = torch.Generator().manual_seed(config.seed)
    context = initial_context(model, config.length, config.words, generator)
    head = initial_head(model.dimension, config.hidden or model.dimension, config.projection, generator)
    parameters = [tensor.to(device) for tensor in (context, *head)]
    state = State.sgd(parameters, config, remembers={"average": parameters[0]})
    lists = ClassLists(model, tokens, config)

    def step(chosen: Tensor, epoch: int, number: int) -> tuple[Losses, Sequence[Tensor]]:
        task, classes = lists.draw(labels[chosen].tolist(), f"classes {config.seed} {epoch} {number}")
        crops = features[chosen, epoch % features.shape[1]]
        batch = Batch(crops.to(device), classes.to(device), model.scale)
        prompt, *rest = state.parameters
        result = joint_step(task, prompt, Head(*rest), batch, state.memory.get("average"), config)
        state.memory["average"] = result.average
        return result.losses, [result.prompt, *result.head]

    settings = dataclasses.asdict(config)
    content = hashlib.sha256(features.contiguous().numpy().data).hexdigest()
    made_of = digest(__version__, model.id.digest, settings, tokens.names, content, labels.tolist())
    files = RunFiles(out, made_of, model.id.meaningless)
    train(state, step, len(labels), config, files)
    origin = {
        "stage": "learn",
        "settings": settings,
        "classes": list(tokens.names),
        "pictures": len(labels),
        "selftpt": __version__,
    }
    learned = [parameter.detach().cpu() for parameter in state.parameters]
    prompt = Prompt(learned[0], Head(*learned[1:]), config.contrast, model.id, origin)
    files.finish(prompt.save)
    return prompt


class ClassLists:
    """The class list of a step: all classes, or the batch's own and others drawn at random."""

    def __init__(self, model: Model, tokens: ClassTokens, config: LearnConfig) -> None:
        self.model, self.tokens, self.config = model, tokens, config
        self.hand = None
        if config.contrasts and "hand" in config.contrast.views:
            self.hand = encode_template(model.text, tokens, config.contrast.template, config.chunk)
        self.all = None if config.classes_per_step else self._task(tokens, self.hand)

    def _task(self, tokens: ClassTokens, hand: Tensor | None) -> Task:
        config = self.config
        contrasted = config.contrast.learned if config.contrasts else ()
        views = [view for view in VIEWS if view == "end" or view in contrasted]  # cross-entropy is of Eq. 2
        encoder = TextEncoder(self.model.text, tokens, config.length, views, chunk=config.chunk)
        return Task(encoder, hand, tokens.same.to(self.model.device), config.contrast)

    def draw(self, labels: Sequence[int], seed: str) -> tuple[Task, Tensor]:
        """The step's class list, and the labels [B] in it."""
        if self.all is not None:
            return self.all, torch.tensor(labels)
        own = sorted(set(labels))
        others = sorted(set(range(len(self.tokens))) - set(own))
        wanted = max(0, (self.config.classes_per_step or 0) - len(own))
        chosen = own + random.Random(seed).sample(others, min(wanted, len(others)))
        hand = None if self.hand is None else self.hand[torch.tensor(chosen, device=self.hand.device)]
        return self._task(self.tokens.subset(chosen), hand), torch.tensor([chosen.index(label) for label in labels])
