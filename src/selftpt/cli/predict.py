"""`selftpt predict`: classify images (stage 3)."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selftpt.cli.options import (
    DATA,
    METHOD,
    MODEL,
    OUTPUT,
    CacheOptions,
    Changes,
    Images,
    Json,
    ModelOptions,
    Names,
    NamesFile,
    complete_method,
    note,
    parse_setting,
    read_classes,
    with_settings,
)
from selftpt.config import ContrastConfig, PredictConfig, check_template
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from selftpt.classifier import Prediction
    from selftpt.data.decoding import ImageError

    Report = Callable[[ImageError], None]


class Format(StrEnum):
    """The formats of predictions."""

    table = "table"
    jsonl = "jsonl"
    csv = "csv"


FormatOption = Annotated[
    Format, typer.Option("--format", help="The format of the predictions.", rich_help_panel=OUTPUT)
]


@with_settings(options=ModelOptions, caching=CacheOptions, config=PredictConfig)
def command(
    images: Images,
    options: ModelOptions,
    caching: CacheOptions,
    config: PredictConfig,
    classifier: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A classifier that `selftpt adapt` wrote, or hub:USER/REPO.", rich_help_panel=MODEL
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="A method that `selftpt methods` lists, instead of --classifier. It needs --names or --names-file.",
            autocompletion=complete_method,
            rich_help_panel=METHOD,
        ),
    ] = None,
    names: Names = None,
    names_file: NamesFile = None,
    template: Annotated[
        str,
        typer.Option(
            metavar="TEMPLATE",
            help="The template for --method, with {} for the class name.",
            rich_help_panel=METHOD,
        ),
    ] = ContrastConfig.template,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="SOURCE",
            help="Labelled images for a --method that learns, as for `selftpt learn`.",
            rich_help_panel=DATA,
        ),
    ] = None,
    set: Changes = None,
    format: FormatOption = Format.table,
    as_json: Json = False,
) -> None:
    """Classify images with a classifier that `selftpt adapt` wrote (stage 3), or with any other method."""
    chosen = chosen_format(format, as_json)
    if (classifier is None) == (method is None):
        raise SelfTPTError(
            "give either --classifier FILE, which `selftpt adapt` writes, or --method with --names or --names-file"
        )
    if classifier is not None:
        if names or names_file or source or set or template != ContrastConfig.template:
            raise SelfTPTError(
                "--names, --names-file, --template, --source and --set need --method: a classifier file fixes the "
                "names and the method"
            )
        if caching != CacheOptions():
            raise SelfTPTError("--cache-mode and --cache-gb need --method: nothing is cached with --classifier")
        _predict_with_classifier(classifier, images, options, config, chosen)
        return
    if config != PredictConfig(top=config.top):
        raise SelfTPTError(
            "--views, --confidence-ratio, --seed, --batch and --max-megapixels need --classifier: change the settings "
            "of a method with --set"
        )
    check_template(template)
    classes = read_classes(names, names_file)
    paths = list(find_inputs(images))
    changes = dict(parse_setting(text) for text in set or [])
    from selftpt.data.sources import Source
    from selftpt.methods import FitContext
    from selftpt.methods.selection import configure, find_method

    found = find_method(method or "")
    if hasattr(found.config, "descriptors"):
        if classes.descriptions and "descriptors" in changes:
            note("the descriptions of the names file are not used, because --set descriptors replaces them")
        elif classes.descriptions:
            changes["descriptors"] = str(names_file)
    else:
        classes.note_unused(found.name)
    settings = configure(found, changes)
    if found.needs_labels and source is None:
        raise SelfTPTError(
            f"{method} learns from labelled images: give --source, a folder with one folder per class or a CSV file"
        )
    if source is not None and not found.needs_labels:
        raise SelfTPTError(f"{method} does not learn from images: remove --source")
    cache, train_set = caching.cache(), None if source is None else Source.read(source)
    model = options.load()
    context = FitContext(model, train_set, cache=cache, template=template)
    predictor = found.fit(context, settings).for_classes(classes.names, template)
    print_predictions(
        lambda report: predictor.iter_predict(paths, config.top, cache=cache, on_error=report),
        paths,
        chosen,
        model.id.random_init,
    )


def _predict_with_classifier(
    file: Path, images: list[str], options: ModelOptions, config: PredictConfig, format: Format
) -> None:
    paths = find_inputs(images)
    from selftpt.classifier import Classifier
    from selftpt.hub import resolve

    what = f"the classifier {file}"
    loaded = Classifier.load(resolve(file, "classifier"))
    classifier = loaded.with_model(options.load(loaded.model_id, what), what)
    print_predictions(
        lambda report: classifier.iter_predict(paths, config=config, on_error=report),
        paths,
        format,
        classifier.model_id.random_init,
    )


def chosen_format(format: Format, as_json: bool) -> Format:
    """Return the output format; --json is short for --format jsonl.

    Raises:
        SelfTPTError: --json is given with --format csv.
    """
    if as_json and format is Format.csv:
        raise SelfTPTError("--json and --format csv exclude each other: give one of them")
    return Format.jsonl if as_json else format


def find_inputs(images: list[str]) -> Iterable[Path]:
    """Find the images that the arguments name.

    Args:
        images: Files, folders and patterns. If `-` is one of them, the paths are yielded lazily, and those from
            standard input are not checked.

    Returns:
        The paths of the images.

    Raises:
        SelfTPTError: An argument does not exist; with `-`, when it is reached.
    """
    from selftpt.data.sources import find_images

    if "-" in images:
        return find_images(images, sys.stdin)
    return list(find_images(images))


def print_predictions(
    predict: Callable[[Report], Iterator[Prediction]], paths: Iterable[Path], format: Format, random_init: bool
) -> None:
    """Print predictions as they are made.

    Args:
        predict: Function from an error callback to predictions. The callback gets the error of each image that cannot
            be used.
        paths: The images; a list if their number is known.
        format: The output format.
        random_init: Whether the model has random weights; the output then says so.

    Raises:
        SelfTPTError: No image could be used.
    """
    failed: list[ImageError] = []
    is_single = isinstance(paths, list) and len(paths) == 1

    def report(error: ImageError) -> None:
        failed.append(error)
        if not is_single:
            note(f"skipped {error}")

    predictions = predict(report)
    if format is Format.table or not sys.stdout.isatty():  # otherwise the printed lines show the progress
        predictions = _with_bar(predictions, len(paths) if isinstance(paths, list) else None)
    done = PRINTERS[format](predictions, random_init)
    if not done:
        none = f"no image could be used ({len(failed)} failed)" if failed else "no image was given"
        raise SelfTPTError(str(failed[0]) if is_single else none)
    if failed:
        note(f"{len(failed)} of {len(failed) + done} images were skipped")


def _with_bar(predictions: Iterable[Prediction], total: int | None) -> Iterator[Prediction]:
    from selftpt.progress import Bar

    with Bar("predicting", total) as bar:
        for prediction in predictions:
            yield prediction
            bar.step()


def _print_table(predictions: Iterable[Prediction], random_init: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="random weights: the predictions are meaningless" if random_init else None, box=None)
    for column in ("image", "class", "probability"):
        table.add_column(column, justify="right" if column == "probability" else "left", overflow="fold")
    count = 0
    for p in predictions:
        if not count and len(p.names) > 1:
            table.add_column("other classes (1% or more)", overflow="fold")
        count += 1
        rest = ", ".join(f"{n} {q:.0%}" for n, q in zip(p.names[1:], p.probabilities[1:], strict=True) if q >= 0.01)
        table.add_row(p.path, p.names[0], f"{p.probabilities[0]:.1%}", *([rest] if len(p.names) > 1 else []))
    if count:
        width = None if sys.stdout.isatty() else 10_000  # a file or a pipe has no width: lines are not broken
        Console(width=width, highlight=False, markup=False, emoji=False).print(table)
    return count


def _print_jsonl(predictions: Iterable[Prediction], random_init: bool) -> int:
    count = 0
    for p in predictions:
        count += 1
        row: dict[str, Any] = {"path": p.path, "names": p.names, "probabilities": p.probabilities, "labels": p.labels}
        print(json.dumps(row | ({"random_init": True} if random_init else {}), ensure_ascii=False), flush=True)
    return count


def _print_csv(predictions: Iterable[Prediction], random_init: bool) -> int:
    writer, count = csv.writer(sys.stdout, lineterminator="\n"), 0
    for p in predictions:
        if not count:
            ranks = [f"{what}_{i + 1}" for i in range(len(p.names)) for what in ("name", "probability")]
            writer.writerow(["path", *ranks, *(["random_init"] if random_init else [])])
        count += 1
        pairs = [v for pair in zip(p.names, (f"{q:.6f}" for q in p.probabilities), strict=True) for v in pair]
        writer.writerow([p.path, *pairs, *(["true"] if random_init else [])])
    return count


PRINTERS = {Format.table: _print_table, Format.jsonl: _print_jsonl, Format.csv: _print_csv}
