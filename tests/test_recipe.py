"""The recipe of the embedded model, on made-up words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from open_clip.model import CLIP

from tools.embedded_model import student, teacher
from tools.embedded_model.export import small
from tools.embedded_model.student import Lesson, Training, train, walk
from tools.embedded_model.teacher import Kernel, Nouns, Space
from tools.embedded_model.wordnet import WordNet

DATA = """  1 a line of licence
00000001 03 n 01 thing 0 000 | what there is
00000002 05 n 02 cat 0 true_cat 0 001 @ 00000001 n 0000 | a feline; "the cat purred"
00000003 18 n 01 Cat 0 001 @i 00000001 n 0000 | a singer
00000004 05 n 02 Felis_catus 0 Persian_cat 0 001 @ 00000002 n 0000 | a breed
00000005 09 n 01 idea 0 001 @ 00000001 n 0000 | a thought
00000006 05 n 01 genus_Felis 0 001 @ 00000001 n 0000 | cats
"""
INDEX = """  1 a line of licence
cat n 2 1 @ 2 1 00000003 00000002
true_cat n 1 1 @ 1 0 00000002
thing n 1 1 @ 1 0 00000001
felis_catus n 1 1 @ 1 0 00000004
persian_cat n 1 1 @ 1 0 00000004
idea n 1 1 @ 1 0 00000005
genus_felis n 1 1 @ 1 0 00000006
"""


def test_wordnet(tmp_path: Path) -> None:
    (tmp_path / "data.noun").write_text(DATA)
    (tmp_path / "index.noun").write_text(INDEX)
    wordnet = WordNet(tmp_path)
    assert wordnet.meanings["00000002"].gloss == "a feline"
    assert wordnet.ancestors("00000004") == {"00000004", "00000002", "00000001"}
    assert wordnet.nouns() == {
        "cat": ["00000002"],
        "true cat": ["00000002"],
        "thing": ["00000001"],
        "Persian cat": ["00000004"],
    }


def test_the_space_keeps_what_tells_classes_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(6, 40, generator=generator)
    features = 3 * head.repeat(5, 1) + torch.randn(30, 40, generator=generator) + 7
    space = Space.of(head, features, torch.arange(6), 5)
    seen = space.see(features)
    torch.testing.assert_close(seen.norm(dim=-1), torch.ones(30))
    assert ((seen @ space.prototypes.t()).argmax(1) == torch.arange(6).repeat(5)).all()
    torch.testing.assert_close(
        (features @ space.projection.t() + space.bias).mean(0), torch.zeros(5), atol=1e-3, rtol=0
    )


@pytest.fixture
def clip() -> CLIP:
    torch.manual_seed(0)
    text = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    return CLIP(8, {"image_size": 32, "patch_size": 16, "width": 16, "layers": 1, "head_width": 8}, text).eval()


def test_the_walk_is_that_of_open_clip(clip: CLIP) -> None:
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    tokens = tokenizer(["a cat", "a photo of a big dog.", "tram"])
    rows = [row[: row.argmax() + 1].tolist() for row in tokens]
    with torch.no_grad():
        found = walk(clip, clip.token_embedding.weight, rows)
        torch.testing.assert_close(found, clip.encode_text(tokens, normalize=True))


def test_the_student_learns(clip: CLIP, tmp_path: Path) -> None:
    """Names are brought where they should be, and tokens of no name are left alone."""
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    names = ["cat", "dog", "tram", "red kite", "boat", "rocket"]
    targets = F.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), dim=-1)
    before = clip.token_embedding.weight.detach().clone()
    classes = Lesson(names[:3], targets[:3], torch.ones(3))
    words = Lesson(names[3:], targets[3:], torch.ones(3))
    config = Training(steps=60, classes=3, words=3, lr=0.02, table_lr=0.02, warmup=5, groups=2)
    train(clip, tokenizer, classes, words, config, tmp_path / "log.jsonl")
    with torch.no_grad():
        found = clip.encode_text(tokenizer([f"a photo of a {name}." for name in names]), normalize=True)
    assert (found * targets).sum(-1).min() > 0.9
    (banana,) = tokenizer.encode("banana")
    (cat,) = tokenizer.encode("cat")
    assert torch.equal(clip.token_embedding.weight[banana], before[banana])
    assert not torch.equal(clip.token_embedding.weight[cat], before[cat])


def test_draws_are_without_replacement() -> None:
    import random

    draws = student._rounds(10, 5, random.Random(0))
    assert sorted(next(draws) + next(draws)) == list(range(10))


def test_the_small_form_is_near_the_large_one() -> None:
    torch.manual_seed(0)
    state = {"token_embedding.weight": 0.02 * torch.randn(100, 16), "w": torch.randn(4, 4), "b": torch.randn(4)}
    found = small(state)
    for name, bound in {"token_embedding.weight": 0.04, "w": 1e-3, "b": 0.0}.items():
        error = (found[name].float() - state[name]).norm() / state[name].norm()
        assert error <= bound, name


KINDS_OF = """00000010 03 n 01 thing 0 000 | what there is
00000020 05 n 01 animal 0 001 @ 00000010 n 0000 | it lives
00000030 06 n 01 vehicle 0 001 @ 00000010 n 0000 | it moves people
00000021 05 n 02 cat 0 pussy 0 001 @ 00000020 n 0000 | it purrs
00000022 05 n 01 lion 0 001 @ 00000020 n 0000 | it roars
00000031 06 n 01 tram 0 001 @ 00000030 n 0000 | it runs on rails
"""


def test_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known classes are given back, their synonyms are found, and kinds of the same thing are alike."""
    (tmp_path / "data.noun").write_text(KINDS_OF)
    words = {"thing": 10, "animal": 20, "vehicle": 30, "cat": 21, "pussy": 21, "lion": 22, "tram": 31}
    (tmp_path / "index.noun").write_text("".join(f"{w} n 1 1 @ 1 0 {n:08d}\n" for w, n in words.items()))
    monkeypatch.setattr(teacher, "NAMES", ["house cat", "tram car"])
    monkeypatch.setattr(teacher, "WNIDS", ["n00000021", "n00000031"])

    def sentences(texts: Sequence[str]) -> torch.Tensor:
        drawn = [torch.randn(64, generator=torch.Generator().manual_seed(len(text))) for text in texts]
        return F.normalize(torch.stack(drawn), dim=-1)

    nouns = Nouns(WordNet(tmp_path), sentences)  # type: ignore[arg-type]
    known, kernel = torch.arange(2), Kernel(name=0.1, gloss=0.1, place=0.8, ridge=1e-6)
    assert {(nouns.names[noun], label) for noun, label in nouns.synonyms(known)} == {
        ("house cat", 0),
        ("cat", 0),
        ("pussy", 0),
        ("tram car", 1),
        ("tram", 1),
    }
    prototypes = torch.eye(2)
    taught = nouns.teach(prototypes, known, kernel)
    torch.testing.assert_close(taught[:2], prototypes, atol=1e-4, rtol=0)
    lion, vehicle = taught[nouns.names.index("lion")], taught[nouns.names.index("vehicle")]
    assert lion[0] > lion[1]
    assert vehicle[1] > vehicle[0]
    torch.testing.assert_close(nouns.classes().teach(prototypes, known, kernel), taught[:2])
    by_name = nouns.teach_words(nouns.by_name[:2], prototypes, known, kernel)
    torch.testing.assert_close(by_name, prototypes, atol=1e-4, rtol=0)
