"""`selftpt predict`: stage 3."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selftpt.cli.options import Json, ModelOptions, Pictures, with_settings
from selftpt.errors import SelfTPTError
from selftpt.settings import PredictConfig

if TYPE_CHECKING:
    from selftpt.classifier import Classifier, Prediction


class Format(StrEnum):
    table = "table"
    jsonl = "jsonl"
    csv = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="how predictions are printed")]


@with_settings(options=ModelOptions, config=PredictConfig)
def command(
    pictures: Pictures,
    classifier: Annotated[Path, typer.Option(help="a classifier that `selftpt adapt` made")],
    options: ModelOptions,
    config: PredictConfig,
    format: FormatOption = Format.table,
    as_json: Json = False,
) -> None:
    """Classify pictures (stage 3)."""
    form = one_format(format, as_json)
    paths = listed(pictures)
    from selftpt.classifier import Classifier

    made = Classifier.load(classifier)
    model = options.load(made.model_id)
    made.model_id.check(model, f"the classifier {classifier}")
    show(dataclasses.replace(made, model=model), paths, config, form)


def one_format(format: Format, as_json: bool) -> Format:
    """The format asked for: --json is short for --format jsonl."""
    if as_json and format is Format.csv:
        raise SelfTPTError("--json and --format csv are two formats: leave one out")
    return Format.jsonl if as_json else format


def listed(pictures: list[str]) -> Iterable[Path]:
    """The pictures asked for; what is missing is refused now, except in a list on standard input."""
    from selftpt.images import find_pictures

    if "-" in pictures:
        return find_pictures(pictures, sys.stdin)
    return list(find_pictures(pictures))


def show(classifier: Classifier, paths: Iterable[Path], config: PredictConfig, format: Format) -> None:
    """Print predictions as they come; exit code 2 if no picture could be used."""
    from selftpt.images import PictureError

    failed: list[PictureError] = []
    alone = isinstance(paths, list) and len(paths) == 1

    def report(error: PictureError) -> None:
        failed.append(error)
        if not alone:
            print(f"note: left out {error}", file=sys.stderr)

    predictions = classifier.predict(paths, config=config, on_error=report)
    if format is Format.table or not sys.stdout.isatty():  # else the lines themselves show that it goes on
        predictions = _with_bar(predictions, len(paths) if isinstance(paths, list) else None)
    done = PRINTERS[format](predictions, classifier.model_id.meaningless)
    if not done:
        none = f"none of the {len(failed)} pictures could be used" if failed else "no picture was named"
        raise SelfTPTError(str(failed[0]) if alone else none)
    if failed:
        print(f"note: {len(failed)} of {len(failed) + done} pictures were left out", file=sys.stderr)


def _with_bar(predictions: Iterable[Prediction], total: int | None) -> Iterator[Prediction]:
    from selftpt.progress import Bar

    with Bar("predicting", total) as bar:
        for prediction in predictions:
            yield prediction
            bar.step()


def _print_table(predictions: Iterable[Prediction], meaningless: bool) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="random weights: these answers mean nothing" if meaningless else None, box=None)
    for column in ("picture", "class", "probability"):
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


def _print_jsonl(predictions: Iterable[Prediction], meaningless: bool) -> int:
    count = 0
    for p in predictions:
        count += 1
        row: dict[str, Any] = {"path": p.path, "names": p.names, "probabilities": p.probabilities, "labels": p.labels}
        print(json.dumps(row | ({"meaningless": True} if meaningless else {}), ensure_ascii=False), flush=True)
    return count


def _print_csv(predictions: Iterable[Prediction], meaningless: bool) -> int:
    writer, count = csv.writer(sys.stdout, lineterminator="\n"), 0
    for p in predictions:
        if not count:
            ranks = [f"{what}_{i + 1}" for i in range(len(p.names)) for what in ("name", "probability")]
            writer.writerow(["path", *ranks, *(["meaningless"] if meaningless else [])])
        count += 1
        pairs = [v for pair in zip(p.names, (f"{q:.6f}" for q in p.probabilities), strict=True) for v in pair]
        writer.writerow([p.path, *pairs, *(["true"] if meaningless else [])])
    return count


PRINTERS = {Format.table: _print_table, Format.jsonl: _print_jsonl, Format.csv: _print_csv}
