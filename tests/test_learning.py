"""Stage 1: training, checkpoints and logs, and bitwise reproducibility."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt import LearnConfig, Prompt, SelfTPTError, SelfTPTWarning, learn
from selftpt.config import ContrastConfig
from selftpt.data import views as data_views
from selftpt.data.decoding import open_image
from selftpt.data.sources import Source
from selftpt.files import read_file, write_tensors
from selftpt.learning import ClassLists, learn_from_features
from selftpt.models.tokenizer import class_tokens
from selftpt.training import RunFiles, State, checkpoints, learning_rate
from tests.helpers.folders import make_model, make_photos
from tests.helpers.models import model, small
from tests.oracle import reference

NAMES = ("red fox", "blue whale", "kite", "old man of the sea")


def source(count: int = 8, epochs: int = 3, dimension: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random features [N, epochs, D] and labels [N]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, epochs, dimension, generator=generator)
    return F.normalize(features, dim=-1), torch.arange(count) % len(NAMES)


def run(config: LearnConfig, out: Path | None = None, kind: str = "vit") -> Prompt:
    tokens = class_tokens(model(kind).text.tokenizer, NAMES, config.length, config.contrast)
    features, labels = source(epochs=config.epochs, dimension=model(kind).dimension)
    return learn_from_features(model(kind), tokens, features, labels, config, out)


def same_bits(a: Prompt, b: Prompt) -> bool:
    return all(torch.equal(x, y) for x, y in zip((a.context, *a.head), (b.context, *b.head), strict=True))


def test_learning_rate_is_constant_in_the_first_epoch_and_then_follows_a_cosine() -> None:
    config = LearnConfig(epochs=10, lr=0.002, warmup_lr=1e-5)
    assert learning_rate(0, config) == 1e-5
    assert learning_rate(1, config) == 0.002
    assert learning_rate(6, config) == pytest.approx(0.001)
    assert learning_rate(9, config) == pytest.approx(0.002 * (1 + math.cos(0.8 * math.pi)) / 2)


def test_learn_equals_sgd_on_the_reference_losses() -> None:
    """The reference is Algorithm 1 with reference gradients and SGD written out."""
    config = LearnConfig(epochs=3, batch=3, lr=0.05, warmup_lr=0.01, length=2, words="photo of")
    tiny = small("vit", torch.float64)
    tokens = class_tokens(tiny.model.text.tokenizer, NAMES, 2, config.contrast)
    features, labels = source(dimension=tiny.model.dimension)
    learned = learn_from_features(model("vit"), tokens, features, labels, config)

    generator = torch.Generator().manual_seed(config.seed)
    context = tiny.embedding[torch.tensor(tiny.encode("photo of"))].clone()
    d = tiny.model.dimension
    w1, w2 = torch.empty(d, d), torch.empty(128, d)
    for weight in (w1, w2):
        torch.nn.init.xavier_uniform_(weight, generator=generator)
    parameters = [context, w1.double(), torch.zeros(d).double(), w2.double(), torch.zeros(128).double()]
    momentum = [torch.zeros_like(p) for p in parameters]
    gradients: list[Tensor] = []
    for epoch in range(3):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config.seed * 100_003 + epoch))
        for i in range(0, len(labels) - 2, 3):
            chosen = order[i : i + 3]
            joint = reference.joint(
                tiny, NAMES, parameters[0], parameters[1:], features[chosen, epoch].double(), labels[chosen],
                1 / tiny.model.scale, gradients, reference.Settings(decay=config.decay),
            )  # fmt: skip
            gradients.append(joint.by_ce)
            for p, m, g in zip(parameters, momentum, [joint.prompt_gradient, *joint.head_gradients], strict=True):
                m.mul_(0.9).add_(g + 5e-4 * p)
                p.sub_(learning_rate(epoch, config) * m)
    for found, expected in zip((learned.context, *learned.head), parameters, strict=True):
        assert (found - expected).norm() <= 2e-4 * expected.norm() + 1e-6
    assert (learned.context - tiny.embedding[torch.tensor(tiny.encode("photo of"))]).norm() > 1e-2


def test_same_seed_gives_the_same_bits_and_another_seed_does_not() -> None:
    config = LearnConfig(epochs=2)
    first = run(config)
    assert same_bits(first, run(config))
    assert not same_bits(first, run(LearnConfig(epochs=2, seed=2)))


@pytest.mark.parametrize("after", [1, 2])
def test_run_interrupted_after_an_epoch_resumes_bitwise_identically(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LearnConfig(epochs=3, gm=0.5)
    whole = tmp_path / "whole.safetensors"
    run(config, whole)
    out, keep = tmp_path / "stopped.safetensors", RunFiles.keep

    def stop(self: RunFiles, state: object, epochs: int, *rest: object) -> None:
        keep(self, state, epochs, *rest)  # type: ignore[arg-type]
        if epochs == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "keep", stop)
    with pytest.raises(KeyboardInterrupt):
        run(config, out)
    assert not out.exists()
    assert Path(f"{out}.checkpoint").exists()
    monkeypatch.setattr(RunFiles, "keep", keep)
    run(config, out)
    assert out.read_bytes() == whole.read_bytes()
    assert Path(f"{out}.log.jsonl").read_text() == Path(f"{whole}.log.jsonl").read_text()
    assert not Path(f"{out}.checkpoint").exists()


def test_checkpoint_of_other_settings_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, finish = tmp_path / "p.safetensors", RunFiles.finish

    def stop(self: RunFiles, prompt: Prompt) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFiles, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        run(LearnConfig(epochs=2, lr=0.1), out)
    monkeypatch.setattr(RunFiles, "finish", finish)
    with pytest.warns(SelfTPTWarning, match="from the start: .* belongs to another run"):
        assert same_bits(run(LearnConfig(epochs=2, lr=0.2), out), run(LearnConfig(epochs=2, lr=0.2)))


def interrupted(out: Path, monkeypatch: pytest.MonkeyPatch, config: LearnConfig) -> Path:
    """Return the checkpoint of a run that was stopped after its first epoch."""
    keep = RunFiles.keep

    def stop(self: RunFiles, *rest: Any) -> None:
        keep(self, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "keep", stop)
        with pytest.raises(KeyboardInterrupt):
            run(config, out)
    return Path(f"{out}.checkpoint")


def rewrite(file: Path, header: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None) -> None:
    """Rewrite a checkpoint with changes and valid digests."""
    found, kept = read_file(file)
    changed = {name: tensor for name, tensor in {**kept, **(tensors or {})}.items() if tensor is not None}
    write_tensors(file, "checkpoint", changed, {**found, **(header or {})})


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)


def cut_log(file: Path) -> None:
    os.truncate(file.with_suffix(".log.jsonl"), 100)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (lambda file: file.write_text("damaged"), "not a selftpt file"),
    (flip, "does not match its digest"),
    (cut_log, "bytes, and now it has 100"),
    (lambda file: rewrite(file, {"epochs": 3}), "number of epochs is 3, not 1 to 2"),
    (lambda file: rewrite(file, {"epochs": 0}), "number of epochs is 0, not 1 to 2"),
    (lambda file: rewrite(file, {"epochs": "1"}), "epochs must be an integer"),
    (lambda file: rewrite(file, {"logged": -1}), "had -1 bytes"),
    (lambda file: rewrite(file, {"logged": 10**15}), "0 bytes, and now"),
    (lambda file: rewrite(file, {"format": 1}), "no digest"),
    (lambda file: rewrite(file, {"more": 1}), "unknown entry"),
    (lambda file: rewrite(file, None, {"parameter.5": torch.zeros(2)}), "not those of this run"),
    (lambda file: rewrite(file, None, {"parameter.x": torch.zeros(2)}), "not those of this run"),
    (lambda file: rewrite(file, None, {"optimizer.0.momentum_buffer": None}), "not those of this run"),
    (lambda file: rewrite(file, None, {"memory.average": None}), "not those of this run"),
    (lambda file: rewrite(file, None, {"memory.other": torch.zeros(1)}), "not those of this run"),
    (lambda file: rewrite(file, None, {"parameter.4": torch.zeros(1)}), r"parameter\.4 must be float32 \[128\]"),
    (lambda file: rewrite(file, None, {"parameter.4": torch.zeros(128).half()}), "not float16"),
    (lambda file: rewrite(file, None, {"memory.average": torch.zeros(1, 32)}), r"memory\.average must be"),
    (lambda file: rewrite(file, None, {"optimizer.4.momentum_buffer": torch.zeros(1)}), "must be"),
    (lambda file: rewrite(file, None, {"parameter.4": torch.full((128,), math.nan)}), "not finite"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_damaged_checkpoint_is_set_aside(
    damage: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run warns, starts from the beginning, and writes a complete log."""
    config, out, whole = LearnConfig(epochs=2), tmp_path / "p", tmp_path / "whole"
    checkpoint = interrupted(out, monkeypatch, config)
    damage(checkpoint)
    content = checkpoint.read_bytes()
    with pytest.warns(SelfTPTWarning, match=f"learning from the start: .*{words}.*: set aside as p.checkpoint.damaged"):
        found = run(config, out)
    assert same_bits(found, run(config, whole))
    assert out.read_bytes() == whole.read_bytes()
    assert Path(f"{out}.log.jsonl").read_bytes() == Path(f"{whole}.log.jsonl").read_bytes()
    assert Path(f"{checkpoint}.damaged").read_bytes() == content
    assert not checkpoint.exists()


def test_pipe_instead_of_a_checkpoint_does_not_block_a_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.checkpoint")
    with pytest.warns(SelfTPTWarning, match="not a regular file"):
        assert same_bits(run(LearnConfig(epochs=1), tmp_path / "p"), run(LearnConfig(epochs=1)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_state_is_restored_completely_or_not_at_all(optimizer: type[torch.optim.Optimizer]) -> None:
    def make() -> State:
        parameters = [torch.ones(2, 3), torch.zeros(4)]
        return State(parameters, optimizer(parameters, lr=0.1), remembers={"average": torch.zeros(2)})  # type: ignore[call-arg]

    stepped = make()
    for parameter in stepped.parameters:
        parameter.grad = torch.ones_like(parameter)
    stepped.optimizer.step()
    stepped.memory["average"] = torch.ones(2)
    saved = {name: tensor.clone() for name, tensor in stepped.tensors().items()}
    restored = make()
    restored.restore(saved)
    assert restored.tensors().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in restored.tensors().items())
    for name in saved:
        fresh = make()
        wrong = {**saved, name: saved[name][None]}
        with pytest.raises(ValueError, match=f"{name} must be"):
            fresh.restore(wrong)
        del wrong[name]
        with pytest.raises(ValueError, match="not those of this run"):
            fresh.restore(wrong)
        assert all(torch.equal(a, b) for a, b in zip(fresh.parameters, make().parameters, strict=True))
        assert not fresh.optimizer.state
        assert not fresh.memory


def test_run_stopped_between_log_and_checkpoint_logs_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    run(LearnConfig(epochs=3), whole)
    write = checkpoints.write_tensors

    def stop(path: Path, *rest: object) -> None:
        if rest[2]["epochs"] == 2:  # type: ignore[index]
            raise KeyboardInterrupt
        write(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoints, "write_tensors", stop)
    with pytest.raises(KeyboardInterrupt):
        run(LearnConfig(epochs=3), out)
    monkeypatch.setattr(checkpoints, "write_tensors", write)
    run(LearnConfig(epochs=3), out)
    assert Path(f"{out}.log.jsonl").read_bytes() == Path(f"{whole}.log.jsonl").read_bytes()


SCRIPT = """
import sys, torch, selftpt
torch.set_num_threads(1)
model = selftpt.load_model(sys.argv[1], device="cpu")
selftpt.learn(model, sys.argv[2], selftpt.LearnConfig(epochs=40, batch=2), out=sys.argv[3])
"""


def test_run_killed_at_any_moment_resumes_bitwise_identically(tmp_path: Path) -> None:
    """The process is killed several times while it computes features or learns."""
    folder, photos = make_model(tmp_path / "model"), make_photos(tmp_path / "photos")

    def start(out: Path, cache: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SCRIPT, str(folder), str(photos), str(out)]
        return subprocess.Popen(command, env={**os.environ, "SELFTPT_CACHE": str(cache)})

    whole, out = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    uninterrupted = start(whole, tmp_path / "cache 1")
    killed = start(out, tmp_path / "cache 2")
    signs = [lambda: any((tmp_path / "cache 2").rglob("*.safetensors")), Path(f"{out}.checkpoint").exists]
    for sign in signs:
        while killed.poll() is None and not sign():
            time.sleep(0.005)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL, "it must not end before it is killed"
        killed = start(out, tmp_path / "cache 2")
    assert killed.wait() == 0
    assert uninterrupted.wait() == 0
    assert out.read_bytes() == whole.read_bytes()
    assert Path(f"{out}.log.jsonl").read_bytes() == Path(f"{whole}.log.jsonl").read_bytes()


def test_log_has_one_line_per_step(tmp_path: Path) -> None:
    out = tmp_path / "p.safetensors"
    config = LearnConfig(epochs=2, batch=3)
    run(config, out)
    lines = [json.loads(line) for line in Path(f"{out}.log.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in lines] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [line["lr"] for line in lines] == [1e-5, 1e-5, 0.002, 0.002]
    names = {"ce", "cpt", "gm", "cosine", "grad_ce", "grad_cpt", "grad_gm"}
    assert all(names <= line.keys() for line in lines)
    assert all(line["random_init"] for line in lines)
    first = lines[0]
    assert first["gm"] == pytest.approx(
        1 - first["cosine"], abs=1e-5
    )  # in the first step, the average equals the gradient


def test_each_loss_can_be_disabled(tmp_path: Path) -> None:
    alone = run(LearnConfig(epochs=2, lr=0.1, cpt=0, gm=0, weight_decay=0), tmp_path / "ce")
    untrained = run(LearnConfig(epochs=1, warmup_lr=1e-30, weight_decay=0))
    assert all(torch.allclose(a, b, atol=1e-20) for a, b in zip(alone.head, untrained.head, strict=True))
    assert not torch.equal(alone.context, untrained.context)
    assert "cpt" not in json.loads(Path(f"{tmp_path / 'ce'}.log.jsonl").read_text().splitlines()[0])
    contexts = [
        run(LearnConfig(epochs=2, lr=0.1, **weights)).context for weights in ({"gm": 0}, {"ce": 0}, {"cpt": 0}, {})
    ]
    for i, a in enumerate(contexts):
        assert all(not torch.equal(a, b) for b in contexts[i + 1 :])


def test_sampled_class_list_has_the_classes_of_the_batch_and_no_duplicates() -> None:
    config = LearnConfig(classes_per_step=3)
    tokens = class_tokens(model().text.tokenizer, NAMES, 4, config.contrast)
    lists = ClassLists(model(), tokens, config)
    drawn = set()
    for step in range(20):
        task, labels = lists.draw([2, 0, 2], f"{step}")
        assert labels.tolist() == [1, 0, 1]  # classes 0 and 2 come first, in order
        features = task.encoder(torch.zeros(4, model().text.width))
        assert features.shape[1] == 3
        assert task.hand_crafted is not None
        assert torch.allclose(task.hand_crafted[:2], lists.hand_crafted[torch.tensor([0, 2])])  # type: ignore[index]
        drawn.add(next(i for i in (1, 3) if torch.equal(task.hand_crafted[2], lists.hand_crafted[i])))  # type: ignore[index]
    assert drawn == {1, 3}


def test_sampling_all_classes_equals_no_sampling(tmp_path: Path) -> None:
    drawn, whole = run(LearnConfig(epochs=2, classes_per_step=4)), run(LearnConfig(epochs=2))
    assert torch.allclose(drawn.context, whole.context, atol=1e-5)
    few = run(LearnConfig(epochs=2, classes_per_step=2), tmp_path / "few")
    assert not torch.allclose(few.context, whole.context, atol=1e-5)
    assert read_file(tmp_path / "few")[0]["origin"]["settings"]["classes_per_step"] == 2


def test_learning_from_a_folder_reads_no_image_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, seen = make_photos(tmp_path / "photos"), []
    opener = data_views.open_image
    monkeypatch.setattr(data_views, "open_image", lambda path, *a: seen.append(path) or opener(path, *a))
    prompt = learn(model(), photos, LearnConfig(epochs=2, shots=2), out=tmp_path / "a")
    assert len(seen) == 6
    assert prompt.origin["images"] == 6
    assert prompt.origin["classes"] == ["blue whale", "kite", "red fox"]
    other = learn(model(), photos, LearnConfig(epochs=2, shots=2, lr=0.1))
    assert len(seen) == 6
    assert not torch.equal(prompt.context, other.context)
    assert Prompt.load(tmp_path / "a").digest == prompt.digest


def test_unusable_image_is_left_out_but_class_without_images_is_an_error(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos")
    (photos / "kite" / "0.png").write_text("not a image")
    with pytest.warns(SelfTPTWarning, match=r"skipped .*kite/0.png"):
        assert learn(model(), photos, LearnConfig(epochs=1)).origin["images"] == 8
    for i in range(3):
        (photos / "kite" / f"{i}.png").write_text("not a image")
    with pytest.raises(SelfTPTError, match="'kite' has no image that can be read"):
        learn(model(), photos, LearnConfig(epochs=1), on_error=lambda error: None)


def test_losses_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(SelfTPTError, match="lower the learning rate"):
        run(LearnConfig(epochs=3, lr=1e30, warmup_lr=1e30), tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_unwritable_output_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SelfTPTError, match="cannot write"):
        learn(model(), tmp_path / "nowhere", out=tmp_path / "file" / "p.safetensors")


@pytest.mark.parametrize("length", [1, 3, 6])
def test_initial_context_is_the_last_words_after_random_vectors(length: int) -> None:
    config = LearnConfig(length=length, epochs=1, warmup_lr=1e-30, weight_decay=0, momentum=0)
    words = model().text.embed_words("a photo of a")
    context = run(config).context
    assert torch.equal(context[-4:], words[-length:])
    if length > 4:
        assert context[: length - 4].std() == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize(
    "wrong",
    [{"length": 0}, {"epochs": 0}, {"batch": -1}, {"lr": 0}, {"momentum": 1.0}, {"decay": -0.1}, {"matching": "dot"},
     {"ce": 0, "cpt": 0, "gm": 0}, {"classes_per_step": 1}, {"shots": 0}, {"chunk": 0}, {"lr": math.nan}],
)  # fmt: skip
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SelfTPTError):
        LearnConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"views": ("end",)}, {"views": ("end", "end")}, {"views": ("end", "back")}, {"temperature": 0},
     {"reduction": "max"}, {"template": "a photo"}, {"template": "{} {}"}],
)  # fmt: skip
def test_invalid_contrast_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SelfTPTError):
        ContrastConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_learn_works_without_gradient_mode(tmp_path: Path, mode: type) -> None:
    photos, config = make_photos(tmp_path / "photos"), LearnConfig(epochs=2)
    expected = learn(model(), photos, config)
    with mode():
        found = learn(model(), photos, config)
        features = torch.nn.functional.normalize(torch.ones(4, 24), dim=-1)  # an inference tensor
        learn(model(), Source.from_features(features, [0, 1, 0, 1], ["cat", "kite"]), config)
    assert torch.equal(found.context, expected.context)
    assert found.context.clone().requires_grad_().sum().requires_grad


def test_learning_from_images_in_memory_and_from_a_csv_is_reproducible(tmp_path: Path) -> None:
    """A CSV file with the same paths gives the same prompt; images in memory have other, reproducible crops."""
    photos, config = make_photos(tmp_path / "photos"), LearnConfig(epochs=2)
    source = Source.from_folder(photos)
    rows = "".join(f"{path},{source.names[label]}\n" for path, label in zip(source.paths, source.labels, strict=True))
    (tmp_path / "list.csv").write_text(rows)
    assert torch.equal(learn(model(), tmp_path / "list.csv", config).context, learn(model(), photos, config).context)
    images = Source.from_images([open_image(path) for path in source.paths], source.labels, source.names)
    first = learn(model(), images, config)
    assert first.origin["images"] == 9
    assert torch.equal(learn(model(), images, config).context, first.context)


def test_initial_values_are_used_and_checked(tmp_path: Path) -> None:
    photos, config = make_photos(tmp_path / "photos"), LearnConfig(epochs=1, warmup_lr=1e-12)
    start = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    found = learn(model(), photos, config, initial={"context": start})
    torch.testing.assert_close(found.context, start)
    for wrong, words in (({"contexts": start}, "context, w1, b1, w2, b2"), ({"context": start[:3]}, "[3, 32]")):
        with pytest.raises(SelfTPTError, match=re.escape(words)):
            learn(model(), photos, config, initial=wrong)
