"""Mutation fuzzing of the files that selftpt writes: `python -m tests.fuzz --kind files --n 5000 --seed 1`.

A mutated file must give a one-line error or the same result as the valid file. Checkpoints and caches must be
recovered from instead, with a warning. A records file may lose or repeat records. A file whose digests were recomputed
after the change, as an attacker would do, may give another result. No file may cause a traceback.

To add a kind of file, add an entry to `KINDS`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import shutil
import struct
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import Answer, Case, cut, flip, join, measured, noise, remove, repeat, same

LIMIT_MB = 1000  # memory limit per file; the valid files are small
NAMES = ["red fox", "blue whale", "kite"]


# The kinds of files


@dataclass(frozen=True)
class FileKind:
    """A kind of file.

    Attributes:
        make: Writes a valid file and everything that it needs to an empty folder, and returns its path.
        use: Uses the file and returns a JSON value that represents the result.
        recovers: Whether the program must continue without the file if it is damaged.
        accepts: Whether a result is acceptable, given the result of the valid file.
    """

    make: Callable[[Path], Path]
    use: Callable[[Path], Any]
    recovers: bool = False
    accepts: Callable[[Any, Any], bool] = lambda found, expected: bool(found == expected)


def make_prompt(folder: Path) -> Path:
    import torch

    from selftpt import Prompt
    from selftpt.config import ContrastConfig
    from selftpt.prompt import initial_head
    from tests.helpers.models import model, random_prompt, small

    head = initial_head(model().dimension, 6, 5, torch.Generator().manual_seed(3))
    origin = {"stage": "learn", "settings": {"length": 4, "lr": 0.002}, "classes": NAMES, "images": 9}
    path = folder / "prompt.safetensors"
    Prompt(random_prompt(small("vit"), 4), head, ContrastConfig(), model().id, origin).save(path)
    return path


def use_prompt(path: Path) -> Any:
    from selftpt import AdaptConfig, Prompt, adapt
    from tests.helpers.models import model

    prompt = Prompt.load(path)
    return [prompt.digest, prompt.origin, bits(adapt(model(), prompt, NAMES, AdaptConfig(steps=1)).weights)]


def inspect(path: Path) -> str:
    import contextlib
    import io

    from selftpt.cli.inspect import command

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        command(path, as_json=False)
        command(path, as_json=True)
    lines = output.getvalue().encode(errors="surrogateescape").decode(errors="replace").splitlines()
    assert all(line.isprintable() for line in lines), lines
    return "\n".join(lines)


def make_classifier(folder: Path) -> Path:
    from selftpt.adaptation import zero_shot
    from tests.helpers.models import model

    path = folder / "classifier.safetensors"
    zero_shot(model(), NAMES).save(path)
    return path


def use_classifier(path: Path) -> Any:
    import torch

    from selftpt import Classifier
    from tests.helpers.models import model

    classifier = Classifier.load(path, model())
    features = torch.eye(model().dimension)[:3]
    return [classifier.names, classifier.scale, dict(classifier.origin), bits(classifier.probabilities(features))]


def make_checkpoint(folder: Path) -> Path:
    """Write the checkpoint and log of a run that was interrupted after the first of two epochs."""
    from selftpt.training import RunFiles

    class Stopped(Exception):  # noqa: N818
        pass

    keep = RunFiles.keep

    def stop(self: RunFiles, *rest: Any) -> None:
        keep(self, *rest)
        raise Stopped

    try:
        RunFiles.keep = stop  # type: ignore[method-assign]
        use_checkpoint(folder / "prompt.checkpoint")
    except Stopped:
        pass
    finally:
        RunFiles.keep = keep  # type: ignore[method-assign]
    return folder / "prompt.checkpoint"


def use_checkpoint(path: Path) -> Any:
    import torch

    from selftpt import LearnConfig
    from selftpt.learning import learn_from_features
    from selftpt.models.tokenizer import class_tokens
    from tests.helpers.models import model

    config, out = LearnConfig(epochs=2, length=2, hidden=6, projection=5), path.with_suffix("")
    tokens = class_tokens(model().text.tokenizer, NAMES, config.length, config.contrast)
    drawn = torch.randn(6, 2, model().dimension, generator=torch.Generator().manual_seed(0))
    features, labels = torch.nn.functional.normalize(drawn, dim=-1), torch.arange(6) % len(NAMES)
    prompt = learn_from_features(model(), tokens, features, labels, config, out)
    return [prompt.digest, out.with_name("prompt.log.jsonl").read_text()]


def make_features(folder: Path) -> Path:
    from tests.helpers import image_files

    image_files.noises(folder / "images", 3)
    use_features(folder / "cache" / "features" / "any" / "shard")
    (shard,) = (folder / "cache").rglob("*.safetensors")
    return shard


def use_features(path: Path) -> Any:
    from selftpt.data.cache import Cache
    from selftpt.data.features import FeatureProvider
    from selftpt.data.views import ViewSpec
    from tests.helpers.models import model

    images = sorted((path.parents[3] / "images").iterdir())
    provider = FeatureProvider(model(), [ViewSpec()], Cache(folder=path.parents[2]), fixed_batch=True)
    return bits(provider(images))


def fit_on_features(method: str, folder: Path | None) -> Any:
    """Fit a method on features in memory."""
    import torch

    from selftpt.data.sources import Source
    from selftpt.methods import METHODS, FitContext
    from selftpt.methods.selection import configure
    from tests.helpers.models import model

    drawn = torch.randn(6, 2, model().dimension, generator=torch.Generator().manual_seed(0))
    source = Source.from_features(torch.nn.functional.normalize(drawn, dim=-1), [0, 1, 2] * 2, NAMES)
    small = {"learn.epochs": 2, "learn.batch": 3, "learn.length": 2}
    if method == "ship":
        small |= {"learn.encoder": 4, "learn.generator": 4, "coop.epochs": 1, "coop.length": 2}
    return METHODS[method].fit(FitContext(model(), source, folder), configure(METHODS[method], small))


def make_learned(folder: Path) -> Path:
    fit_on_features("kgcoop", folder)
    (file,) = folder.glob("*.safetensors")
    return file


def use_learned(path: Path) -> Any:
    return {name: bits(tensor) for name, tensor in fit_on_features("kgcoop", path.parent).tensors.items()}


def make_fitted(method: str, folder: Path) -> Path:
    path = folder / "fitted.safetensors"
    fit_on_features(method, None).save(path)
    return path


def use_fitted(path: Path) -> Any:
    import torch

    from selftpt.methods import FittedMethod
    from tests.helpers.models import model

    fitted = FittedMethod.load(path, model())
    predictor = fitted.for_classes(["cat", "boat"])
    return [repr(fitted.config), dict(fitted.data), bits(predictor(torch.eye(model().dimension)[:3, None]))]


def make_records(folder: Path) -> Path:
    from selftpt.evaluation.runs import Runs

    model = {"name": "selftpt-tiny", "pretrained": None, "digest": "fedcba9876543210"}
    runs = Runs(folder)
    for seed in (1, 2, 3):
        runs.add(
            {
                "key": f"run {seed}",
                "protocol": "cross-dataset",
                "method": "self-tpt",
                "dataset": "dtd",
                "seed": seed,
                "model": model,
                "data": {"published": True, "limit": None, "unreadable": 0},
                "source": None,
                "settings": {"adapt": {"lr": 0.1, "steps": 10}, "learn": {"seed": seed}},
                "random_init": False,
                "results": {"test": {"top1": 40.0 + seed, "top5": 70.0, "ece": 5.5, "images": 1692, "classes": 47}},
            }
        )
    return runs.file


def use_records(path: Path) -> Any:
    from selftpt.evaluation.runs import Runs

    return Runs(path.parent).records


def is_subset(found: Any, expected: Any) -> bool:
    """Accept missing and repeated records, because the loss or repetition of a complete line cannot be detected."""
    return all(record in expected for record in found)


KINDS = {
    "prompt": FileKind(make_prompt, use_prompt),
    "inspect": FileKind(make_prompt, inspect),
    "classifier": FileKind(make_classifier, use_classifier),
    "checkpoint": FileKind(make_checkpoint, use_checkpoint, recovers=True),
    "features": FileKind(make_features, use_features, recovers=True),
    "learned": FileKind(make_learned, use_learned, recovers=True),
    "cocoop": FileKind(functools.partial(make_fitted, "cocoop"), use_fitted),
    "ship": FileKind(functools.partial(make_fitted, "ship"), use_fitted),
    "self-tpt": FileKind(functools.partial(make_fitted, "self-tpt"), use_fitted),
    "records": FileKind(make_records, use_records, accepts=is_subset),
}


def bits(tensor: Any) -> str:
    return hashlib.sha256(str(tensor.shape).encode() + tensor.contiguous().numpy().tobytes()).hexdigest()


# Mutations of the content of a safetensors file; mutations of any file are in tests.fuzz

TEXTS = {  # placeholders that `dumps` replaces by unusual or invalid JSON
    "@huge": "9" * 6000,
    "@long": "9" * 400,
    "@infinite": "1e999",
    "@deep": "[" * 50_000 + "]" * 50_000,
    "@nested": '{"a": ' * 40 + "1" + "}" * 40,
    "@twice": '{"a": 1, "a": 2}',
    "@surrogate": '"\\ud800"',
    "@escape": '"\\u001b[2J\\u2028\\udcff"',
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 2**64, -(2**63), 0.0, 0.5, 1e-300, 1e300, float("nan")),
    *(float("inf"), "", "a", "a\nb", "\0", "x" * 5000, "F32", "F16", "F64", "BOOL", "prompt", "classifier", [], {}),
    *([[]], [None], [1], {"a": 1}, ["a", "b"], [1, 2, 3, 4], [0, 2**62], *TEXTS),
]


def dumps(value: Any, **options: Any) -> str:
    text = json.dumps(value, **options)
    for key, replacement in TEXTS.items():
        text = text.replace(f'"{key}"', replacement)
    return text


def edit(rng: random.Random, value: Any) -> None:
    """Change, remove, rename, swap or add an entry somewhere in a JSON value."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        places += [(inner, key) for key in keys]
        waiting += [inner[key] for key in keys if isinstance(inner[key], dict | list)]
    where, key = rng.choice(places)
    action = rng.choice(["change", "change", "change", "remove", "rename", "swap", "add", "count"])
    other = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
    if action == "remove":
        del where[key]
    elif action == "swap":
        where[key], where[other] = where[other], where[key]
    elif action == "add" or (action == "rename" and isinstance(where, list)):
        where.update({"unknown": 1}) if isinstance(where, dict) else where.append(rng.choice(VALUES))
    elif action == "rename":
        where[rng.choice([f"{key}x", "a", other])] = where.pop(key)
    elif action == "count" and isinstance(where[key], int | float):
        where[key] = rng.choice([-1, 0, 1, where[key] + 1, where[key] * 2, where[key] - 1])
    else:
        where[key] = rng.choice(VALUES)


@dataclass
class Parts:
    """The parts of a safetensors file, which mutations change."""

    layout: dict[str, Any]
    header: dict[str, Any]
    digest: str
    body: bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> Parts:
        (length,) = struct.unpack_from("<Q", data)
        layout = json.loads(data[8 : 8 + length])
        metadata = layout.pop("__metadata__")
        digest, text = metadata["selftpt"].split(" ", 1)
        return cls(layout, json.loads(text), digest, data[8 + length :])

    def update_digests(self) -> None:
        """Recompute the digests, and the data types and shapes in the header, from the layout and the data."""
        for name, entry in self.layout.items():
            try:
                start, stop = entry["data_offsets"]
                described = {"dtype": entry["dtype"], "shape": entry["shape"]}
                self.header["tensors"][name] = {**described, "sha256": sha256(self.body[start:stop])}
            except (TypeError, KeyError, ValueError):
                continue
        if isinstance(self.header.get("tensors"), dict):
            self.header["tensors"] = {name: self.header["tensors"].get(name) for name in self.layout}
        self.digest = sha256(dumps(self.header).encode())

    def to_bytes(self) -> bytes:
        content = {"__metadata__": {"selftpt": f"{self.digest} {dumps(self.header)}".lstrip()}, **self.layout}
        head = dumps(content, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        return struct.pack("<Q", len(head)) + head + self.body


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def edit_header(rng: random.Random, parts: Parts) -> None:
    for _ in range(rng.choice([1, 1, 2])):
        edit(rng, parts.header)


def edit_layout(rng: random.Random, parts: Parts) -> None:
    edit(rng, parts.layout)


def edit_numbers(rng: random.Random, parts: Parts) -> None:
    """Replace some numbers of the tensors."""
    body = bytearray(parts.body)
    for _ in range(rng.choice([1, 3, 100])):
        at = rng.randrange(len(body) // 4) * 4
        body[at : at + 4] = struct.pack("<f", rng.choice([float("nan"), float("inf"), 3e38, -3e38, 0.0, 1e-40, 1.0]))
    parts.body = bytes(body)


def edit_shapes(rng: random.Random, parts: Parts) -> None:
    """Change the shape or data type of a tensor without changing its bytes."""
    name = rng.choice(list(parts.layout))
    entry = parts.layout[name]
    entry["shape"] = rng.choice([entry["shape"][::-1], [1, *entry["shape"]], [*entry["shape"], 1], entry["shape"][1:]])
    if rng.random() < 0.3:
        entry["dtype"] = rng.choice(["I32", "F16", "F64", "U8", "BOOL"])


def swap_tensors(rng: random.Random, parts: Parts) -> None:
    first, second = (rng.choice(list(parts.layout)) for _ in range(2))
    parts.layout[first], parts.layout[second] = parts.layout[second], parts.layout[first]


def resize_tensor(rng: random.Random, parts: Parts) -> None:
    """Remove or repeat rows of a tensor, and update its shape and all offsets."""
    name = rng.choice(list(parts.layout))
    entry = parts.layout[name]
    start, stop = entry["data_offsets"]
    if not entry["shape"] or not entry["shape"][0]:
        return
    row = (stop - start) // entry["shape"][0]
    rows = rng.choice([0, 1, entry["shape"][0] - 1, 2 * entry["shape"][0]])
    fresh = (parts.body[start:stop] * 2)[: rows * row]
    parts.body = parts.body[:start] + fresh + parts.body[stop:]
    entry["shape"] = [rows, *entry["shape"][1:]]
    moved = len(fresh) - (stop - start)
    for other in parts.layout.values():
        other["data_offsets"] = [at + moved if at >= stop else at for at in other["data_offsets"]]


def remove_digests(rng: random.Random, parts: Parts) -> None:
    """Partly turn the file into one of format 1, which has no digests."""
    if rng.random() < 0.5:
        parts.header["format"] = 1
    if rng.random() < 0.5:
        parts.digest = ""


def other_kind(rng: random.Random, parts: Parts) -> None:
    parts.header["kind"] = rng.choice(["prompt", "classifier", "checkpoint", "features", "a\nb", 3])


STRUCTURE_MUTATIONS = [
    *(edit_header, edit_header, edit_header, edit_layout, edit_layout, edit_numbers, edit_shapes, swap_tensors),
    *(resize_tensor, remove_digests, other_kind),
]
BYTE_MUTATIONS = [flip, flip, cut, repeat, remove, noise, join, same]


def edit_line(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    """Change a value in one line of a JSON Lines file."""
    lines = data.split(b"\n")
    at = rng.randrange(max(1, len(lines) - 1))
    try:
        record = json.loads(lines[at])
    except (ValueError, RecursionError):
        return data
    if isinstance(record, dict) and record:
        edit(rng, record)
        lines[at] = dumps(record).encode()
    return b"\n".join(lines)


# Interface of tests.fuzz


def valid_files(folder: Path) -> dict[str, Path]:
    """Return the valid file of each kind; create those that an earlier worker did not create."""
    made = {}
    for name, kind in KINDS.items():
        kind_folder, path_file = folder / name, folder / f"{name}.path"
        if not path_file.exists():
            shutil.rmtree(kind_folder, ignore_errors=True)
            kind_folder.mkdir()
            path_file.write_text(str(kind.make(kind_folder)))
        made[name] = Path(path_file.read_text())
    return made


def cases(folder: Path) -> Callable[[random.Random], Case]:
    """Return a function that makes mutated files; `expected` is `unchanged`, `damaged` or `redigested`."""
    valid = {name: path.read_bytes() for name, path in valid_files(folder).items()}

    def make(rng: random.Random) -> Case:
        kind = rng.choice(list(KINDS))
        data, mutations, redigested = valid[kind], list[str](), False
        others = list(valid.values())
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if not data:
                break
            if rng.random() < 0.5:
                mutate = rng.choice(BYTE_MUTATIONS)
                data = mutate(rng, data, others)
                mutations.append(mutate.__name__)
            elif kind == "records":
                data = edit_line(rng, data, others)
                mutations.append("edit_line")
            else:
                change, redigest = rng.choice(STRUCTURE_MUTATIONS), rng.random() < 0.6
                try:
                    parts = Parts.from_bytes(data)
                    change(rng, parts)
                    if redigest:
                        parts.update_digests()
                    data, redigested = parts.to_bytes(), redigested or redigest
                except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError):
                    continue  # an earlier mutation left nothing to edit
                mutations.append(f"{change.__name__}{', redigested' if redigest else ''}")
        expected = "redigested" if redigested else "unchanged" if data == valid[kind] else "damaged"
        return Case(f"{kind}: {', '.join(mutations)}", kind, data, expected)

    return make


def work(folder: Path) -> Callable[[Path], Answer]:
    """Return a function that replaces the valid file of a kind by the given file and uses it."""
    from selftpt.errors import SelfTPTError, SelfTPTWarning

    made = valid_files(folder)
    snapshots = {
        name: {path: path.read_bytes() for path in (folder / name).rglob("*") if path.is_file()} for name in KINDS
    }

    def restore(name: str) -> None:
        for path in (folder / name).rglob("*"):
            if path.is_file() and path not in snapshots[name]:
                path.unlink()
        for path, data in snapshots[name].items():
            if not path.is_file() or path.read_bytes() != data:
                path.write_bytes(data)

    expected = {}
    for name, kind in KINDS.items():
        expected[name] = json.dumps(kind.use(made[name]))
        restore(name)

    def use(path: Path) -> Answer:
        name = path.suffix[1:]
        kind, answer, messages = KINDS[name], Answer(), list[str]()
        restore(name)
        made[name].write_bytes(path.read_bytes())
        with measured(answer), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = json.dumps(kind.use(made[name]))
                messages = [str(one.message) for one in caught if issubclass(one.category, SelfTPTWarning)]
                if found == expected[name] or kind.accepts(json.loads(found), json.loads(expected[name])):
                    answer |= {"outcome": "recovered" if messages else "unchanged"}
                else:
                    answer |= {"outcome": "changed", "text": f"{found[:200]}, warnings: {messages}"}
            except SelfTPTError as error:
                answer |= {"outcome": "refused", "text": str(error)}
            except BaseException:
                answer |= {"outcome": "failed", "text": traceback.format_exc()[-600:]}
        return {**answer, "messages": messages}

    return use


def judge(case: Case, path: Path, answer: Answer, stderr: str) -> str | None:
    """Return what is wrong with an answer, or None."""
    outcome, kind = answer["outcome"], KINDS[case.file]
    if outcome == "failed" or stderr:
        return f"{answer.get('text')} {stderr[-300:]}"
    if answer["mb"] > LIMIT_MB:
        return f"{answer['mb']:.0f} MB"
    for line in [answer.get("text", ""), *answer["messages"]]:
        shown = line.encode(errors="surrogateescape").decode(errors="replace")
        if outcome != "changed" and not shown.isprintable():
            return f"not one line: {line!r}"
    if case.expected == "unchanged":
        return None if outcome == "unchanged" else f"an unchanged file was not accepted: {answer}"
    if case.expected == "damaged" and outcome == "changed":
        return f"another result: {answer['text']}"
    if case.expected == "damaged" and outcome == "refused" and kind.recovers:
        return f"not recovered: {answer['text']}"
    return None
