"""`selftpt bench`: run one of the paper's three benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selftpt.cli.options import (
    DATA,
    METHOD,
    MODEL,
    OUTPUT,
    CacheOptions,
    Changes,
    Json,
    ModelOptions,
    comma_separated,
    complete_dataset,
    complete_method,
    complete_protocol,
    note,
    parse_setting,
    with_settings,
)
from selftpt.config import BenchConfig
from selftpt.errors import SelfTPTError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from selftpt.data.decoding import ImageError
    from selftpt.evaluation.bench import Bench, GivenPrompt
    from selftpt.evaluation.planning import Plan, Run
    from selftpt.evaluation.records import Record


@with_settings(options=ModelOptions, caching=CacheOptions, config=BenchConfig)
def command(
    protocol: Annotated[
        str,
        typer.Argument(help="The protocol: base-to-new, cross-dataset or domain.", autocompletion=complete_protocol),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder for records.jsonl and for what the methods learn.", rich_help_panel=OUTPUT
        ),
    ],
    options: ModelOptions,
    caching: CacheOptions,
    config: BenchConfig,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder with the datasets that `selftpt datasets` lists.", rich_help_panel=DATA
        ),
    ] = None,
    datasets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Names of datasets, or folders of your own, separated by commas. By default all datasets of the "
            "protocol that are found.",
            rich_help_panel=DATA,
            autocompletion=complete_dataset,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help="Dataset to learn from in cross-dataset and domain. By default imagenet.",
            rich_help_panel=DATA,
            autocompletion=complete_dataset,
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Methods, separated by commas. `selftpt methods` lists them.",
            rich_help_panel=METHOD,
            autocompletion=complete_method,
        ),
    ] = "clip,coop,self-tpt",
    seeds: Annotated[
        str, typer.Option(metavar="LIST", help="Seeds, separated by commas.", rich_help_panel=METHOD)
    ] = "1,2,3",
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Use this prompt instead of learning one: a prompt that `selftpt learn` wrote, hub:USER/REPO, or "
            "embedded: the prompt of the embedded model. By default the methods learn.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    set: Changes = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue in a folder that has records. Several processes may work on one folder.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only list the runs to do, and how long they took before.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a benchmark of the paper: every method on every dataset with every seed. Each run adds one record."""
    chosen_methods, chosen_seeds = unique(methods), parse_seeds(seeds)
    changes = dict(parse_setting(text) for text in set or [])
    from selftpt.evaluation.planning import Plan
    from selftpt.evaluation.runs import Runs
    from selftpt.files import check_writable

    plan = Plan(protocol, data, config, changes, source, given_prompt=prompt is not None)
    plan.check_methods(chosen_methods)
    recorded = Runs(out)
    if recorded.records and not (resume or dry_run):
        raise SelfTPTError(
            f"{out} already has {len(recorded.records)} records: add --resume to continue, or choose another folder"
        )
    if not dry_run:
        check_writable(recorded.file)
    runs = plan.runs(chosen_methods, find_datasets(plan, datasets), chosen_seeds)
    given = load_prompt(options, prompt)

    from selftpt.evaluation.bench import Bench

    def report(error: ImageError) -> None:
        note(f"skipped {error}")

    model = options.load(given.prompt.model if given else None, f"the prompt {prompt}")
    bench = Bench(model, plan, recorded, report, caching.cache(), given)
    done = recorded.done()
    left = [run for run in runs if bench.key(run) not in done]
    if dry_run:
        print_plan(bench, left, len(runs) - len(left), as_json)
        return
    added = failed = 0

    def report_wait(claimed: Sequence[Run]) -> None:
        note(f"waiting for {len(claimed)} runs of other processes")

    for number, (run, result) in enumerate(bench.do_all(left, report_wait), 1):
        if isinstance(result, SelfTPTError):
            failed += 1
            note(f"{run.method} on {run.dataset} failed: {result}")
        elif result is not None:
            added += 1
            print(json.dumps(result) if as_json else f"{number}/{len(left)}  {summary_line(result)}", flush=True)
    if not as_json:
        others = len(left) - added - failed
        by_others = f", {others} were added by other processes" if others else ""
        print(
            f"{added} runs were added to {recorded.file}{by_others}, {len(runs) - len(left)} were already there. "
            f"Show them with `selftpt table {out}`."
        )
    if failed:
        raise SelfTPTError(f"{failed} of {len(left)} runs failed: fix what the notes say, then add --resume")


def unique(text: str) -> list[str]:
    """Split a text at its commas, without duplicates."""
    return list(dict.fromkeys(comma_separated(text)))


def parse_seeds(text: str) -> list[int]:
    """Parse the seeds in a text with commas.

    Raises:
        SelfTPTError: There is no seed, or a seed is not an integer of 0 or more.
    """
    try:
        seeds = [int(part) for part in unique(text)]
    except ValueError:
        raise SelfTPTError(f"--seeds takes integers separated by commas, not {text!r}") from None
    if not seeds or min(seeds) < 0:
        raise SelfTPTError(f"--seeds takes at least one seed, and seeds of 0 or more, not {text!r}")
    return seeds


def find_datasets(plan: Plan, names: str | None) -> list[str]:
    """Return the datasets that the user names, or else those of the protocol that are found.

    A note is printed for each dataset of the protocol that is not found.

    Raises:
        SelfTPTError: None is found.
    """
    if names is not None:
        return unique(names)
    found = []
    for name in plan.protocol.targets:
        try:
            plan.dataset(name)
            found.append(name)
        except SelfTPTError as error:
            note(f"skipped {name}: {error}")
    if not found:
        raise SelfTPTError(
            f"no dataset of {plan.name} was found: see `selftpt datasets --data {plan.data or 'FOLDER'}`"
        )
    return found


def load_prompt(options: ModelOptions, source: str | None) -> GivenPrompt | None:
    """Load the prompt that --prompt names; None without --prompt."""
    if source is None:
        return None
    from selftpt.evaluation.bench import GivenPrompt

    return GivenPrompt(options.prompt(Path(source)), source)


def print_plan(bench: Bench, left: list[Run], done: int, as_json: bool) -> None:
    """Print the runs that are left, and how long they took before."""
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
    print(f"{len(left)} runs to do, {done} done{total}")


def summary_line(record: Record) -> str:
    """Summarise a record in one line."""
    seed = "" if record["seed"] is None else f"seed {record['seed']}"
    results = record["results"]
    shown = [f"{part} {value['top1']:.1f}" for part, value in results.items() if isinstance(value, dict)]
    if "harmonic" in results:
        shown.append(f"harmonic mean {results['harmonic']:.1f}")
    mark = "  randomly initialised weights" if record["random_init"] else ""
    seconds = sum(record["seconds"].values())
    return f"{record['method']:12} {record['dataset']:16} {seed:7} {', '.join(shown)} %  ({seconds:.0f} s){mark}"
