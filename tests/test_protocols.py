"""The three benchmarks on small generated datasets with the original layout, and a small random model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import selftpt.data.cache
import selftpt.data.features
from selftpt.adaptation import adapt, zero_shot
from selftpt.config import AdaptConfig, BenchConfig, LearnConfig, PredictConfig, change, kind_of
from selftpt.data.datasets import read_dataset
from selftpt.data.decoding import ImageError, open_image, warn_of
from selftpt.data.sources import Source
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.evaluation.bench import Bench
from selftpt.evaluation.planning import Plan
from selftpt.evaluation.planning import Run as PlannedRun
from selftpt.evaluation.protocols import PROTOCOLS
from selftpt.evaluation.runs import Record, Runs
from selftpt.learning import learn
from selftpt.methods import METHODS
from selftpt.training import RunFiles
from tests.helpers.commands import Run, refused
from tests.helpers.datasets import WNIDS, make_tree, rows_of
from tests.helpers.folders import make_generated, make_model, make_photos
from tests.helpers.models import model

EPOCHS = {"learn.epochs": 2}
ALL = ["clip", "coop", "self-tpt", "self-tpt-v"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("imagenet", "eurosat", "caltech101", "imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r"):
        make_tree(folder, name)
    return folder


def make_bench(
    protocol: str, data: Path | None, out: Path, on_error: Callable[[ImageError], None] = warn_of, **options: Any
) -> Bench:
    plan = Plan(protocol, data, **{"changes": {**EPOCHS, "views": 4}, **options})
    return Bench(model(), plan, Runs(out), on_error)


def runs_of(bench: Bench, methods: list[str], datasets: list[str], seeds: list[int]) -> list[PlannedRun]:
    """Return the planned runs, without changed settings that none of the methods has."""
    configs = [METHODS[method].config for method in methods]
    bench.plan.changes = {
        key: value
        for key, value in bench.plan.changes.items()
        if any(kind_of(config, key.split(".")) for config in configs)
    }
    return bench.plan.runs(methods, datasets, seeds)


def do_runs(bench: Bench, methods: list[str], datasets: list[str], seeds: list[int]) -> list[Record]:
    return [bench.do(run) for run in runs_of(bench, methods, datasets, seeds)]


def reference_accuracy(source: Source, weights: torch.Tensor) -> float:
    """Return the top-1 accuracy (%), with each image encoded separately."""
    clip, correct = model(), 0
    for path, label in zip(source.paths, source.labels, strict=True):
        feature = clip.encode_image(clip.preprocess(open_image(path))[None])
        correct += int((feature @ weights.t()).argmax()) == label
    return 100 * correct / len(source.paths)


def halves(source: Source) -> Iterator[Source]:
    """Yield the base classes 0 and 1, then the new classes 2 and 3 of the generated EuroSAT."""
    for first in (0, 2):
        rows = [(p, i - first) for p, i in zip(source.paths, source.labels, strict=True) if first <= i < first + 2]
        yield Source(source.names[first : first + 2], tuple(p for p, _ in rows), tuple(i for _, i in rows))


def test_base_to_new_equals_calls_of_learn_and_adapt(data: Path, tmp_path: Path) -> None:
    records = do_runs(make_bench("base-to-new", data, tmp_path), ["clip", "coop", "self-tpt"], ["eurosat"], [2])
    dataset, clip = read_dataset("eurosat", data), model()
    assert dataset.train is not None
    config = LearnConfig(epochs=2, seed=2)
    base, _ = halves(dataset.train.few(16, 2))
    prompts = {
        "coop": learn(clip, base, dataclasses.replace(config, cpt=0, gm=0)),
        "self-tpt": learn(clip, base, config),
    }
    for record in records:
        for part, test in zip(("base", "new"), halves(dataset.test), strict=True):
            if record["method"] == "clip":
                classifier = zero_shot(clip, test.names, "a centered satellite photo of {}.")
            else:
                steps = 0 if record["method"] == "coop" else 10
                classifier = adapt(clip, prompts[record["method"]], test.names, AdaptConfig(steps=steps))
            found = record["results"][part]
            assert found["top1"] == pytest.approx(reference_accuracy(test, classifier.weights)), record["method"]
            assert (found["images"], found["classes"]) == (6, 2)
        base1, new1 = (record["results"][part]["top1"] for part in ("base", "new"))
        assert record["results"]["harmonic"] == pytest.approx(2 / (1 / base1 + 1 / new1) if base1 and new1 else 0)
    assert [record["seed"] for record in records] == [None, 2, 2]
    assert records[0]["source"] is None
    assert records[1]["source"]["classes"] == 2
    assert records[1]["source"]["images"] == 10


def test_self_tpt_v_averages_the_probabilities_of_the_views(data: Path, tmp_path: Path) -> None:
    runner = make_bench("cross-dataset", data, tmp_path)
    (record,) = do_runs(runner, ["self-tpt-v"], ["eurosat"], [1])
    assert record["settings"]["views"] == 4
    assert record["changes"] == {"learn.epochs": 2, "views": 4}
    dataset, clip = read_dataset("eurosat", data), model()
    source = read_dataset("imagenet", data).train
    assert source is not None
    classifier = adapt(clip, learn(clip, source, LearnConfig(epochs=2)), dataset.test.names)
    predictions = classifier.predict(dataset.test.paths, config=PredictConfig(views=4, top=1))
    right = [p.labels[0] == label for p, label in zip(predictions, dataset.test.labels, strict=True)]
    assert record["results"]["test"]["top1"] == pytest.approx(100 * sum(right) / len(right))
    confidence = [p.probabilities[0] for p in predictions]
    # A lower bound of the error with 15 bins.
    one_bin = abs(sum(confidence) / len(confidence) - sum(right) / len(right))
    assert record["results"]["test"]["ece"] >= 100 * one_bin - 1e-3
    single = classifier.predict(dataset.test.paths, top=1)
    difference = max(abs(a.probabilities[0] - p) for a, p in zip(single, confidence, strict=True))
    assert difference > 1e-3, "the views are all alike"


def test_methods_learn_once_from_a_source(data: Path, tmp_path: Path) -> None:
    """The number of test datasets does not matter, and Self-TPT-v uses the prompt of Self-TPT."""
    records = do_runs(make_bench("cross-dataset", data, tmp_path), ALL, ["caltech101", "eurosat"], [1, 2])
    assert len(records) == 2 * (1 + 3 * 2)
    assert len(list((tmp_path / "learned").glob("*.safetensors"))) == 2 * 2
    assert {record["source"]["dataset"] for record in records if record["source"]} == {"imagenet"}
    assert {record["source"]["classes"] for record in records if record["source"]} == {len(WNIDS)}


def test_images_are_encoded_once_for_all_methods_and_seeds(data: Path, tmp_path: Path) -> None:
    """Test images and views are encoded once, training crops once per epoch."""
    records = do_runs(make_bench("cross-dataset", data, tmp_path), ALL, ["caltech101", "eurosat"], [1, 2, 3])
    tests = sum(len(read_dataset(name, data).test.paths) for name in ("caltech101", "eurosat"))
    train = read_dataset("imagenet", data).train
    assert train is not None
    assert sum(record["encoded"] for record in records) == 4 * tests + 2 * len(train.paths)


def test_domain_results_equal_calls_of_zero_shot(data: Path, tmp_path: Path) -> None:
    names = list(PROTOCOLS["domain"].targets)
    records = do_runs(make_bench("domain", data, tmp_path), ["clip", "coop"], names, [1])
    assert [record["dataset"] for record in records] == names * 2
    assert [record["results"]["test"]["classes"] for record in records[:5]] == [12, 12, 12, 3, 3]
    for name, record in zip(names, records[:5], strict=True):
        test = read_dataset(name, data).test
        weights = zero_shot(model(), test.names).weights
        assert record["results"]["test"]["top1"] == pytest.approx(reference_accuracy(test, weights))
    labels = {path.parent.name: i for path, i in zip(test.paths, test.labels, strict=True)}  # `test` is ImageNet-R
    assert [WNIDS[wnid] for wnid in sorted(labels, key=lambda wnid: labels[wnid])] == list(test.names)


def test_folder_of_images_is_a_dataset(tmp_path: Path) -> None:
    folder = make_photos(tmp_path / "my birds", ("kite", "duck", "hen", "crow"))
    (record,) = do_runs(make_bench("base-to-new", Path("nowhere"), tmp_path / "runs"), ["coop"], [str(folder)], [1])
    assert record["dataset"] == "my birds"
    assert record["data"]["published"] is False
    assert "made here" in record["data"]["split"]
    assert (record["results"]["base"]["classes"], record["results"]["new"]["classes"]) == (2, 2)


def test_shots_share_source_classes_and_limit_reduce_the_data(data: Path, tmp_path: Path) -> None:
    config = BenchConfig(shots=4, share=0.5, source_classes=3, limit=5)
    runner = make_bench("cross-dataset", data, tmp_path, config=config)
    (record,) = do_runs(runner, ["coop"], ["eurosat"], [1])
    assert record["source"]["classes"] == 3
    assert record["source"]["images"] == 3 * 2  # half of the three images per class, rounded to two
    assert record["results"]["test"]["images"] == 5
    assert record["data"]["limit"] == 5


CHANGES_BETWEEN_RUNS = ("seconds", "peak_memory_mb", "encoded", "date", "digest")


def stable(records: list[Record]) -> list[Record]:
    return [{key: value for key, value in record.items() if key not in CHANGES_BETWEEN_RUNS} for record in records]


def interrupt_after(calls: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `real` the given number of times, then interrupts the program."""
    left = iter(range(calls))

    def call(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (selftpt.data.cache, "write_tensors", 0),
        (selftpt.data.cache, "write_tensors", 3),
        (selftpt.data.cache, "write_tensors", 9),
        (RunFiles, "keep", 1),
        (RunFiles, "keep", 3),
        (RunFiles, "finish", 0),
        (Runs, "add", 0),
        (Runs, "add", 3),
        (Bench, "_evaluate", 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_interrupted_benchmark_resumes_to_the_same_records(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int
) -> None:
    monkeypatch.setattr(selftpt.data.features, "BLOCK_VIEWS", 2)
    monkeypatch.setattr(selftpt.data.features, "SHARD_SECONDS", -1)
    jobs = ["clip", "coop", "self-tpt"], ["eurosat"], [1, 2]
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "cache"))
    expected = do_runs(make_bench("base-to-new", data, tmp_path / "uninterrupted"), *jobs)
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "other"))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt_after(calls, getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            do_runs(make_bench("base-to-new", data, tmp_path / "killed"), *jobs)
    again = make_bench("base-to-new", data, tmp_path / "killed")
    done = again.recorded.done()
    for run in runs_of(again, *jobs):
        if again.key(run) not in done:
            again.do(run)
    assert stable(Runs(tmp_path / "killed").records) == stable(expected)


def test_killed_process_resumes_to_the_same_records(run: Run, data: Path, weights: Path, tmp_path: Path) -> None:
    arguments = ["bench", "cross-dataset", "--data", data, "--model", weights, "--methods", "coop,self-tpt-v"]
    arguments += ["--datasets", "eurosat,caltech101", "--seeds", "1,2", "--set", "views=4", "--set", "learn.epochs=3"]
    command = [sys.executable, "-m", "selftpt", *map(str, arguments), "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = tmp_path / "killed" / "records.jsonl"
    while process.poll() is None and not (records.exists() and records.read_bytes().count(b"\n")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the process ended before it could be killed"
    assert run(*arguments, "--out", tmp_path / "killed", "--resume").code == 0
    assert run(*arguments, "--out", tmp_path / "uninterrupted").code == 0
    assert stable(Runs(tmp_path / "killed").records) == stable(Runs(tmp_path / "uninterrupted").records)


def bench_command(data: Path, weights: Path, out: Path) -> list[str]:
    arguments = ["bench", "cross-dataset", "--data", data, "--model", weights, "--methods", "clip,coop"]
    arguments += ["--datasets", "eurosat,caltech101", "--seeds", "1,2,3", "--set", "learn.epochs=2", "--out", out]
    return [sys.executable, "-m", "selftpt", *map(str, arguments), "--resume"]


def counts_and_keys(out: Path) -> tuple[int, int]:
    recorded = [record["key"] for record in Runs(out).records]
    return len(recorded), len(set(recorded))


def test_two_processes_record_each_run_once(data: Path, weights: Path, tmp_path: Path) -> None:
    command = bench_command(data, weights, tmp_path)
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert counts_and_keys(tmp_path) == (8, 8)
    added = [int(answer.splitlines()[-1].split()[0]) for answer in answers]
    assert sum(added) == 8
    assert list(tmp_path.glob(".*.lock")) == []


def test_run_of_a_killed_process_is_done_by_a_later_one(data: Path, weights: Path, tmp_path: Path) -> None:
    bench_process = subprocess.Popen(bench_command(data, weights, tmp_path), stdout=subprocess.DEVNULL)
    while bench_process.poll() is None and not list(tmp_path.glob(".claim-*.lock")):
        time.sleep(0.001)
    bench_process.send_signal(signal.SIGKILL)
    assert bench_process.wait() == -signal.SIGKILL, "the process ended before it could be killed"
    again = subprocess.run(bench_command(data, weights, tmp_path), capture_output=True, text=True, check=True)
    assert counts_and_keys(tmp_path) == (8, 8), again.stderr
    assert list(tmp_path.glob(".*.lock")) == []


OWNER = """
import sys, time
from pathlib import Path
from selftpt.evaluation.runs import Runs
with Runs(Path(sys.argv[1])).claim(sys.argv[2]) as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def test_claimed_run_comes_last_and_is_done_if_its_owner_dies(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selftpt.evaluation.bench.POLL_SECONDS", 0.01)
    runner = make_bench("cross-dataset", data, tmp_path)
    plan = runs_of(runner, ["clip", "clip-ensemble"], ["eurosat", "caltech101"], [1])
    command = [sys.executable, "-c", OWNER, str(tmp_path), runner.key(plan[1])]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "True\n"
    waited_for = []

    def kill(runs: Sequence[PlannedRun]) -> None:
        waited_for.append(runs)
        owner.send_signal(signal.SIGKILL)
        owner.communicate()

    done = [run for run, result in runner.do_all(plan, kill) if isinstance(result, dict)]
    assert done == [plan[0], *plan[2:], plan[1]]
    assert waited_for == [[plan[1]]]
    assert counts_and_keys(tmp_path) == (4, 4)


def test_run_that_another_process_records_meanwhile_is_not_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process claims a run first, and records it when this process has no other runs left."""
    monkeypatch.setattr("selftpt.evaluation.bench.POLL_SECONDS", 0.01)
    mine, other = (make_bench("cross-dataset", data, tmp_path) for _ in range(2))
    plan = runs_of(mine, ["clip"], ["eurosat", "caltech101"], [1])
    runs_of(other, ["clip"], ["eurosat", "caltech101"], [1])
    with contextlib.ExitStack() as claims:
        assert claims.enter_context(other.recorded.claim(other.key(plan[0])))

        def finish(_runs: Sequence[PlannedRun]) -> None:
            other.do(plan[0])
            claims.close()

        results = dict(mine.do_all(plan, finish))
    assert [results[run] is None for run in plan] == [True, False]
    assert counts_and_keys(tmp_path) == (2, 2)


def test_unreadable_images_are_counted_in_the_record(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", "eurosat")
    (root / "2750" / "Forest" / "Forest_8.jpg").write_text("no image")  # a test image
    (root / "2750" / "AnnualCrop" / "AnnualCrop_1.jpg").write_text("no image")  # a training image
    errors: list[ImageError] = []
    first = make_bench("base-to-new", tmp_path / "data", tmp_path / "runs", on_error=errors.append)
    (record,) = do_runs(first, ["coop"], ["eurosat"], [1])
    assert record["results"]["base"]["images"] == 5
    assert record["data"]["unreadable"] == 1
    assert record["source"]["unreadable"] == 1
    assert sorted(str(error).partition(":")[0][-16:] for error in errors) == ["AnnualCrop_1.jpg", "est/Forest_8.jpg"]
    again = make_bench("base-to-new", tmp_path / "data", tmp_path / "runs", on_error=errors.append)
    with pytest.warns(SelfTPTWarning, match=r"1 of \d+ training images could not be used when"):
        assert stable(do_runs(again, ["coop"], ["eurosat"], [1])) == stable([record])


def test_dataset_without_readable_images_is_refused(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "data", "eurosat")
    for path in root.rglob("*.jpg"):
        path.write_text("no image")
    runner = make_bench("cross-dataset", tmp_path / "data", tmp_path / "runs", on_error=lambda _: None)
    with pytest.raises(SelfTPTError, match="none of the 12 test images"):
        do_runs(runner, ["clip"], ["eurosat"], [1])


def test_dataset_without_training_images_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(SelfTPTError, match="ImageNetV2 has no training images"):
        do_runs(make_bench("base-to-new", data, tmp_path), ["coop"], ["imagenetv2"], [1])


def test_settings_are_changed_by_name() -> None:
    settings = METHODS["self-tpt"].config
    assert kind_of(settings, ["adapt", "lr"]) is float
    for path in (["adapt", "rate"], ["adapt"], ["adapt", "lr", "more"], ["learn", "contrasts"]):
        assert kind_of(settings, path) is None
    assert change(settings, {"adapt.lr": 1}) == change(settings, {"adapt.lr": 1.0})
    for views in (["end", "hand_crafted"], "end,hand"):
        assert change(settings, {"learn.contrast.views": views}).learn.contrast.views == ("end", "hand_crafted")
    assert change(settings, {"learn.classes_per_step": None}).learn.classes_per_step is None


def test_shots_are_sampled_by_seed(data: Path, tmp_path: Path) -> None:
    """Like CoOp, sample two of five images per class before the classes are split."""
    config = BenchConfig(shots=2)
    records = do_runs(make_bench("base-to-new", data, tmp_path, config=config), ["coop"], ["eurosat"], [1, 2])
    rows = rows_of("eurosat")["train"]
    drawn = []
    for seed in (1, 2):
        random.seed(seed)
        by_class = {label: [path for path, at, _ in rows if at == label] for label in range(4)}
        drawn.append([path for label in range(4) for path in random.sample(by_class[label], 2)][:4])
    assert drawn[0] != drawn[1]
    runner = make_bench("base-to-new", data, tmp_path, config=config)
    for record, seed, expected in zip(records, (1, 2), drawn, strict=True):
        assert record["source"]["images"] == 4
        source, _ = runner.plan.source_of(PlannedRun("coop", "eurosat", seed)) or (None, None)
        assert source is not None
        assert [str(path.relative_to(data / "eurosat" / "2750")) for path in source.paths] == expected


def test_key_of_a_run_depends_on_data_seed_and_settings(data: Path, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "data", "eurosat")
    make_tree(tmp_path / "data", "imagenet")

    def key(method: str = "coop", seed: int | None = 1, **more: Any) -> str:
        return make_bench("base-to-new", tmp_path / "data", tmp_path / "runs", **more).key(
            PlannedRun(method, "eurosat", seed)
        )

    keys = [key(), key(seed=2), key("self-tpt"), key(changes={}), key(config=BenchConfig(limit=3))]
    keys.append(key(config=BenchConfig(share=0.5)))
    assert key() == keys[0]
    assert key("clip", None) == key("clip", None, config=BenchConfig(shots=4))  # zero-shot CLIP does not use the shots
    rows = rows_of("eurosat")
    chosen = [row for row in rows["train"] if not row[0].endswith("_1.jpg")]
    (tree / "fewshot_16_seed1.json").write_text(json.dumps({"train": chosen}))
    keys.append(key())
    renamed = {part: [(path, label, f"a {name}") for path, label, name in of] for part, of in rows.items()}
    (tree / "fewshot_16_seed1.json").unlink()
    (tree / "split_zhou_EuroSAT.json").write_text(json.dumps(renamed))
    keys.append(key())
    assert len({*keys}) == len(keys)


def test_folders_with_the_same_name_have_different_keys(tmp_path: Path) -> None:
    folders = [make_photos(tmp_path / parent / "birds", ("kite", "duck", "hen", "crow")) for parent in ("a", "b")]
    runner = make_bench("base-to-new", None, tmp_path / "runs")
    first, second = (runner.key(PlannedRun("coop", str(folder), 1)) for folder in folders)
    assert first != second
    assert runner.key(PlannedRun("coop", str(tmp_path / "a" / ".." / "a" / "birds"), 1)) == first


def test_source_option_selects_the_source_dataset(data: Path, tmp_path: Path) -> None:
    runner = make_bench("cross-dataset", data, tmp_path, source="caltech101")
    (record,) = do_runs(runner, ["coop"], ["eurosat"], [1])
    assert record["source"]["dataset"] == "caltech101"
    with pytest.raises(SelfTPTError, match="remove --source"):
        make_bench("base-to-new", data, tmp_path, source="caltech101")


def test_base_to_new_refuses_three_classes(data: Path, tmp_path: Path) -> None:
    folder = make_photos(tmp_path / "three")
    with pytest.raises(SelfTPTError, match="three has 3 classes"):
        runs_of(make_bench("base-to-new", None, tmp_path / "runs"), ["clip"], [str(folder)], [1])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_same_record_twice(data: Path, tmp_path: Path, name: str) -> None:
    """The records are JSON, and the model is not changed."""
    before = {key: value.clone() for key, value in model().clip.state_dict().items()}
    generated = make_generated(tmp_path / "generated", read_dataset("eurosat", data).test.paths, per_image=3)
    kept = []
    descriptors = tmp_path / "descriptors.json"
    descriptors.write_text(json.dumps({name: ["sand"] for name in read_dataset("eurosat", data).test.names}))
    changes = {**EPOCHS, "coop.epochs": 2, "views": 4, "descriptors": str(descriptors)}
    changes["generated"] = str(generated)
    for out in ("first", "second"):
        runner = make_bench("base-to-new", data, tmp_path / out, changes=changes)
        kept += do_runs(runner, [name], ["eurosat"], [1])
    assert stable(kept[:1]) == stable(kept[1:])
    assert json.loads((tmp_path / "first" / "records.jsonl").read_text()) == kept[0]
    assert all(torch.equal(before[key], value) for key, value in model().clip.state_dict().items())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("weights") / "model")


def test_bench_command_runs_and_resumes(run: Run, data: Path, weights: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    command = ["bench", "base-to-new", "--data", data, "--out", out, "--model", weights, "--seeds", "1,2"]
    command += ["--methods", "clip,coop", "--datasets", "eurosat", "--set", "learn.epochs=2"]
    first = run(*command, "--dry-run")
    assert first.code == 0, first.err
    assert "3 runs to do, 0 done" in first.out
    assert "not run before" in first.out
    assert not out.exists()
    assert run(*command).code == 0
    assert len(Runs(out).records) == 3
    refused(run(*command), str(out), "--resume")
    later = run(*command, "--resume", "--dry-run", "--json")
    assert later.out == ""
    more = run(*command[:-4], "--datasets", "eurosat,caltech101", "--set", "learn.epochs=2", "--resume")
    assert more.code == 0, more.err
    assert "3 runs were added" in more.out
    assert "3 were already there" in more.out


def test_dry_run_estimates_times_from_earlier_runs(run: Run, data: Path, weights: Path, tmp_path: Path) -> None:
    command = [
        "bench",
        "cross-dataset",
        "--data",
        data,
        "--out",
        tmp_path,
        "--model",
        weights,
        "--set",
        "learn.epochs=2",
    ]
    command += ["--methods", "clip,self-tpt", "--datasets", "eurosat"]
    assert run(*command, "--seeds", "1").code == 0
    took = [sum(record["seconds"].values()) for record in Runs(tmp_path).records]

    def estimated_seconds(*more: str) -> dict[tuple[str, str, int], float]:
        answer = run(*command, *more, "--dry-run", "--json")
        lines = map(json.loads, answer.out.splitlines())
        return {(line["method"], line["dataset"], line["seed"]): line["seconds"] for line in lines}

    assert estimated_seconds("--seeds", "1") == {}
    assert estimated_seconds("--seeds", "2,3") == {("self-tpt", "eurosat", seed): took[1] for seed in (2, 3)}
    assert set(estimated_seconds("--seeds", "2", "--set", "adapt.steps=3").values()) == {None}
    assert set(estimated_seconds("--seeds", "2", "--limit", "3").values()) == {None}
    text = run(*command, "--seeds", "2", "--dry-run").out
    assert "s the last time" in text
    assert "minutes for the 1 that were run before" in text


def test_unknown_protocol_is_refused_and_help_names_all(run: Run, weights: Path, tmp_path: Path) -> None:
    refused(run("bench", "few-shot", "--out", tmp_path, "--model", weights), "'few-shot'", *PROTOCOLS)
    for command in ("bench", "table"):
        text = " ".join(run(command, "--help").out.replace("│", " ").split())
        assert all(name in text for name in PROTOCOLS)


def test_all_existing_datasets_are_used_by_default(run: Run, data: Path, weights: Path, tmp_path: Path) -> None:
    command = ["bench", "cross-dataset", "--data", data, "--out", tmp_path, "--model", weights, "--methods", "clip"]
    answer = run(*command, "--json")
    assert [json.loads(line)["dataset"] for line in answer.out.splitlines()] == ["caltech101", "eurosat"]
    assert sum(line.startswith("note: skipped ") for line in answer.err.splitlines()) == 8


def test_failed_run_does_not_stop_the_others(run: Run, weights: Path, tmp_path: Path) -> None:
    make_tree(tmp_path / "data", "caltech101")
    for path in make_tree(tmp_path / "data", "eurosat").rglob("*.jpg"):
        path.write_text("no image")
    command = ["bench", "cross-dataset", "--data", tmp_path / "data", "--model", weights, "--methods", "clip"]
    answer = run(*command, "--datasets", "eurosat,caltech101", "--out", tmp_path / "runs")
    assert answer.code == 2
    assert "clip on eurosat failed" in answer.err
    assert "1 of 2 runs failed" in answer.err
    assert [record["dataset"] for record in Runs(tmp_path / "runs").records] == ["caltech101"]


def test_methods_are_listed(run: Run) -> None:
    assert [line.split()[0] for line in run("methods").out.splitlines()[1:]] == list(METHODS)
    rows = {row["name"]: row for row in json.loads(run("methods", "--json").out)}
    assert rows["self-tpt-v"]["cost"] == "64 views"
    for name in METHODS:
        shown = json.loads(run("methods", name, "--json").out)
        assert rows[name].items() <= shown.items()
        assert shown["settings"].keys() == shown["help"].keys()
        assert all(shown["help"].values()), name
    coop = json.loads(run("methods", "coop", "--json").out)
    assert coop["settings"]["learn.contrast.temperature"] == 0.07
    assert not rows["clip"]["needs_labels"]
    assert rows["coop"]["needs_labels"]
    assert rows["difftpt"]["cost"] == "127 views, 4 steps"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "clap"], ["clap", "clip"]),
        (["--methods", ","], ["--methods"]),
        (["--seeds", "1,b"], ["--seeds", "1,b"]),
        (["--seeds", "-1"], ["--seeds"]),
        (["--datasets", "dtd"], ["dtd"]),
        (["--set", "learn.lr"], ["learn.lr=0.02"]),
        (["--set", "learn.speed=2"], ["learn.speed"]),
        (["--set", "learn.lr=fast"], ["lr", "fast"]),
        (["--set", "learn.epochs=2.5"], ["epochs", "2.5"]),
        (["--set", "learn=5"], ["'learn'"]),
        (["--source", "imagenet"], ["--source"]),
        (["--set", "learn.lr=-1"], ["lr must be a number above 0"]),
        (["--set", "learn.seed=3"], ["--seeds"]),
        (["--share", "2"], ["share"]),
        (["--source-classes", "1"], ["--source-classes must be"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_invalid_options_are_refused(
    run: Run, data: Path, weights: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    command = ["bench", "base-to-new", "--data", data, "--out", tmp_path / "runs", "--model", weights]
    refused(run(*command, *arguments), *words)
    assert not (tmp_path / "runs").exists()


def test_missing_data_is_refused(run: Run, weights: Path, tmp_path: Path) -> None:
    command = ["bench", "domain", "--out", tmp_path / "runs", "--model", weights]
    refused(run(*command, "--data", tmp_path / "nothing"), "domain")
    (tmp_path / "runs").write_text("a file")
    refused(run(*command, "--data", tmp_path), "runs")


def test_cache_is_shown_and_pruned(run: Run, data: Path, weights: Path, tmp_path: Path) -> None:
    assert "0.0 MB" in run("cache").out
    run("bench", "cross-dataset", "--data", data, "--out", tmp_path, "--model", weights, "--methods", "clip")
    shown = run("cache")
    assert "24 images" in shown.out
    assert "the image" in shown.out
    refused(run("cache", "ViT-B-16"), "ViT-B-16")
    assert json.loads(run("cache", "the image", "--json").out) == json.loads(run("cache", "--json").out)
    refused(run("cache", "63 random crops"), "63 random crops")
    (row,) = json.loads(run("cache", "--json").out)
    assert row["items"] == 24
    assert "deleted" in run("cache", "--prune").out
    assert json.loads(run("cache", "--json").out) == []
