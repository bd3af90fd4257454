"""Sharing prompts and classifiers through the Hugging Face hub.

Apart from the model card, only safetensors files are uploaded and downloaded. A downloaded file is verified like a
local one when it is loaded. It cannot make selftpt run code. Only the embedded model, or one that open_clip publishes,
is loaded because a file names it; the user must name any other model.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

import open_clip

from selftpt.errors import SelfTPTError, SelfTPTWarning
from selftpt.files import MAX_SIZE, read_header
from selftpt.models import EMBEDDED, ModelId
from selftpt.models.building import causes, first_line
from selftpt.models.loading import FOLDER, HUB
from selftpt.version import __version__

Kind = Literal["prompt", "classifier"]
Token = str | bool | None

PREFIXES = ("hub:", HUB)
README = "README.md"
LISTED_NAMES = 100  # class names in a model card
MARKER = re.compile(r"\n<!-- selftpt (\w+) card ([0-9a-f]{64}) -->\n$")


def is_hub_path(path: str | os.PathLike[str]) -> bool:
    """Return whether a path names a repository of the hub: `hub:USER/REPO` or `hf-hub:USER/REPO`."""
    return os.fspath(path).startswith(PREFIXES)


def resolve(path: str | os.PathLike[str], kind: Kind, *, token: Token = None) -> Path:
    """Return the local path of a file, which is downloaded from the hub if necessary.

    Args:
        path: A local path, which is returned as it is, or `hub:USER/REPO` or `hf-hub:USER/REPO`, optionally with
            `@REVISION`.
        kind: Which file of the repository: `"prompt"` or `"classifier"`.
        token: See `download`.

    Raises:
        SelfTPTError: The file cannot be downloaded.
    """
    if not is_hub_path(path):
        return Path(path)
    repo, _, revision = os.fspath(path).partition(":")[2].partition("@")
    return download(repo, kind, revision=revision or None, token=token)


def download(repo: str, kind: Kind, *, revision: str | None = None, token: Token = None) -> Path:
    """Download a prompt or a classifier from the hub into the cache of `huggingface_hub`.

    If the hub cannot be reached, the file in the cache is used.

    Args:
        repo: The repository, `USER/NAME`.
        kind: `"prompt"` or `"classifier"`.
        revision: A branch, tag or commit; by default the main branch.
        token: An access token of the hub; by default HF_TOKEN or the token of `hf auth login`.

    Returns:
        The path of the downloaded file.

    Raises:
        SelfTPTError: The file cannot be downloaded, or it is not a valid file of this kind.
    """
    import huggingface_hub

    _check(repo, token)
    name = f"{kind}.safetensors"
    with _errors(f"cannot download {name} from {repo}", repo, kind, revision):
        url = huggingface_hub.hf_hub_url(repo, name, revision=revision)
        cached_only = False
        try:
            metadata = huggingface_hub.get_hf_file_metadata(url, token=token)
            if (metadata.size or 0) > MAX_SIZE:
                raise SelfTPTError(
                    f"{name} of {repo} was not downloaded: it has {metadata.size} bytes, more than {MAX_SIZE}"
                )
        except Exception as error:
            if not _unreachable(error):
                raise
            # huggingface_hub would retry for half a minute
            cached_only, cause = True, error
        try:
            file = huggingface_hub.hf_hub_download(
                repo,
                name,
                revision=revision,
                token=token,
                library_name="selftpt",
                library_version=__version__,
                local_files_only=cached_only,
            )
        except Exception:
            if cached_only:
                raise cause from None
            raise
    path = Path(file)
    try:
        read_header(path, kind)
    except SelfTPTError as error:
        raise SelfTPTError(
            f"{name} of {repo} is not a {kind} that selftpt can read: ask its owner to upload it again "
            f"({first_line(error)})"
        ) from error
    return path


def push(
    repo: str,
    kind: Kind,
    save: Callable[[Path], None],
    card: str,
    *,
    private: bool | None = None,
    token: Token = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload a prompt or a classifier with its model card, in one commit.

    The repository is created if it does not exist. A README.md that was edited, or that selftpt did not generate, is
    not replaced, with a warning.

    Args:
        repo: The repository, `USER/NAME`.
        kind: `"prompt"` or `"classifier"`.
        save: Function that writes the file to a path.
        card: The model card, from `model_card`.
        private: Whether a new repository is private. By default it is public, unless the organisation's default is
            private.
        token: An access token with write permission; by default HF_TOKEN or the token of `hf auth login`.
        revision: The branch, which is created if it does not exist; by default the main branch.
        commit_message: The commit message.

    Returns:
        The URL of the commit.

    Raises:
        SelfTPTError: The upload failed, or the repository exists and its visibility does not match `private`.
    """
    import huggingface_hub

    _check(repo, token)
    name = f"{kind}.safetensors"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save(path)
        content = path.read_bytes()
    api = huggingface_hub.HfApi(token=token, library_name="selftpt", library_version=__version__)
    with _errors(f"cannot upload to {repo}", repo, None, revision):
        api.create_repo(repo, private=private, exist_ok=True)
        if private is not None and bool(api.repo_info(repo).private) != private:
            found, wanted = ("public", "private") if private else ("private", "public")
            raise SelfTPTError(
                f"{repo} exists and is {found}: nothing was uploaded; make it {wanted} in its settings on the hub, or "
                "choose another name"
            )
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        operations = [huggingface_hub.CommitOperationAdd(name, content)]
        if _is_generated(_current_readme(repo, revision, token), kind):
            operations.append(huggingface_hub.CommitOperationAdd(README, card.encode()))
        else:
            warnings.warn(
                f"{README} of {repo} was not replaced, because it was edited or was not generated by selftpt for a "
                f"{kind}: delete it on the hub and upload again to generate one",
                SelfTPTWarning,
                stacklevel=3,
            )
        done = api.create_commit(
            repo, operations, commit_message=commit_message or f"Upload a selftpt {kind}", revision=revision
        )
    return str(done.commit_url)


def _current_readme(repo: str, revision: str | None, token: Token) -> str | None:
    import huggingface_hub

    try:
        file = huggingface_hub.hf_hub_download(repo, README, revision=revision, token=token)
    except huggingface_hub.errors.EntryNotFoundError as error:
        if isinstance(error, huggingface_hub.errors.LocalEntryNotFoundError):
            raise
        return None
    return Path(file).read_bytes().decode(errors="replace")


def _is_generated(readme: str | None, kind: Kind) -> bool:
    """Return whether a README.md was generated for the same kind and not edited, or does not exist."""
    if readme is None:
        return True
    marker = MARKER.search(readme)
    return marker is not None and marker.groups() == (kind, sha256(readme[: marker.start()].encode()).hexdigest())


def shareable(model: ModelId) -> ModelId:
    """Return the identifier of a model without folders of this machine: local paths are reduced to their last part."""
    is_folder = model.name.startswith(FOLDER)
    name = _last_part(model.name.removeprefix(FOLDER)) if is_folder else _without_folders(model.name)
    return ModelId(name, model.pretrained and _without_folders(model.pretrained), model.digest)


def _is_path(name: str) -> bool:
    return PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute()


def _without_folders(name: str) -> str:
    return _last_part(name) if _is_path(name) else name


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def model_card(
    repo: str,
    kind: Kind,
    model: ModelId,
    origin: Mapping[str, Any],
    *,
    names: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    accuracy: Mapping[str, float] | None = None,
    license: str | None = None,
) -> str:
    """Generate the model card of a prompt or a classifier: YAML metadata and Markdown.

    Args:
        repo: The repository, `USER/NAME`.
        kind: `"prompt"` or `"classifier"`.
        model: The model that the prompt or classifier was made with.
        origin: How it was made, as its file records it.
        names: The class names of a classifier.
        settings: Settings that `origin` does not contain.
        accuracy: Top-1 accuracy in percent for each test set.
        license: The identifier of a license on the hub, such as "apache-2.0".

    Raises:
        SelfTPTError: The name of the repository, the accuracy or the license is not valid.
    """
    _check(repo, None)
    if license is not None and not (isinstance(license, str) and license.strip()):
        raise SelfTPTError(f"license must be an identifier such as 'apache-2.0', not {license!r}")
    results = check_accuracy(accuracy)
    model = shareable(model)
    base = base_model(model)
    metadata: dict[str, Any] = {
        "library_name": "selftpt",
        "pipeline_tag": "zero-shot-image-classification",
        "tags": ["selftpt", "clip", "prompt-tuning", "test-time-adaptation", f"selftpt-{kind}"],
        **({"license": license} if license else {}),
        **({"base_model": base, "base_model_relation": "adapter"} if base else {}),
    }
    # JSON strings and lists are valid YAML, whatever characters they contain.
    header = "".join(f"{key}: {json.dumps(value)}\n" for key, value in metadata.items())
    what = {
        "prompt": "A prompt for a CLIP model. `selftpt adapt` makes a classifier from it for any class names.",
        "classifier": f"An image classifier with one vector for each of {len(names or ())} classes, for a CLIP model.",
    }[kind]
    parts = [f"---\n{header}---", f"# {_escape(repo.rpartition('/')[2])}", f"{what} Made with selftpt."]
    if model.random_init:
        parts.append("> **Warning:** The weights of the model are randomly initialised. Predictions are meaningless.")
    parts += ["## Usage", *_usage(repo, kind, model)]
    identity = {"name": model.name, "pretrained weights": model.pretrained, "digest": model.digest}
    parts += ["## Model", _table(("model", ""), identity)]
    if names is not None:
        parts += ["## Classes", f"Class names: {_names(names)}"]
    parts += ["## Training data", *_training_data(origin, kind)]
    used = _flat({**_as_dict(settings), **_as_dict(origin.get("settings"))})
    for key in ("stage", "method", "template", "templates"):
        if key in origin:
            used.setdefault(key, origin[key])
    parts += ["## Settings", _table(("setting", "value"), used) if used else "The file records no settings."]
    parts.append("## Evaluation")
    if results:
        parts.append(_table(("test set", "top-1 accuracy (%)"), results))
        parts.append("The uploader reported these numbers; selftpt did not verify them.")
    else:
        parts.append("No accuracy was reported at the upload.")
    text = "\n\n".join(parts) + "\n"
    return f"{text}\n<!-- selftpt {kind} card {sha256(text.encode()).hexdigest()} -->\n"


def check_accuracy(accuracy: Mapping[str, float] | None) -> dict[str, float]:
    """Check a mapping from names of test sets to top-1 accuracy in percent; return it as a dictionary.

    Raises:
        SelfTPTError: It is not a mapping, or a value is not a percentage.
    """
    if accuracy is None:
        return {}
    if not isinstance(accuracy, Mapping):
        raise SelfTPTError(f"accuracy must be a mapping such as {{'my test set': 81.2}}, not {accuracy!r}")
    for name, value in accuracy.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(name, str) or not number or not math.isfinite(value) or not 0 <= value <= 100:
            raise SelfTPTError(
                f"accuracy must be a percentage from 0 to 100 for each test set, not {name!r}: {value!r}"
            )
    return dict(accuracy)


def base_model(model: ModelId) -> str | None:
    """Return the repository of a model on the hub, or None if it has none."""
    if model.name.startswith(HUB):
        repo = model.name.removeprefix(HUB)
    else:
        published = open_clip.get_pretrained_cfg(model.name.replace("/", "-"), model.pretrained or "") or {}
        repo = str(published.get("hf_hub") or "")
    repo = "/".join(repo.partition("@")[0].split("/")[:2])
    return repo if re.fullmatch(r"[\w.-]+/[\w.-]+", repo, re.ASCII) else None


def _usage(repo: str, kind: Kind, model: ModelId) -> Iterator[str]:
    """Yield Python code and a shell command that use a file of the hub."""
    published = open_clip.is_pretrained_cfg(model.name.replace("/", "-"), model.pretrained or "")
    embedded = model.name == EMBEDDED and model.pretrained is None
    arguments = "" if embedded else ", ".join(_code(part) for part in (model.name, model.pretrained) if part)
    load = f"selftpt.load_model({arguments})"
    on_hub = model.name.startswith(HUB)
    if not (published or embedded or on_hub):
        yield "The model is not published. Replace its name below with the path of the model on your machine."
    options = "" if embedded or published else f" --model {_code(model.name)}"
    if options and model.pretrained:
        options += f" --pretrained {_code(model.pretrained)}"
    if kind == "prompt":
        lines = [
            f"model = {load}",
            f'prompt = selftpt.Prompt.from_hub("{repo}")',
            'classifier = selftpt.adapt(model, prompt, ["cat", "dog"])',
        ]
        command = f'selftpt classify photo.jpg --names "cat, dog" --prompt hub:{repo}{options}'
    else:
        given = "" if embedded or published else f", model={load}"
        lines = [f'classifier = selftpt.Classifier.from_hub("{repo}"{given})']
        command = f"selftpt predict photo.jpg --classifier hub:{repo}{options}"
    code = "\n".join(["import selftpt", "", *lines, 'print(classifier.predict("photo.jpg").name)'])
    yield f"```python\n{code}\n```"
    yield f"Or on the command line:\n\n```\n{command}\n```"


def _training_data(origin: Mapping[str, Any], kind: Kind) -> Iterator[str]:
    """Yield a description of the data that a prompt, or the prompt of a classifier, was learned on."""
    learned = _as_dict(origin.get("prompt")) if kind == "classifier" else origin
    classes, settings = learned.get("classes"), _as_dict(learned.get("settings"))
    if not isinstance(classes, list):
        zero_shot = origin.get("stage") == "zero-shot"
        yield "None: this is a zero-shot classifier." if zero_shot else "The file does not record its training data."
        return
    facts: dict[str, object] = {"images": learned.get("images", "not recorded"), "classes": len(classes)}
    if "shots" in settings:
        facts["images per class (shots)"] = "all" if settings["shots"] is None else f"at most {settings['shots']}"
    yield _table(("source", ""), facts)
    yield f"Class names: {_names(classes)}"


def _names(names: Sequence[object]) -> str:
    """Return class names on one line; at most the first `LISTED_NAMES`."""
    rest = len(names) - LISTED_NAMES
    shown = ", ".join(_escape(name) for name in names[:LISTED_NAMES])
    return f"{shown}, and {rest} more, which the file lists." if rest > 0 else f"{shown}."


def _table(titles: tuple[str, str], rows: Mapping[str, object]) -> str:
    lines = [titles, ("---", "---"), *((_escape(key), _escape(value)) for key, value in rows.items())]
    return "\n".join(f"| {key} | {value} |" for key, value in lines)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Flatten nested settings: {"contrast": {"views": ...}} becomes {"contrast.views": ...}."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return flat


def _as_dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _escape(value: object) -> str:
    """Return a value as one line of plain Markdown text, escaped so that it contains no markup, HTML or link."""
    text = "none" if value is None else str(value)
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    text = text if len(text) <= 200 else f"{text[:197]}..."
    return re.sub(r"([\\`*_\[\]<>|~&$!#:@]|(?<=www)\.)", r"\\\1", text, flags=re.IGNORECASE)


def _code(text: str) -> str:
    """Return a string literal for a code block, escaped so that it cannot end the block."""
    return json.dumps(text, ensure_ascii=False).replace("`", "\\u0060").replace("$", "\\u0024")


def _check(repo: str, token: Token) -> None:
    """Check the name of a repository and a token before anything is sent to the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
        if not isinstance(repo, str) or repo.count("/") != 1:
            raise HFValidationError
    except HFValidationError:
        raise SelfTPTError(
            f"{repo!r} is not the name of a repository: give USER/NAME with letters, digits, '-', '_' and '.', such as "
            "alice/my-prompt"
        ) from None
    # A token with other characters would appear in the error messages of the HTTP library.
    if isinstance(token, str) and not re.fullmatch(r"[!-~]+", token):
        raise SelfTPTError("the token is not valid: it must not be empty or contain spaces; copy it from the hub again")


@contextlib.contextmanager
def _errors(what: str, repo: str, kind: Kind | None, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub into a `SelfTPTError` of one line; `kind` is None for uploads."""
    try:
        yield
    except SelfTPTError:
        raise
    except Exception as error:
        raise SelfTPTError(f"{what}: {_explain(error, repo, kind, revision)}") from error


def _explain(error: Exception, repo: str, kind: Kind | None, revision: str | None) -> str:
    from huggingface_hub import constants, errors

    chain = list(causes(error))
    codes = [cause.response.status_code for cause in chain if isinstance(cause, errors.HfHubHTTPError)]
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in chain):
        if kind is None:
            return "HF_HUB_OFFLINE is set: unset it to upload"
        return "HF_HUB_OFFLINE is set and the file is not in the cache: unset it, or use a local file"
    for cause in chain:
        if isinstance(cause, errors.GatedRepoError):
            return f"the repository is gated: accept its terms on {constants.ENDPOINT}/{repo} and run `hf auth login`"
        if isinstance(cause, errors.RevisionNotFoundError):
            return f"the repository has no revision {revision!r}: check the name of the branch, tag or commit"
        if isinstance(cause, errors.RemoteEntryNotFoundError):
            return f"the repository does not contain a selftpt {kind}: check its name and the revision"
        if isinstance(cause, errors.LocalTokenNotFoundError):
            return "you are not logged in: run `hf auth login`, or set HF_TOKEN"
    if kind is None and 401 in codes:
        return "you are not logged in or the token is not valid: run `hf auth login`, or set HF_TOKEN"
    if kind is None and 403 in codes:
        return (
            "the token has no permission to write there: use a token with write permission, or another repository name"
        )
    if any(isinstance(cause, errors.RepositoryNotFoundError) for cause in chain) or 404 in codes:
        return "there is no such repository, or it is private: check the name, or run `hf auth login`"
    if 401 in codes:
        return "the token is not valid: run `hf auth login`, or set HF_TOKEN to a valid one"
    if 403 in codes:
        return "you have no permission to read it: run `hf auth login` with an account that has it"
    if codes and codes[0] < 500:
        return f"the hub rejected the request with status {codes[0]}: {_detail(error)}"
    if codes:
        return f"the hub answered with status {codes[0]}: try again later ({_detail(error)})"
    if any(_unreachable(cause) for cause in chain):
        return f"{constants.ENDPOINT} cannot be reached: check the connection ({_detail(error)})"
    return _detail(error)


def _detail(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _unreachable(error: BaseException) -> bool:
    """Return whether the hub could not be reached or answered with a server error."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    library = type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3"))
    return library or isinstance(error, ConnectionError | TimeoutError)
