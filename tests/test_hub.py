"""Sharing through the Hugging Face hub, tested with a local stub of its HTTP API."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import constants
from markdown_it import MarkdownIt
from PIL import Image
from safetensors.torch import save_file

import selftpt
from selftpt import Classifier, Prompt, hub
from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.models import ModelId
from tests.helpers.commands import Run, refused
from tests.helpers.hub_server import READ_TOKEN, TOKEN, Hub, Repository, running_hub, use_hub

REPO = "alice/birds"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with use_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt.embedded()


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return selftpt.zero_shot(selftpt.load_model(), ["cat", "dog"])


def run_python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process with its own Hugging Face folder, and without a token unless one is given."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own = {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | own, cwd=folder, capture_output=True, text=True, timeout=300
    )


def same(first: Prompt, second: Prompt) -> bool:
    tensors = zip((first.context, *first.head), (second.context, *second.head), strict=True)
    return all(torch.equal(a, b) for a, b in tensors) and first.origin == second.origin


def card_of(server: Hub, repo: str = REPO) -> tuple[dict[str, Any], str]:
    """Return the metadata and the Markdown of an uploaded card."""
    _, metadata, text = server.repositories[repo].files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


# Round trips


@pytest.mark.slow
def test_prompt_and_classifier_round_trip_with_endpoint_from_the_environment(tmp_path: Path) -> None:
    Image.fromarray(np.full((32, 32, 3), 120, np.uint8)).save(tmp_path / "photo.jpg")
    code = f"""
import selftpt, torch
prompt = selftpt.Prompt.embedded()
print(prompt.push_to_hub({REPO!r}))
assert torch.equal(selftpt.Prompt.from_hub({REPO!r}).context, prompt.context)
classifier = selftpt.zero_shot(selftpt.load_model(), ["cat", "dog"])
classifier.push_to_hub("alice/pets", private=True)
found = selftpt.Classifier.from_hub("alice/pets")
assert torch.equal(found.weights, classifier.weights) and found.names == ("cat", "dog")
"""
    with running_hub() as server:
        server.lfs = True
        done = run_python(code, tmp_path, HF_ENDPOINT=server.url, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{server.url}/{REPO}/commit/")
        assert server.repositories["alice/pets"].private
        assert not server.repositories[REPO].private
        assert set(server.repositories[REPO].files) == {"README.md", "prompt.safetensors"}
        assert len(server.uploads) == 2

        for repo in (REPO, "alice/pets"):
            _, text = card_of(server, repo)
            usage = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
            done = run_python(usage[0], tmp_path, HF_ENDPOINT=server.url, HF_TOKEN=READ_TOKEN)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() in ("cat", "dog")


def test_uploaded_file_equals_saved_file(server: Hub, prompt: Prompt, tmp_path: Path) -> None:
    prompt.push_to_hub(REPO, commit_message="first version")
    prompt.save(tmp_path / "local.safetensors")
    repository = server.repositories[REPO]
    assert repository.files["prompt.safetensors"] == (tmp_path / "local.safetensors").read_bytes()
    assert repository.messages == ["first version"]
    assert same(Prompt.from_hub(REPO), prompt)


def test_lfs_upload_is_used_when_the_hub_asks_for_it(server: Hub, prompt: Prompt) -> None:
    server.lfs = True
    prompt.push_to_hub(REPO)
    assert server.repositories[REPO].files["prompt.safetensors"] in server.uploads.values()
    assert same(Prompt.from_hub(REPO), prompt)


def test_classifier_from_hub_takes_a_model_and_refuses_another(server: Hub, classifier: Classifier) -> None:
    classifier.push_to_hub(REPO)
    model = selftpt.load_model()
    assert Classifier.from_hub(REPO, model=model).model is model
    with pytest.raises(SelfTPTError, match="was made with"):
        Classifier.from_hub(REPO, model=selftpt.load_model("selftpt-tiny", "random"))


def test_revision_selects_a_branch(server: Hub, prompt: Prompt) -> None:
    first = dataclasses.replace(prompt, context=prompt.context + 1)
    first.push_to_hub(REPO)
    prompt.push_to_hub(REPO, revision="v2")
    prompt.push_to_hub(REPO, revision="v2")  # the branch exists now
    assert same(Prompt.from_hub(REPO), first)
    assert same(Prompt.from_hub(REPO, revision="v2"), prompt)
    assert same(Prompt.load(hub.resolve(f"hub:{REPO}@v2", "prompt")), prompt)


def test_explicit_token_is_sent_instead_of_the_environment(server: Hub, prompt: Prompt) -> None:
    with pytest.raises(SelfTPTError, match="no permission to write"):
        prompt.push_to_hub(REPO, token=READ_TOKEN)
    with pytest.raises(SelfTPTError, match="not logged in"):
        prompt.push_to_hub(REPO, token=False)
    assert REPO not in server.repositories


def test_cached_file_is_used_without_connection(server: Hub, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt.push_to_hub(REPO)
    Prompt.from_hub(REPO)
    server.down = True
    assert same(Prompt.from_hub(REPO), prompt)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(Prompt.from_hub(REPO), prompt)


def test_local_paths_are_resolved_to_themselves() -> None:
    assert hub.resolve("folder/prompt.safetensors", "prompt") == Path("folder/prompt.safetensors")
    assert not hub.is_hub_path("folder/hub:prompt.safetensors")
    assert hub.is_hub_path(Path("hub:a/b"))
    assert hub.is_hub_path("hf-hub:a/b")


# Model cards


def test_card_metadata_is_valid_yaml_and_card_lists_the_facts(server: Hub, prompt: Prompt) -> None:
    prompt.push_to_hub(REPO, accuracy={"my test set": 81.2}, license="apache-2.0")
    metadata, text = card_of(server)
    assert metadata["library_name"] == "selftpt"
    assert metadata["pipeline_tag"] == "zero-shot-image-classification"
    assert metadata["license"] == "apache-2.0"
    assert "selftpt-prompt" in metadata["tags"]
    assert "base_model" not in metadata  # the embedded model has no repository
    for line in (
        f"| digest | {prompt.model.digest} |",
        f"| images | {prompt.origin['images']} |",
        f"| lr | {prompt.origin['settings']['lr']} |",
        "| my test set | 81.2 |",
    ):
        assert line in text.splitlines()
    assert f"Class names: {prompt.origin['classes'][0]}, " in text
    assert "and 900 more" in text
    assert "No accuracy was reported" not in text


def test_card_says_when_nothing_was_evaluated_and_omits_the_license(server: Hub, classifier: Classifier) -> None:
    classifier.push_to_hub(REPO)
    metadata, text = card_of(server)
    assert "license" not in metadata
    assert "No accuracy was reported" in text
    assert "## Classes\n\nClass names: cat, dog.\n" in text
    assert "None: this is a zero-shot classifier." in text


def test_card_of_adapted_classifier_describes_its_prompt(prompt: Prompt) -> None:
    made = selftpt.adapt(selftpt.load_model(), prompt, ["cat", "dog"], selftpt.AdaptConfig(steps=1))
    text = hub.model_card(REPO, "classifier", made.model_id, made.origin, names=made.names)
    assert f"| images | {prompt.origin['images']} |" in text
    assert "| steps | 1 |" in text


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ModelId("ViT-B-16", "openai", "0"), "timm/vit_base_patch16_clip_224.openai"),
        (ModelId("ViT-B/16", "openai", "0"), "timm/vit_base_patch16_clip_224.openai"),
        (ModelId("hf-hub:org/name@v1", None, "0"), "org/name"),
        (ModelId("ViT-B-16", "random", "0"), None),
        (ModelId("/home/me/model", None, "0"), None),
    ],
)
def test_base_model_is_the_repository_of_the_model(model: ModelId, expected: str | None) -> None:
    assert hub.base_model(model) == expected
    metadata = yaml.safe_load(hub.model_card(REPO, "prompt", model, {}).split("---\n")[1])
    assert metadata.get("base_model") == expected


def test_card_warns_of_random_weights() -> None:
    random, trained = (
        hub.model_card(REPO, "prompt", ModelId("ViT-B-16", tag, "0"), {}) for tag in ("random", "openai")
    )
    assert "randomly initialised" in random
    assert "randomly initialised" not in trained
    assert 'selftpt.load_model("ViT-B-16", "openai")' in trained


HOSTILE = [
    "a | b",
    "---\ntags: [x]\n---",
    "<script>alert(1)</script>",
    "[link](http://example.com)",
    "![image](x)",
    "```\ncode",
    "# title",
    "www.example.com",
    "1. item",
    "- item",
    "=====",
    "-->",
    "line\r\nbreak\u2028\u202e",
    "back\\slash `tick` *star* _under_ $x$ &lt;",
]


def markup(text: str) -> set[str]:
    """Return all Markdown markup of a card other than headings, tables and code blocks."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text.split("---\n", 2)[2])
    blocks = {
        one.type for one in tokens if not one.type.startswith(("heading", "table", "thead", "tbody", "tr", "th", "td"))
    }
    assert blocks == {"inline", "paragraph_open", "paragraph_close", "fence", "html_block"}
    assert [one.content[:12] for one in tokens if one.type == "html_block"] == ["<!-- selftpt"]
    spans = [span for one in tokens if one.type == "inline" for span in one.children or ()]
    return {f"{span.markup}{span.content}{span.markup}" for span in spans if span.type not in ("text", "text_special")}


def test_hostile_text_breaks_neither_yaml_nor_markdown() -> None:
    origin = {
        "classes": HOSTILE,
        "images": HOSTILE[0],
        "settings": {name: name for name in HOSTILE},
        "stage": HOSTILE[1],
    }
    model = ModelId(HOSTILE[5], "$(touch x)`x`", "|")
    plain = ModelId("name", "weights", "digest")
    accuracy = dict.fromkeys(HOSTILE, 1.0)
    for kind in ("prompt", "classifier"):
        text, reference = (
            hub.model_card(REPO, kind, one, {**origin, "prompt": origin}, names=HOSTILE, accuracy=numbers)
            for one, numbers in ((model, accuracy), (plain, {"x": 1.0}))
        )
        assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "selftpt"
        assert [line for line in text.splitlines() if line == "---"] == ["---"] * 2
        assert text.count("```") == reference.count("```")
        headings = [line for line in text.splitlines() if line.startswith("#")]
        assert headings == [line for line in reference.splitlines() if line.startswith("#")]
        assert not re.search(r"(?<!\\)://", text)
        assert markup(text) == {"`selftpt adapt`"} if kind == "prompt" else markup(text) == set()
        for line in text.splitlines():
            if line.startswith("| "):
                assert len(re.findall(r"(?<!\\)\|", line)) == 3, line
        assert "\u202e" not in text
        assert "\u2028" not in text


@pytest.mark.parametrize("origin", [{"classes": 5}, {"settings": [1]}, {"prompt": "x"}, {"classes": [None, 3]}])
def test_card_of_file_with_unexpected_origin(origin: dict[str, Any]) -> None:
    for kind in ("prompt", "classifier"):
        assert "## Training data" in hub.model_card(REPO, kind, ModelId("m", None, "0"), origin, names=["cat"])


@pytest.mark.parametrize(
    "accuracy", [81.2, {"x": 101}, {"x": -1}, {"x": float("nan")}, {"x": "81"}, {"x": True}, {1: 2}]
)
def test_invalid_accuracy_is_refused_before_anything_is_sent(server: Hub, prompt: Prompt, accuracy: Any) -> None:
    with pytest.raises(SelfTPTError, match="accuracy must be"):
        prompt.push_to_hub(REPO, accuracy=accuracy)
    assert server.requests == []


def test_second_push_replaces_a_generated_card(server: Hub, prompt: Prompt) -> None:
    prompt.push_to_hub(REPO)
    prompt.push_to_hub(REPO, accuracy={"my test set": 81.2})
    assert "81.2" in card_of(server)[1]


def test_edited_card_is_kept_with_a_warning(server: Hub, prompt: Prompt, classifier: Classifier) -> None:
    prompt.push_to_hub(REPO)
    files = server.repositories[REPO].files
    files["README.md"] = edited = files["README.md"].replace(b"# birds", b"# Birds of my garden")
    with pytest.warns(SelfTPTWarning, match="README.md of alice/birds was not replaced"):
        prompt.push_to_hub(REPO, accuracy={"my test set": 81.2})
    assert files["README.md"] == edited
    prompt.push_to_hub("alice/other")
    with pytest.warns(SelfTPTWarning, match="was not replaced"):  # the card of a prompt does not describe a classifier
        classifier.push_to_hub("alice/other")


# Privacy


def test_folders_of_this_machine_are_not_uploaded(server: Hub, prompt: Prompt, classifier: Classifier) -> None:
    private = ModelId("/home/alice/secret/my-model", "/home/alice/secret/weights.pt", prompt.model.digest)
    dataclasses.replace(prompt, model=private).push_to_hub(REPO)
    dataclasses.replace(classifier, model_id=private, model=None).push_to_hub("alice/pets")
    for repository in server.repositories.values():
        assert not any(b"secret" in content for content in repository.files.values())
    assert Prompt.from_hub(REPO).model == ModelId("my-model", "weights.pt", prompt.model.digest)
    assert hub.shareable(ModelId("C:\\Users\\me\\m", None, "0")).name == "m"
    assert hub.shareable(ModelId("local-dir:/home/me/m", None, "0")).name == "m"
    assert hub.shareable(ModelId("local-dir:clients/acme/m", None, "0")).name == "m"
    assert hub.shareable(ModelId("hf-hub:org/name", "a", "0")) == ModelId("hf-hub:org/name", "a", "0")


def test_private_push_to_a_public_repository_uploads_nothing(server: Hub, prompt: Prompt) -> None:
    server.repositories[REPO] = Repository()
    with pytest.raises(SelfTPTError, match="exists and is public: nothing was uploaded"):
        prompt.push_to_hub(REPO, private=True)
    assert server.repositories[REPO].files == {}
    prompt.push_to_hub(REPO, private=False)
    assert "prompt.safetensors" in server.repositories[REPO].files


# Errors


@pytest.mark.parametrize(
    "repo",
    ["birds", "a/b/c", "", "../x/y", "alice/birds/", "alice/bi rds", "alice/--x", "alice/x.git", "a\n/b", None, 3],
)
def test_invalid_repository_name_is_refused_before_anything_is_sent(server: Hub, prompt: Prompt, repo: Any) -> None:
    for call in (Prompt.from_hub, Classifier.from_hub, prompt.push_to_hub):
        with pytest.raises(SelfTPTError, match="is not the name of a repository: give USER/NAME"):
            call(repo)
    assert server.requests == []


@pytest.mark.parametrize("token", ["", "hf_secret\n", "hf secret", "hf_sécret"])
def test_invalid_token_is_refused_and_not_shown(server: Hub, prompt: Prompt, token: str) -> None:
    for call in (Prompt.from_hub, prompt.push_to_hub):
        with pytest.raises(SelfTPTError, match="token is not valid") as error:
            call(REPO, token=token)
        assert "cret" not in str(error.value)
    assert server.requests == []


def test_download_errors_say_what_to_do(server: Hub, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories[REPO] = Repository()
    server.repositories["alice/private"] = Repository(private=True)
    server.repositories["alice/gated"] = Repository(gated=True)
    for repo, options, message in (
        ("alice/missing", {}, "no such repository, or it is private: check the name, or run `hf auth login`"),
        ("alice/missing", {"token": False}, "no such repository, or it is private"),
        ("alice/private", {"token": False}, "no such repository, or it is private"),
        ("alice/gated", {}, f"the repository is gated: accept its terms on {server.url}/alice/gated"),
        (REPO, {}, "the repository does not contain a selftpt prompt: check its name"),
        (REPO, {"revision": "v9"}, "no revision 'v9'"),
        (REPO, {"token": "hf_other"}, "the token is not valid: run `hf auth login`"),
    ):
        with pytest.raises(SelfTPTError, match=re.escape(message)) as error:
            Prompt.from_hub(repo, **options)
        assert str(error.value).startswith(f"cannot download prompt.safetensors from {repo}: ")
        assert "\n" not in str(error.value)
    server.down = True
    with pytest.raises(SelfTPTError, match="the hub answered with status 503: try again later"):
        Prompt.from_hub(REPO)


def test_push_errors_say_what_to_do(server: Hub, prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SelfTPTError, match=r'rejected the request with status 400.*"license" must be one of') as error:
        prompt.push_to_hub(REPO, license="unknown-license")
    assert "\n" not in str(error.value)
    with pytest.raises(SelfTPTError, match="license must be an identifier"):
        prompt.push_to_hub(REPO, license="")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(SelfTPTError, match="not logged in or the token is not valid: run `hf auth login`"):
        prompt.push_to_hub(REPO)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(SelfTPTError, match="cannot upload to alice/birds: you are not logged in"):
        prompt.push_to_hub(REPO)


def test_error_in_offline_mode_mentions_hf_hub_offline(
    server: Hub, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for call in (Prompt.from_hub, Classifier.from_hub):
        with pytest.raises(SelfTPTError, match="HF_HUB_OFFLINE is set and the file is not in the cache"):
            call(REPO)
    with pytest.raises(SelfTPTError, match="HF_HUB_OFFLINE is set: unset it to upload"):
        prompt.push_to_hub(REPO)
    assert server.requests == []


def test_error_without_connection_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"  # no server listens on this port
        code = f"""
from selftpt import Prompt, SelfTPTError
for call in (Prompt.from_hub, Prompt.embedded().push_to_hub):
    try:
        call({REPO!r})
    except SelfTPTError as error:
        print(error)
"""
        done = run_python(code, tmp_path, HF_ENDPOINT=endpoint, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    download, upload = done.stdout.splitlines()
    assert f"cannot download prompt.safetensors from {REPO}: {endpoint} cannot be reached: check the conn" in download
    assert f"cannot upload to {REPO}: {endpoint} cannot be reached: check the connection" in upload


# Untrusted files


def test_file_of_another_program_is_refused(
    server: Hub, prompt: Prompt, classifier: Classifier, tmp_path: Path
) -> None:
    save_file({"context": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    classifier.save(tmp_path / "classifier.safetensors")
    contents = {
        "foreign": (tmp_path / "other.safetensors").read_bytes(),
        "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        "empty": b"",
        "kind": (tmp_path / "classifier.safetensors").read_bytes(),
    }
    for name, content in contents.items():
        server.repositories[f"eve/{name}"] = Repository(branches={"main": {"prompt.safetensors": content}})
        with pytest.raises(
            SelfTPTError, match=f"prompt.safetensors of eve/{name} is not a prompt that selftpt can read"
        ):
            Prompt.from_hub(f"eve/{name}")


def test_changed_tensor_is_refused(server: Hub, prompt: Prompt) -> None:
    prompt.push_to_hub(REPO)
    files = server.repositories[REPO].files
    content = bytearray(files["prompt.safetensors"])
    content[-1] ^= 1
    files["prompt.safetensors"] = bytes(content)
    with pytest.raises(SelfTPTError, match="does not match its digest"):
        Prompt.from_hub(REPO)


def test_shared_classifier_cannot_choose_the_model_that_is_loaded(server: Hub, classifier: Classifier) -> None:
    forged = dataclasses.replace(classifier, model_id=ModelId("hf-hub:eve/model", None, "0" * 32), model=None)
    forged.push_to_hub(REPO)
    found = Classifier.from_hub(REPO)
    server.requests.clear()
    with pytest.raises(SelfTPTError, match="loaded only when you name it"):
        found.predict(np.zeros((8, 8, 3), np.uint8))
    assert server.requests == []


def test_oversized_file_is_not_downloaded(server: Hub, prompt: Prompt) -> None:
    prompt.push_to_hub(REPO)
    server.sizes["prompt.safetensors"] = 1 << 50
    server.requests.clear()
    with pytest.raises(SelfTPTError, match="not downloaded"):
        Prompt.from_hub(REPO)
    assert not [request for request in server.requests if request.startswith("GET")]


# The command line


def test_push_command_uploads_a_prompt_and_a_classifier(
    server: Hub, run: Run, prompt: Prompt, classifier: Classifier, tmp_path: Path
) -> None:
    prompt.save(tmp_path / "p.safetensors")
    classifier.save(tmp_path / "c.safetensors")
    options = ("--accuracy", "set a=b=81.2", "--accuracy", "B=50", "--license", "mit", "--message", "hello")
    answer = run("push", tmp_path / "p.safetensors", REPO, *options)
    assert answer.code == 0, answer
    assert answer.out.startswith(f"uploaded the prompt to {REPO}: {server.url}")
    assert server.repositories[REPO].messages == ["hello"]
    metadata, text = card_of(server)
    assert metadata["license"] == "mit"
    assert "| set a=b | 81.2 |" in text
    assert "| B | 50.0 |" in text
    answer = run("push", tmp_path / "c.safetensors", "alice/pets", "--private", "--json")
    assert json.loads(answer.out)["kind"] == "classifier"
    assert server.repositories["alice/pets"].private


def test_commands_accept_prompts_and_classifiers_from_the_hub(
    server: Hub, run: Run, prompt: Prompt, classifier: Classifier, tmp_path: Path
) -> None:
    prompt.push_to_hub(REPO)
    classifier.push_to_hub("alice/pets")
    Image.fromarray(np.full((32, 32, 3), 120, np.uint8)).save(tmp_path / "photo.jpg")
    adapted = run("adapt", "--prompt", f"hub:{REPO}", "--names", "cat, dog", "--out", tmp_path / "c.safetensors")
    assert adapted.code == 0, adapted
    assert Classifier.load(tmp_path / "c.safetensors").names == ("cat", "dog")
    for place in ("hub:alice/pets", "hf-hub:alice/pets@main"):
        answer = run("predict", tmp_path / "photo.jpg", "--classifier", place, "--json")
        assert json.loads(answer.out)["names"][0] in ("cat", "dog")
    refused(run("predict", tmp_path / "photo.jpg", "--classifier", "hub:alice/none"), "no such repository")
    refused(run("predict", tmp_path / "photo.jpg", "--classifier", "hub:nobody"), "is not the name of a repository")


def test_push_command_refuses_what_it_cannot_share(server: Hub, run: Run, prompt: Prompt, tmp_path: Path) -> None:
    prompt.save(tmp_path / "p.safetensors")
    refused(run("push", tmp_path / "missing", REPO), "does not exist")
    refused(run("push", tmp_path / "p.safetensors", "birds"), "is not the name of a repository")
    for accuracy in ("81.2", "set=", "set=many", "=81"):
        refused(run("push", tmp_path / "p.safetensors", REPO, "--accuracy", accuracy), "--accuracy takes")
    assert server.requests == []
