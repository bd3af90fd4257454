"""`selftpt bench`: the paper's three benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selftpt.cli.options import CacheOptions, Changes, Json, ModelOptions, parse_setting, with_settings
from selftpt.config import BenchConfig
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from selftpt.data.decoding import ImageError
    from selftpt.evaluation.bench import Bench, Run
    from selftpt.evaluation.records import Record


PROTOCOL_HELP = "which data is the source and which is the target: base-to-new, cross-dataset or domain"
KEPT_APART = {"seed": "--seeds", "learn.seed": "--seeds", "learn.shots": "--shots"}


@with_settings(options=ModelOptions, caching=CacheOptions, config=BenchConfig)
def command(
    protocol: Annotated[str, typer.Argument(help=PROTOCOL_HELP)],
    out: Annotated[Path, typer.Option(help="a folder for records.jsonl and what was learned")],
    options: ModelOptions,
    caching: CacheOptions,
    config: BenchConfig,
    data: Annotated[
        Path | None, typer.Option(help="a folder with the datasets as `selftpt datasets` lists them")
    ] = None,
    methods: Annotated[str, typer.Option(help="separated by commas")] = "clip,coop,self-tpt",
    datasets: Annotated[
        str | None,
        typer.Option(help="names or folders of your own, separated by commas; by default all that are found"),
    ] = None,
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "1,2,3",
    source: Annotated[
        str | None, typer.Option(help="another dataset to learn from than ImageNet, in cross-dataset and domain")
    ] = None,
    set: Changes = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on in a folder that has records, also beside other processes")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would run, and how long it took")] = False,
    as_json: Json = False,
) -> None:
    """Run a benchmark of the paper: every method on every dataset with every seed, one record each."""
    wanted = comma_separated(methods)
    numbers = parse_seeds(seeds)
    changes = dict(parse_setting(text) for text in set or [])
    from selftpt.evaluation.bench import Bench
    from selftpt.evaluation.protocols import chosen_protocol
    from selftpt.evaluation.runs import Runs
    from selftpt.files import check_writable

    chosen_protocol(protocol)
    runs = Runs(out)
    if runs.records and not (resume or dry_run):
        raise SelfTPTError(f"{out} has {len(runs.records)} records: go on with --resume, or name another folder")
    check_writable(runs.file)
    check_methods(wanted, changes)

    def report(error: ImageError) -> None:
        print(f"note: left out {error}", file=sys.stderr)

    bench = Bench(options.load(), protocol, data, runs, config, changes, report, source, caching.cache())
    plan = bench.plan(wanted, chosen_datasets(bench, datasets), numbers)
    done = runs.done()
    left = [run for run in plan if bench.key(run) not in done]
    if dry_run:
        print_plan(bench, plan, left, as_json)
        return
    added = failed = 0

    def report_wait(claimed: Sequence[Run]) -> None:
        print(f"note: waiting for {len(claimed)} runs that other processes do now", file=sys.stderr)

    for number, (run, result) in enumerate(bench.do_all(left, report_wait), 1):
        if isinstance(result, SelfTPTError):
            failed += 1
            print(f"note: {run.method} on {run.dataset} failed: {result}", file=sys.stderr)
        elif result is not None:
            added += 1
            print(json.dumps(result) if as_json else f"{number}/{len(left)}  {summary_line(result)}", flush=True)
    if not as_json:
        others = len(left) - added - failed
        by_others = f", {others} by other processes" if others else ""
        there = len(plan) - len(left)
        print(f"{added} runs added to {runs.file}{by_others}, {there} were there; `selftpt table {out}` shows them")
    if failed:
        raise SelfTPTError(f"{failed} of {len(left)} runs failed: fix what the notes say, and go on with --resume")


def comma_separated(text: str) -> list[str]:
    """The parts of a text between commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def parse_seeds(text: str) -> list[int]:
    """Seeds from a text with commas."""
    try:
        numbers = [int(part) for part in comma_separated(text)]
    except ValueError:
        raise SelfTPTError(f"--seeds takes integers separated by commas, not {text!r}") from None
    if not numbers or min(numbers) < 0:
        raise SelfTPTError("--seeds must name at least one seed, 0 or more")
    return numbers


def check_methods(methods: list[str], changes: dict[str, Any]) -> None:
    """Refuse methods and settings that do not exist, and values that no setting takes."""
    from selftpt.config import change, kind_of
    from selftpt.methods import METHODS
    from selftpt.methods.selection import find_method

    if not methods:
        raise SelfTPTError(f"--methods names none: choose one of {', '.join(METHODS)}")
    chosen = [find_method(name).config for name in methods]
    for key in changes:
        if key in KEPT_APART:
            raise SelfTPTError(f"{key} is not for --set: use {KEPT_APART[key]}")
        if not any(kind_of(config, key.split(".")) for config in chosen):
            raise SelfTPTError(f"none of {', '.join(methods)} has a setting {key!r}")
    for config in chosen:
        change(config, {key: value for key, value in changes.items() if kind_of(config, key.split("."))})


def chosen_datasets(bench: Bench, names: str | None) -> list[str]:
    """The datasets asked for, or all of the protocol that are found, with a note on each of the others."""
    if names is not None:
        chosen = comma_separated(names)
        for name in chosen:
            bench.dataset(name)
        return chosen
    found = []
    for name in bench.protocol.targets:
        try:
            bench.dataset(name)
            found.append(name)
        except SelfTPTError as error:
            print(f"note: without {name}: {error}", file=sys.stderr)
    if not found:
        raise SelfTPTError(f"none of the datasets of {bench.name} is there: see `selftpt datasets --data {bench.data}`")
    return found


def print_plan(bench: Bench, plan: list[Run], left: list[Run], as_json: bool) -> None:
    """Print what would run, and how long it took the last time."""
    times = [bench.last_seconds(run) for run in left]
    if as_json:
        for run, seconds in zip(left, times, strict=True):
            print(json.dumps({"method": run.method, "dataset": run.dataset, "seed": run.seed, "seconds": seconds}))
        return
    for run, seconds in zip(left, times, strict=True):
        last = "not run before" if seconds is None else f"{seconds:.0f} s the last time"
        print(f"{run.method:12} {run.dataset:16} {'' if run.seed is None else f'seed {run.seed}':7} {last}")
    known = [seconds for seconds in times if seconds is not None]
    total = f"; {sum(known) / 60:.1f} minutes for the {len(known)} that were run before" if known else ""
    print(f"{len(left)} runs to do, {len(plan) - len(left)} done{total}")


def summary_line(record: Record) -> str:
    """A record in one line."""
    seed = "" if record["seed"] is None else f"seed {record['seed']}"
    results = record["results"]
    shown = [f"{part} {value['top1']:.1f}" for part, value in results.items() if isinstance(value, dict)]
    if "harmonic" in results:
        shown.append(f"harmonic mean {results['harmonic']:.1f}")
    mark = "  randomly initialised weights" if record["random_init"] else ""
    seconds = sum(record["seconds"].values())
    return f"{record['method']:12} {record['dataset']:16} {seed:7} {', '.join(shown)} %  ({seconds:.0f} s){mark}"
