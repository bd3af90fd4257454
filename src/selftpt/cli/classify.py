"""`selftpt classify`: stages 2 and 3 in one, the adapted classifier kept."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from selftpt.cli.options import (
    CacheOptions,
    Images,
    Json,
    ModelOptions,
    Names,
    NamesFile,
    PromptFile,
    read_names,
    with_settings,
)
from selftpt.cli.predict import Format, FormatOption, listed, one_format, show_classified
from selftpt.config import AdaptConfig, PredictConfig
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from selftpt.classifier import Classifier
    from selftpt.data.cache import Cache
    from selftpt.models import Model
    from selftpt.prompt import Prompt


@with_settings(options=ModelOptions, caching=CacheOptions, predicting=PredictConfig, adapting=AdaptConfig)
def command(
    images: Images,
    options: ModelOptions,
    caching: CacheOptions,
    adapting: AdaptConfig,
    predicting: PredictConfig,
    prompt: PromptFile = None,
    zero_shot: Annotated[
        bool, typer.Option("--zero-shot", help="'a photo of a ...' and no stage 2, to compare")
    ] = False,
    names: Names = None,
    names_file: NamesFile = None,
    format: FormatOption = Format.table,
    as_json: Json = False,
) -> None:
    """Adapt to a list of class names and classify images. The second time, adapting is skipped."""
    if zero_shot and prompt is not None:
        raise SelfTPTError("--zero-shot uses no prompt: leave one of --zero-shot and --prompt out")
    form = one_format(format, as_json)
    wanted = read_names(names, names_file)
    paths = listed(images)
    if zero_shot:
        from selftpt import adaptation

        classifier = adaptation.zero_shot(options.load(), wanted, chunk=adapting.chunk)
    else:
        learned = options.prompt(prompt)
        model = options.load(learned.model, f"the prompt {prompt}")
        classifier = adapted(model, learned, wanted, adapting, caching.cache())
    show_classified(classifier, paths, predicting, form)


def adapted(model: Model, prompt: Prompt, names: list[str], config: AdaptConfig, cache: Cache) -> Classifier:
    """The classifier for these names, from the cache if it was made before."""
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
                print(f"note: the cached classifier is not used: {error}", file=sys.stderr)
        else:
            class_tokens(model.text.tokenizer, names, len(prompt.context), prompt.contrast)  # warns of equal names
            cache.touch(file)
            print("note: the classifier for these names is in the cache: no adaptation needed", file=sys.stderr)
            return classifier
    classifier = adapt(model, prompt, names, config)
    if cache.writes:
        try:
            classifier.save(file)
            cache.evict()
        except SelfTPTError as error:
            print(f"note: the classifier is not cached: {error}", file=sys.stderr)
    return classifier
