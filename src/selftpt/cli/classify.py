"""`selftpt classify`: adapt and predict (stages 2 and 3) in one command. The adapted classifier is cached."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from selftpt.cli.adapt import note_unused_template
from selftpt.cli.options import (
    METHOD,
    CacheOptions,
    Images,
    Json,
    ModelOptions,
    Names,
    NamesFile,
    PromptFile,
    note,
    read_classes,
    with_settings,
)
from selftpt.cli.predict import Format, FormatOption, chosen_format, find_inputs, print_predictions
from selftpt.config import AdaptConfig, ContrastConfig, PredictConfig
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from selftpt.classifier import Classifier, Prediction
    from selftpt.data.cache import Cache
    from selftpt.models import Model
    from selftpt.prompt import Prompt

UNSURE = 0.36  # normalised entropy above which the note on templates is printed
ENOUGH_IMAGES = 8


@with_settings(options=ModelOptions, caching=CacheOptions, predicting=PredictConfig, adapting=AdaptConfig)
def command(
    images: Images,
    options: ModelOptions,
    caching: CacheOptions,
    adapting: AdaptConfig,
    predicting: PredictConfig,
    prompt: PromptFile = None,
    zero_shot: Annotated[
        bool,
        typer.Option(
            "--zero-shot",
            help="Use the template alone, without a prompt and without adaptation.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    names: Names = None,
    names_file: NamesFile = None,
    format: FormatOption = Format.table,
    as_json: Json = False,
) -> None:
    """Adapt to a list of class names and classify images. The adapted classifier is cached."""
    if zero_shot and prompt is not None:
        raise SelfTPTError("--zero-shot uses no prompt: give either --zero-shot or --prompt")
    chosen = chosen_format(format, as_json)
    classes = read_classes(names, names_file)
    paths = find_inputs(images)
    if zero_shot:
        from selftpt import adaptation

        template = adapting.template or ContrastConfig.template
        classifier = adaptation.zero_shot(options.load(), classes.names, template, adapting.chunk)
        is_default = template == ContrastConfig.template
    else:
        learned = options.prompt(prompt)
        note_unused_template(learned, adapting)
        model = options.load(learned.model, f"the prompt {prompt}")
        classifier = adapted(model, learned, classes.names, adapting, caching.cache())
        used = adapting.template or learned.contrast.template
        is_default = "hand_crafted" in learned.contrast.views and used == ContrastConfig.template
    classes.note_unused("classify")
    entropies: list[float] = []
    everything = dataclasses.replace(predicting, top=len(classifier.names))

    def cut(predictions: Iterator[Prediction]) -> Iterator[Prediction]:
        """Record the entropy of each prediction, then keep its `top` classes."""
        for prediction in predictions:
            entropies.append(normalised_entropy(prediction.probabilities))
            yield dataclasses.replace(
                prediction,
                names=prediction.names[: predicting.top],
                probabilities=prediction.probabilities[: predicting.top],
                labels=prediction.labels[: predicting.top],
            )

    print_predictions(
        lambda report: cut(classifier.iter_predict(paths, config=everything, on_error=report)),
        paths,
        chosen,
        classifier.model_id.random_init,
    )
    if is_default and is_unsure(entropies) and not classifier.model_id.random_init:
        note(
            f"the predictions are uncertain (mean normalised entropy {sum(entropies) / len(entropies):.2f}): if the "
            "images are not ordinary photographs, a template for their domain may help, such as "
            "--template 'a centered satellite photo of {}.'"
        )


def normalised_entropy(probabilities: Sequence[float]) -> float:
    """Compute the entropy of the probabilities of all classes, divided by that of the uniform distribution."""
    if len(probabilities) < 2:
        return 0.0
    return -sum(p * math.log(p) for p in probabilities if p > 0) / math.log(len(probabilities))


def is_unsure(entropies: Sequence[float]) -> bool:
    """Return whether there are enough images to judge, and their mean normalised entropy is high."""
    return len(entropies) >= ENOUGH_IMAGES and sum(entropies) / len(entropies) > UNSURE


def adapted(model: Model, prompt: Prompt, names: list[str], config: AdaptConfig, cache: Cache) -> Classifier:
    """Return the classifier for these names: from the cache, or adapted now and then cached."""
    from selftpt.adaptation import adapt
    from selftpt.classifier import Classifier
    from selftpt.data.cache import code_digest
    from selftpt.files import digest, set_aside
    from selftpt.models.tokenizer import class_tokens

    key = digest(code_digest(), model.id.digest, prompt.digest, names, dataclasses.asdict(config))
    file = cache.folder / "classifiers" / f"{key}.safetensors"
    if cache.reads and os.path.exists(file):
        try:
            classifier = Classifier.load(file, model)
        except SelfTPTError as error:
            if cache.writes:
                set_aside(file, str(error))
            else:
                note(f"the cached classifier is not used: {error}")
        else:
            template = config.template or prompt.contrast.template
            contrast = dataclasses.replace(prompt.contrast, template=template)
            class_tokens(
                model.text.tokenizer, names, len(prompt.context), contrast
            )  # only for its warning of equal names
            cache.touch(file)
            note("the classifier for these names is in the cache: adaptation is skipped")
            return classifier
    classifier = adapt(model, prompt, names, config)
    if cache.writes:
        try:
            classifier.save(file)
            cache.evict()
        except SelfTPTError as error:
            note(f"the classifier is not cached: {error}")
    return classifier
