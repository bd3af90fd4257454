"""The command line: its output, and one-line errors with exit code 2."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from selftpt import adaptation
from selftpt.files import read_file, write_tensors
from tests.helpers.commands import CommandResult, Run, refused
from tests.helpers.folders import make_model, make_photos


class Files(NamedTuple):
    """A model, labelled images, and a prompt and a classifier made from them."""

    model: Path
    photos: Path
    prompt: Path
    classifier: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    import selftpt

    folder = tmp_path_factory.mktemp("files")
    made = Files(make_model(folder / "model"), make_photos(folder / "photos"), folder / "p.st", folder / "c.st")
    model = selftpt.load_model(str(made.model), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFTPT_CACHE", str(folder / "cache"))
        prompt = selftpt.learn(model, made.photos, selftpt.LearnConfig(epochs=2), out=made.prompt)
    selftpt.adapt(model, prompt, ["cat", "dog", "bird"]).save(made.classifier)
    return made


def test_learn_adapt_and_predict(run: Run, files: Files, tmp_path: Path) -> None:
    prompt, classifier = tmp_path / "prompt.st", tmp_path / "classifier.st"
    learned = run("learn", files.photos, "--out", prompt, "--model", files.model, "--epochs", 2, "--shots", 2, "--json")
    assert learned.code == 0, learned.err
    assert json.loads(learned.out)["images"] == 6
    adapted = run(
        "adapt", "--prompt", prompt, "--names", "cat, polar bear,dog", "--out", classifier, "--model", files.model
    )
    assert adapted.code == 0, adapted.err
    assert "3 classes" in adapted.out
    predicted = run(
        "predict", files.photos / "kite", "--classifier", classifier, "--json", "--top", 2, "--model", files.model
    )
    assert predicted.code == 0, predicted.err
    rows = [json.loads(line) for line in predicted.out.splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "2.png"]
    assert all(len(row["names"]) == 2 and set(row["names"]) < {"cat", "polar bear", "dog"} for row in rows)
    assert all(row["probabilities"][0] >= row["probabilities"][1] > 0 for row in rows)
    assert not any("random_init" in row for row in rows)


@pytest.mark.parametrize("own", [None, "7"])
def test_spin_count_is_limited_by_default(run: Run, monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    """A value that the user has set is kept."""
    monkeypatch.setenv("GOMP_SPINCOUNT", own or "")
    if own is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    run("--version")
    assert os.environ["GOMP_SPINCOUNT"] == (own or "1000")


def test_top_1_has_no_column_for_other_classes(run: Run, files: Files) -> None:
    predict = ["predict", files.photos / "kite", "--classifier", files.classifier, "--model", files.model]
    assert "other classes" in run(*predict).out.splitlines()[0]
    assert "other classes" not in run(*predict, "--top", 1).out


def test_contradictory_output_formats_are_refused(run: Run, files: Files) -> None:
    command = [
        "predict",
        files.photos / "kite",
        "--classifier",
        files.classifier,
        "--model",
        files.model,
        "--json",
        "--format",
    ]
    refused(run(*command, "csv"), "--format csv")
    assert run(*command, "jsonl").code == 0


def test_table_csv_and_jsonl_have_the_same_content(run: Run, files: Files) -> None:
    def predict(*more: str) -> CommandResult:
        return run(
            "predict",
            files.photos / "kite",
            "--classifier",
            files.classifier,
            "--model",
            files.model,
            "--top",
            "2",
            *more,
        )

    rows = [json.loads(line) for line in predict("--format", "jsonl").out.splitlines()]
    table = list(csv.DictReader(io.StringIO(predict("--format", "csv").out)))
    assert [row["path"] for row in table] == [row["path"] for row in rows]
    for line, row in zip(table, rows, strict=True):
        assert (line["name_1"], line["name_2"]) == tuple(row["names"])
        assert float(line["probability_1"]) == pytest.approx(row["probabilities"][0], abs=1e-6)
    text = predict().out
    for row in rows:
        assert f"{row['probabilities'][0]:.1%}" in text


def test_classify_caches_the_adapted_classifier(run: Run, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "classify",
        files.photos,
        "--prompt",
        files.prompt,
        "--model",
        files.model,
        "--names",
        "cat,dog",
        "--json",
    ]
    first = run(*arguments)
    assert first.code == 0, first.err

    def never(*_: object) -> None:
        raise AssertionError("adapted a second time")

    monkeypatch.setattr(adaptation, "contrast_step", never)
    second = run(*arguments)
    assert (second.code, second.out) == (0, first.out)
    assert "is in the cache" in second.err
    for change in (["--names", "cat,cow"], ["--steps", "3"], ["--vectors", "mean"]):
        with pytest.raises(AssertionError, match="a second time"):
            run(*arguments, *change)


def test_damaged_cached_classifier_is_set_aside_and_replaced(run: Run, files: Files, own_cache: Path) -> None:
    arguments = [
        "classify",
        files.photos,
        "--prompt",
        files.prompt,
        "--model",
        files.model,
        "--names",
        "cat,dog",
        "--json",
    ]
    first = run(*arguments)
    (kept,) = (own_cache / "classifiers").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    second = run(*arguments)
    assert (second.code, second.out) == (0, first.out)
    assert "set aside" in second.err


def test_images_come_from_files_folders_patterns_and_a_list(run: Run, files: Files) -> None:
    def paths(*places: str | Path, stdin: str = "") -> list[str]:
        answer = run(
            "predict", *places, "--classifier", files.classifier, "--model", files.model, "--json", stdin=stdin
        )
        assert answer.code == 0, answer.err
        return [json.loads(line)["path"] for line in answer.out.splitlines()]

    one, folder = str(files.photos / "kite" / "0.png"), files.photos / "kite"
    assert paths(one) == [one]
    assert paths(folder) == [str(folder / f"{i}.png") for i in range(3)]
    assert paths(f"{files.photos}/*/0.png") == [
        str(files.photos / n / "0.png") for n in ("blue whale", "kite", "red_fox")
    ]
    assert paths("-", stdin=f"{one}\n\n{files.photos}/blue whale/1.png\n") == [one, f"{files.photos}/blue whale/1.png"]


def test_predictions_with_views_are_reproducible(run: Run, files: Files) -> None:
    def predict(*more: str) -> str:
        return run(
            "predict", files.photos / "kite", "--classifier", files.classifier, "--model", files.model, "--json", *more
        ).out

    many = predict("--views", "8")
    assert many != predict()
    assert many == predict("--views", "8")
    assert many != predict("--views", "8", "--seed", "1")
    assert many != predict("--views", "8", "--confidence-ratio", "0.2")


def test_random_weights_are_marked_in_all_outputs(run: Run, files: Files, tmp_path: Path) -> None:
    prompt, classifier = tmp_path / "p.st", tmp_path / "c.st"
    options = ["--model", files.model, "--pretrained", "random"]
    assert json.loads(run("learn", files.photos, "--out", prompt, *options, "--epochs", 1, "--json").out)["random_init"]
    adapted = run("adapt", "--prompt", prompt, "--names", "cat,dog", "--out", classifier, "--json", *options)
    assert json.loads(adapted.out)["random_init"]
    for file in (prompt, classifier):
        assert read_file(file)[0]["random_init"] is True
        assert "randomly initialised weights" in run("inspect", file).out
    assert all(json.loads(line)["random_init"] for line in Path(f"{prompt}.log.jsonl").read_text().splitlines())
    predict = ["predict", files.photos / "kite", "--classifier", classifier, *options]
    answers = [run(*predict, "--format", form) for form in ("jsonl", "csv", "table")]
    assert all("meaningless" in answer.err for answer in answers)
    assert json.loads(answers[0].out.splitlines()[0])["random_init"] is True
    assert [row["random_init"] for row in csv.DictReader(io.StringIO(answers[1].out))] == ["true"] * 3
    assert "meaningless" in answers[2].out


def test_inspect_shows_the_content_of_a_file(run: Run, files: Files) -> None:
    shown = run("inspect", files.prompt).out
    assert "prompt file, format 2, written by selftpt" in shown
    assert "context: 4 x 16" in shown
    assert "blue whale, kite, red fox" in shown
    header = json.loads(run("inspect", files.classifier, "--json").out)
    assert header["kind"] == "classifier"
    assert header["verified"] is True
    assert header["tensors"] == {"weights": [3, 16]}
    assert header["names"] == ["cat", "dog", "bird"]
    assert header["origin"]["settings"]["steps"] == 10
    assert header["origin"]["prompt"]["settings"]["epochs"] == 2


def test_inspect_shows_whether_the_digest_was_verified(run: Run, files: Files, tmp_path: Path) -> None:
    assert "digest: verified" in run("inspect", files.prompt).out
    old = tmp_path / "old.safetensors"
    save_file({"w": torch.ones(2)}, old, {"selftpt": '{"format": 1, "kind": "thing"}'})
    assert "digest: none (format 1 has none)" in run("inspect", old).out
    assert json.loads(run("inspect", old, "--json").out)["verified"] is False
    data = bytearray(files.prompt.read_bytes())
    data[-1] ^= 1
    (tmp_path / "p").write_bytes(data)
    refused(run("inspect", tmp_path / "p"), "does not match its digest")


def test_inspect_prints_any_header_without_control_characters(run: Run, tmp_path: Path) -> None:
    strange = {"origin": [1], "model": "m", "names": [1, None], "contrast": 3}
    controls = {"names": ["a\x1b[2J\nb\ud800"], "origin": {"settings": {"a\nb": "\x9b"}, "selftpt": "\x07"}}
    for header in (strange, controls, {"origin": {"settings": 3, "classes": "ab", "selftpt": {}}, "model": {}}):
        write_tensors(tmp_path / "a", "thing", {}, header)
        for more in ((), ("--json",)):
            answer = run("inspect", tmp_path / "a", *more)
            assert answer.code == 0
            assert all(line.isprintable() for line in answer.out.split("\n"))


def test_models_lists_names_and_weights(run: Run) -> None:
    listed = json.loads(run("models", "--json").out)
    assert "openai" in listed["ViT-B-16-quickgelu"]
    expected = {"RN50", "RN101", "ViT-B-32", "ViT-L-14", "EVA02-B-16", "MobileCLIP-B", "ViT-B-16-SigLIP"}
    assert expected <= listed.keys()
    assert "openai" in run("models", "rn50").out
    refused(run("models", "no such model"), "no such model")


def test_version_and_help_are_printed(run: Run) -> None:
    assert run("--version").out.startswith("selftpt ")
    for command in ("learn", "adapt", "predict", "classify", "models", "inspect"):
        assert command in run("--help").out
        assert run(command, "--help").code == 0


def test_command_line_does_not_import_torch_at_start() -> None:
    code = "import sys, selftpt.cli; sys.exit('torch' in sys.modules or 'open_clip' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names_are_read_from_text_and_json_files(run: Run, files: Files, tmp_path: Path) -> None:
    lines, listing = tmp_path / "names.txt", tmp_path / "names.json"
    lines.write_text("cat, a small one\n\n  dog \n", encoding="utf-8")
    listing.write_text('["cat, a small one", "dog"]')
    answers = [
        run(
            "classify",
            files.photos / "kite",
            "--prompt",
            files.prompt,
            "--model",
            files.model,
            "--names-file",
            file,
            "--json",
        )
        for file in (lines, listing)
    ]
    assert answers[0].code == 0, answers[0].err
    assert answers[0].out == answers[1].out
    assert set(json.loads(answers[0].out.splitlines()[0])["names"]) == {"cat, a small one", "dog"}
    for text, words in (('["cat", 3]', "strings"), ("[cat", "JSON"), ("", "no class names")):
        listing.write_text(text)
        refused(
            run("classify", files.photos, "--prompt", files.prompt, "--model", files.model, "--names-file", listing),
            words,
        )
    refused(
        run(
            "classify",
            files.photos,
            "--prompt",
            files.prompt,
            "--model",
            files.model,
            "--names-file",
            tmp_path / "none",
        ),
        "none",
    )


NAMES = [
    (("--names", ""), "no class names"),
    (("--names", " , ,"), "no class names"),
    (("--names", "cat"), "only one class name, 'cat'"),
    (("--names", "cat," + "dog " * 90), "90 tokens"),
    (("--names", "cat,___"), "class name 2 of 2 is empty"),
    ((), "--names"),
    (("--names", "a,b", "--names-file", "f"), "either"),
]


@pytest.mark.parametrize(("arguments", "words"), NAMES)
def test_invalid_names_are_refused(
    run: Run, files: Files, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    refused(run("adapt", "--prompt", files.prompt, "--model", files.model, "--out", tmp_path / "c", *arguments), words)
    assert not list(tmp_path.iterdir())


def test_names_file_may_start_with_a_byte_order_mark(run: Run, files: Files, tmp_path: Path) -> None:
    for text in ("cat\ndog", '["cat", "dog"]'):
        (tmp_path / "names").write_text(text, encoding="utf-8-sig")
        answer = run(
            "classify",
            files.photos,
            "--prompt",
            files.prompt,
            "--model",
            files.model,
            "--names-file",
            tmp_path / "names",
            "--json",
        )
        assert set(json.loads(answer.out.splitlines()[0])["names"]) == {"cat", "dog"}


def test_classify_works_with_an_unwritable_cache(
    run: Run, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFTPT_CACHE", str(tmp_path / "file"))
    answer = run(
        "classify", files.photos, "--prompt", files.prompt, "--model", files.model, "--names", "cat,dog", "--json"
    )
    assert answer.code == 0
    assert len(answer.out.splitlines()) == 9
    assert "note: the classifier is not cached" in answer.err


def test_duplicate_names_of_a_cached_classifier_are_reported(run: Run, files: Files) -> None:
    arguments = [
        "classify",
        files.photos,
        "--prompt",
        files.prompt,
        "--model",
        files.model,
        "--names",
        "cat,dog,CAT",
        "--json",
    ]
    run(*arguments)
    again = run(*arguments)
    assert "is in the cache" in again.err
    assert "equal class names: cat" in again.err


def test_duplicate_names_are_accepted_and_reported(run: Run, files: Files, tmp_path: Path) -> None:
    answer = run(
        "adapt", "--prompt", files.prompt, "--model", files.model, "--names", "cat,dog,CAT", "--out", tmp_path / "c"
    )
    assert answer.code == 0
    assert "note: equal class names: cat" in answer.err


def test_invalid_sources_are_refused(run: Run, files: Files, tmp_path: Path) -> None:
    def learn(folder: Path) -> CommandResult:
        return run("learn", folder, "--out", tmp_path / "p", "--model", files.model, "--epochs", 1)

    refused(learn(tmp_path / "none"), "does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(learn(empty), "one folder of images per class")
    photos = make_photos(tmp_path / "photos")
    (photos / "zebra").mkdir()
    refused(learn(photos), "zebra has no image")
    (photos / "zebra" / "a.jpg").write_text("text")
    answer = learn(photos)
    refused(answer, "'zebra' has no image that can be read")
    assert "note: skipped" in answer.err
    refused(learn(photos / "kite" / "0.png"), "is neither a folder nor a CSV file")
    assert not (tmp_path / "p").exists()


def test_unusable_images_are_reported(run: Run, files: Files, tmp_path: Path) -> None:
    cut, text, huge = tmp_path / "cut.jpg", tmp_path / "text.jpg", tmp_path / "huge.png"
    good = files.photos / "kite" / "0.png"
    Image.open(good).resize((300, 300)).save(cut)
    cut.write_bytes(cut.read_bytes()[:-2000])
    text.write_text("I am no image")
    Image.new("1", (10_000, 10_000)).save(huge)

    def predict(*images: Path, **_: object) -> CommandResult:
        return run("predict", *images, "--classifier", files.classifier, "--model", files.model, "--json")

    for bad, words in ((cut, "cut short"), (text, "not an image"), (huge, "100 megapixels")):
        answer = predict(bad)
        refused(answer, words, str(bad))
        assert len(answer.err.splitlines()) == 1
    answer = predict(cut, text)
    refused(answer, "no image could be used (2 failed)")
    assert sum(line.startswith("note: skipped") for line in answer.err.splitlines()) == 2
    answer = predict(cut, good, text)
    assert answer.code == 0
    assert [json.loads(line)["path"] for line in answer.out.splitlines()] == [str(good)]
    assert "2 of 3 images were skipped" in answer.err
    raised = run(
        "predict", huge, "--classifier", files.classifier, "--model", files.model, "--json", "--max-megapixels", "101"
    )
    assert raised.code == 0, raised.err
    refused(predict(tmp_path / "none.jpg"), "none.jpg does not exist")
    refused(predict(tmp_path / "*.gif"), "no file matches")
    (tmp_path / "empty").mkdir()
    refused(predict(tmp_path / "empty"), "has no image")
    missing = run(
        "predict",
        "-",
        "--classifier",
        files.classifier,
        "--model",
        files.model,
        "--json",
        stdin=f"{tmp_path}/none.jpg\n{good}\n",
    )
    assert missing.code == 0
    assert "no such file" in missing.err
    gone = run(
        "predict",
        "-",
        "--classifier",
        files.classifier,
        "--model",
        files.model,
        "--json",
        stdin=f"{tmp_path}/gone[1].jpg\n{good}\n",
    )
    assert gone.code == 0
    assert "gone[1].jpg" in gone.err
    refused(
        run("predict", "-", "--classifier", files.classifier, "--model", files.model, "--json", stdin="\n"),
        "no image was given",
    )


def test_invalid_files_are_refused(run: Run, files: Files, tmp_path: Path) -> None:
    cut, other = tmp_path / "cut.st", make_model(tmp_path / "other", embed_dim=8)
    cut.write_bytes(files.prompt.read_bytes()[:-50])
    out = tmp_path / "c.st"
    adapt = ["adapt", "--names", "cat,dog", "--out", out, "--prompt"]
    refused(run(*adapt, cut), "truncated")
    refused(run(*adapt, tmp_path / "none"), "does not exist")
    refused(run(*adapt, files.classifier), "holds a classifier, not a prompt")
    refused(run(*adapt, files.photos / "kite" / "0.png"), "not a selftpt file")
    refused(run(*adapt, files.prompt, "--model", other), str(files.model), str(other))
    refused(run("predict", files.photos, "--classifier", files.prompt), "holds a prompt, not a classifier")
    refused(
        run("predict", files.photos, "--classifier", files.classifier, "--model", files.model, "--model", other),
        str(files.model),
        str(other),
    )
    refused(run("inspect", cut), "truncated")
    checkpoint = tmp_path / "some.checkpoint"
    write_tensors(checkpoint, "checkpoint", {}, {"epochs": 3})
    assert "checkpoint file, format" in run("inspect", checkpoint).out
    assert not out.exists()


def test_unwritable_output_is_refused(run: Run, files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path / "file" / "p", tmp_path):
        refused(run("learn", files.photos, "--out", out, "--model", files.model), "cannot write")
        refused(
            run("adapt", "--prompt", files.prompt, "--model", files.model, "--names", "cat,dog", "--out", out),
            "cannot write",
        )
    assert (tmp_path / "file").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_recorded_model_folder_is_not_loaded_from_a_file(run: Run, files: Files, tmp_path: Path) -> None:
    predict = run("predict", files.photos / "kite", "--classifier", files.classifier)
    refused(predict, f"the classifier {files.classifier} was made with {files.model}", f"give --model {files.model}")
    adapt = ["adapt", "--prompt", files.prompt, "--names", "cat,dog", "--out", tmp_path / "c"]
    refused(run(*adapt), f"the prompt {files.prompt} was made with {files.model}")
    refused(run(*adapt, "--pretrained", "random"), "--pretrained needs --model")
    refused(run("classify", files.photos, "--prompt", files.prompt, "--names", "cat,dog"), f"--model {files.model}")


def test_commands_work_without_a_home_folder(
    run: Run, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("SELFTPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer = run(
        "classify", files.photos / "kite", "--names", "cat,dog", "--prompt", files.prompt, "--model", files.model
    )
    assert answer.code == 0, answer.err
    assert answer.err.count("there is no home folder") == 1
    assert (tmp_path / f"selftpt-{os.getuid()}" / "classifiers").is_dir()


def test_invalid_models_are_refused(run: Run, files: Files, tmp_path: Path) -> None:
    def learn(*arguments: str | Path) -> CommandResult:
        return run("learn", files.photos, "--out", tmp_path / "p", *arguments)

    refused(learn("--model", "x" * 300, "--pretrained", "random"), "no model is called")
    refused(learn("--model", "ViT-B-17", "--pretrained", "random"), "did you mean", "ViT-B-16")
    refused(learn("--model", "ViT-B-16"), "needs weights", "openai")
    refused(learn("--model", "ViT-B-16", "--pretrained", "nonsense"), "nonsense", "openai")
    refused(learn("--model", tmp_path), "open_clip_config.json")
    refused(learn("--model", files.model, "--device", "toaster"), "toaster")
    refused(learn("--model", files.model, "--precision", "fp12"), "fp12")
    (tmp_path / "weights.safetensors").write_bytes((files.model / "open_clip_model.safetensors").read_bytes())
    answer = learn("--model", "ViT-S-32-alt", "--pretrained", tmp_path / "weights.safetensors")
    refused(answer, "does not contain weights of ViT-S-32-alt")


def test_invalid_options_are_refused(run: Run, files: Files, tmp_path: Path) -> None:
    learn = ["learn", files.photos, "--out", tmp_path / "p", "--model", files.model]
    refused(run(*learn, "--epochs", "0"), "epochs must be an integer above 0")
    refused(run(*learn, "--epochs", "many"), "--epochs")
    refused(run(*learn, "--seed", "1000000000000000"), "seed")
    refused(run(*learn, "--views", "end,back"), "'back'")
    refused(run(*learn, "--no-such-option"), "--no-such-option")
    refused(run("predict", "--classifier", files.classifier, "--model", files.model), "IMAGES")
    refused(
        run("predict", files.photos, "--classifier", files.classifier, "--model", files.model, "--views", "0"),
        "views must be an integer above 0",
    )


def start(*arguments: str | Path, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "selftpt", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **more})  # type: ignore[call-overload,no-any-return]


def test_full_disk_leaves_the_old_file(files: Files, tmp_path: Path) -> None:
    """A file size limit of one kilobyte simulates the full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    out = tmp_path / "c.st"
    out.write_text("as it was")
    command = ["adapt", "--prompt", files.prompt, "--model", files.model, "--names", "cat,dog", "--out", out]
    process = start(*command, preexec_fn=limit, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    _, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith("selftpt: cannot write")
    assert len(err.splitlines()) == 1
    assert out.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["c.st"]


def test_full_disk_for_standard_output_is_a_one_line_error(files: Files) -> None:
    with open("/dev/full", "w") as full:
        process = start("inspect", files.prompt, stdout=full)
        _, err = process.communicate()
    assert process.returncode == 2
    assert len(err.splitlines()) == 1
    assert err.startswith("selftpt: cannot write the output: No space left")


def test_file_names_that_are_not_utf8_are_accepted(files: Files, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9.png"
    Path(os.fsdecode(odd)).write_bytes((files.photos / "kite" / "0.png").read_bytes())
    command = ["predict", "-", "--classifier", files.classifier, "--model", files.model, "--format", "csv"]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"}
    process = start(*command, text=False, stdin=subprocess.PIPE, env=environment)
    out, err = process.communicate(odd + b"\n")
    assert process.returncode == 0, err
    assert odd in out


def test_ctrl_c_leaves_no_partial_files(files: Files, tmp_path: Path) -> None:
    out = tmp_path / "p.st"
    learn = ["learn", files.photos, "--out", out, "--model", files.model, "--epochs", "200", "--batch", "1"]
    # Background jobs of a shell ignore SIGINT.
    default_sigint = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = start(*learn, **default_sigint)
    while process.poll() is None and not Path(f"{out}.checkpoint").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    printed, err = process.communicate()
    assert process.returncode == 2
    assert printed == ""
    assert err.startswith("selftpt: interrupted")
    assert len(err.splitlines()) == 1
    assert not out.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"p.st.checkpoint", "p.st.log.jsonl"}
    assert read_file(Path(f"{out}.checkpoint"))[0]["epochs"] >= 1


def test_closed_output_pipe_is_not_an_error_message(files: Files) -> None:
    process = start(
        "predict",
        *[files.photos] * 30,
        "--classifier",
        files.classifier,
        "--model",
        files.model,
        "--json",
        "--batch",
        "1",
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_words_of_an_error_are_not_found_in_notes() -> None:
    """Otherwise `refused` would accept an error that lacks the words."""
    result = CommandResult(2, "", "note: the cache is not used\nselftpt: there is no such file\n")
    refused(result, "no such file")
    with pytest.raises(AssertionError):
        refused(result, "cache")
