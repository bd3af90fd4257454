"""Loading models in any thread does not change logging, warning filters or random state of the process."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from selftpt import LearnConfig, learn, load_model
from selftpt.models.building import SeededRandomOps, build_model
from tests.helpers.folders import make_model, make_photos

JOBS = [("selftpt-tiny", None), ("selftpt-tiny", "random"), ("ViT-S-32-alt", "random"), ("MobileCLIP-S1", "random")] * 2


@pytest.fixture
def no_global_seeding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a global generator is seeded."""

    def refuse(*_: object) -> None:
        raise AssertionError("a global generator was seeded")

    for name in ("manual_seed", "seed", "set_rng_state", "cuda.manual_seed_all", "cuda.manual_seed", "mps.manual_seed"):
        monkeypatch.setattr(f"torch.{name}", refuse)


@pytest.mark.usefixtures("no_global_seeding")
def test_threads_that_load_at_the_same_time_change_no_global_state(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a new process, where logging.info() would install a handler
    for job in set(JOBS):
        load_model(*job, device="cpu")  # performs the imports of the first use
    filters, shown = warnings.filters[:], warnings.showwarning
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    level, dtype = root.level, torch.get_default_dtype()
    barrier, problems, done = threading.Barrier(len(JOBS) + 1), [], threading.Event()

    def load(job: tuple[str, str | None]) -> str:
        barrier.wait()
        return load_model(*job, device="cpu").id.digest

    def watch() -> None:
        while not done.wait(0.001):
            if root.handlers or root.manager.disable:
                problems.append("logging")
            if warnings.filters != filters:
                problems.append("warning filters")
            if not torch.equal(torch.get_rng_state(), state):
                problems.append("random state")

    watcher = threading.Thread(target=watch)
    with ThreadPoolExecutor(len(JOBS)) as pool:
        running = [pool.submit(load, job) for job in JOBS]
        watcher.start()
        barrier.wait()
        digests = [each.result() for each in running]
    done.set()
    watcher.join()
    assert not problems
    assert len(set(digests)) == 4
    assert digests[:4] == digests[4:] == [load_model(*job, device="cpu").id.digest for job in JOBS[:4]]
    assert root.handlers == []
    assert (root.level, logging.root.manager.disable, torch.get_default_dtype()) == (level, 0, dtype)
    assert (warnings.filters, warnings.showwarning) == (filters, shown)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy  # type: ignore[index,union-attr]


def test_other_threads_log_warn_and_draw_as_usual_during_a_load(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(5)
    expected = torch.rand(2000, 4)
    torch.manual_seed(5)
    stop, drawn, logged, warned = threading.Event(), [], 0, 0
    with ThreadPoolExecutor(8) as pool, warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        running = [pool.submit(load_model, *job, device="cpu") for job in JOBS]
        while not all(each.done() for each in running) and len(drawn) < 2000:
            drawn.append(torch.rand(4))
            logging.getLogger("user").info("%d", logged)
            warnings.warn(f"user {warned}", UserWarning, stacklevel=1)
            logged, warned = logged + 1, warned + 1
            stop.wait(0.002)
    assert len(drawn) > 10
    assert torch.equal(torch.stack(drawn), expected[: len(drawn)])
    assert sum(record.name == "user" for record in caplog.records) == logged
    assert sum(str(warning.message).startswith("user ") for warning in caught) == warned
    assert [record for record in caplog.records if record.name == "root"] == []


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_new_process_has_no_root_handler_after_a_load(tmp_path: Path, kind: str) -> None:
    """Also if position embeddings are resized, which open_clip logs."""
    if kind == "folder":
        arguments = [str(make_model(tmp_path / "a"))]
    else:
        state = open_clip.create_model("ViT-S-32-alt").state_dict()
        state["visual.positional_embedding"] = torch.randn(17, state["visual.positional_embedding"].shape[1])
        torch.save(state, tmp_path / "w.pt")
        arguments = ["ViT-S-32-alt", str(tmp_path / "w.pt")]
    program = (
        "import logging, sys, torch, selftpt; state = torch.get_rng_state(); "
        "selftpt.load_model(*sys.argv[1:], device='cpu'); "
        "assert not logging.root.handlers; assert torch.equal(torch.get_rng_state(), state)"
    )
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)


@pytest.mark.parametrize("name", ["RN50", "ViT-S-32-alt", "MobileCLIP-S1", "coca_ViT-B-32", "EVA02-B-16"])
def test_random_weights_equal_open_clip_after_manual_seed_0(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = open_clip.create_model(name, load_weights=False, pretrained_text=False).state_dict()
    found = build_model(open_clip.get_model_config(name), {}).state_dict()
    assert found.keys() == expected.keys()
    uninitialised = "text_decoder.text_projection"  # CoCa does not initialise it
    assert uninitialised not in found or not found[uninitialised].any()
    assert all(torch.equal(found[key], expected[key]) for key in expected if key != uninitialised)


def test_every_random_operation_draws_from_the_generator_of_the_context() -> None:
    def draw() -> list[torch.Tensor]:
        empty = torch.empty(20)
        return [
            torch.randn(20),
            torch.rand(3, 4),
            torch.randint(9, (20,)),
            torch.randperm(20),
            torch.rand_like(empty),
            empty.normal_(),
            torch.empty(5).uniform_(),
            torch.nn.init.trunc_normal_(torch.empty(20)),
            torch.bernoulli(torch.full((20,), 0.5)),
            torch.nn.Linear(3, 3).weight.detach(),
            torch.multinomial(torch.ones(5), 3),
        ]

    torch.manual_seed(0)
    expected, state = draw(), torch.manual_seed(7).get_state()
    with SeededRandomOps(0):
        found = draw()
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("weights", [None, "random"])
def test_model_loaded_in_inference_mode_can_be_used_for_training(
    tmp_path: Path, mode: type, weights: str | None
) -> None:
    with mode():
        model = load_model(pretrained=weights, device="cpu")
    clip = model.clip
    assert not any(tensor.is_inference() for tensor in (*clip.parameters(), *clip.buffers(), *clip.visual.buffers()))
    learn(model, make_photos(tmp_path / "photos"), LearnConfig(epochs=1, shots=1))


def test_default_device_does_not_change_random_weights() -> None:
    expected = load_model(pretrained="random", device="cpu").id
    with torch.device("meta"):
        assert load_model(pretrained="random", device="cpu").id == expected
