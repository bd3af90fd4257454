"""`selftpt predict`: stage 3."""

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
    CacheOptions,
    Changes,
    Images,
    Json,
    ModelOptions,
    Names,
    NamesFile,
    parse_setting,
    read_names,
    with_settings,
)
from selftpt.config import ContrastConfig, PredictConfig
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from selftpt.classifier import Classifier, Prediction
    from selftpt.data.decoding import ImageError

    Report = Callable[[ImageError], None]


class Format(StrEnum):
    table = "table"
    jsonl = "jsonl"
    csv = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="how predictions are printed")]


@with_settings(options=ModelOptions, caching=CacheOptions, config=PredictConfig)
def command(
    images: Images,
    options: ModelOptions,
    caching: CacheOptions,
    config: PredictConfig,
    classifier: Annotated[Path | None, typer.Option(help="a classifier that `selftpt adapt` made")] = None,
    method: Annotated[
        str | None, typer.Option(help="or a method that makes its own, of `selftpt methods`, with --names")
    ] = None,
    names: Names = None,
    names_file: NamesFile = None,
    template: Annotated[
        str, typer.Option(help="with --method: the sentence of methods that take one")
    ] = ContrastConfig.template,
    source: Annotated[
        Path | None,
        typer.Option(help="with a --method that learns: labelled images, as for `selftpt learn`"),
    ] = None,
    set: Changes = None,
    format: FormatOption = Format.table,
    as_json: Json = False,
) -> None:
    """Classify images (stage 3), with a classifier of stage 2 or by another method."""
    form = one_format(format, as_json)
    if (classifier is None) == (method is None):
        raise SelfTPTError("give either --classifier FILE, which `selftpt adapt` makes, or --method with --names")
    if classifier is not None:
        if names or names_file or source or set or template != ContrastConfig.template:
            raise SelfTPTError("--names, --template, --source and --set are for --method: a classifier has its names")
        if caching != CacheOptions():
            raise SelfTPTError("--cache-mode and --cache-gb are for --method: a classifier caches nothing")
        paths = listed(images)
        from selftpt.classifier import Classifier

        made = Classifier.load(classifier)
        model = options.load(made.model_id, f"the classifier {classifier}")
        show_classified(made.with_model(model, f"the classifier {classifier}"), paths, config, form)
        return
    if config != PredictConfig(top=config.top):
        raise SelfTPTError(
            "--views, --confidence-ratio, --seed, --batch and --max-megapixels are for --classifier: a method has --set"
        )
    wanted = read_names(names, names_file)
    paths = list(listed(images))
    from selftpt.data.sources import Source
    from selftpt.methods import FitContext
    from selftpt.methods.selection import configure, find_method

    chosen = find_method(method or "")
    settings = configure(chosen, dict(parse_setting(text) for text in set or []))
    if chosen.needs_labels and source is None:
        raise SelfTPTError(f"{method} learns from labelled images: give --source FOLDER, with one folder per class")
    if source is not None and not chosen.needs_labels:
        raise SelfTPTError(f"{method} learns from no images: leave --source out")
    cache, train_set = caching.cache(), None if source is None else Source.read(source)
    model = options.load()
    fitted = chosen.fit(FitContext(model, train_set, cache=cache), settings)
    predictor = fitted.for_classes(wanted, template)
    show(
        lambda report: predictor.predict(paths, config.top, cache=cache, on_error=report),
        paths,
        form,
        model.id.random_init,
    )


def one_format(format: Format, as_json: bool) -> Format:
    """The format asked for: --json is short for --format jsonl."""
    if as_json and format is Format.csv:
        raise SelfTPTError("--json and --format csv are two formats: leave one out")
    return Format.jsonl if as_json else format


def listed(images: list[str]) -> Iterable[Path]:
    """The images asked for; what is missing is refused now, except in a list on standard input."""
    from selftpt.data.sources import find_images

    if "-" in images:
        return find_images(images, sys.stdin)
    return list(find_images(images))


def show_classified(classifier: Classifier, paths: Iterable[Path], config: PredictConfig, format: Format) -> None:
    """Print what a classifier says of images."""

    def predictions(report: Report) -> Iterator[Prediction]:
        return classifier.predict(paths, config=config, on_error=report)

    show(predictions, paths, format, classifier.model_id.random_init)


def show(
    predict: Callable[[Report], Iterator[Prediction]], paths: Iterable[Path], format: Format, random_init: bool
) -> None:
    """Print predictions as they come; exit code 2 if no image could be used."""
    failed: list[ImageError] = []
    alone = isinstance(paths, list) and len(paths) == 1

    def report(error: ImageError) -> None:
        failed.append(error)
        if not alone:
            print(f"note: left out {error}", file=sys.stderr)

    predictions = predict(report)
    if format is Format.table or not sys.stdout.isatty():  # else the lines themselves show that it goes on
        predictions = _with_bar(predictions, len(paths) if isinstance(paths, list) else None)
    done = PRINTERS[format](predictions, random_init)
    if not done:
        none = f"none of the {len(failed)} images could be used" if failed else "no image was named"
        raise SelfTPTError(str(failed[0]) if alone else none)
    if failed:
        print(f"note: {len(failed)} of {len(failed) + done} images were left out", file=sys.stderr)


def _with_bar(predictions: Iterable[Prediction], total: int | None) -> Iterator[Prediction]:
    from selftpt.progress import Bar

    with Bar("predicting", total) as bar:
        for prediction in predictions:
            yield prediction
            bar.step()


def _print_table(predictions: Iterable[Prediction], random_init: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="random weights: these answers mean nothing" if random_init else None, box=None)
    for column in ("image", "class", "probability"):
        table.add_column(column, justify="right" if column == "probability" else "left", overflow="fold")
    count = 0
    for p in predictions:
        if not count and len(p.names) > 1:
            table.add_column("then, if 1% or more", overflow="fold")
        count += 1
        rest = ", ".join(f"{n} {q:.0%}" for n, q in zip(p.names[1:], p.probabilities[1:], strict=True) if q >= 0.01)
        table.add_row(p.path, p.names[0], f"{p.probabilities[0]:.1%}", *([rest] if len(p.names) > 1 else []))
    if count:
        Console(highlight=False, markup=False, emoji=False).print(table)
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
