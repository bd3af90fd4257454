"""The recipe of the embedded model, on made-up words and numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from open_clip.model import CLIP
from PIL import Image
from torch import Tensor

from selftpt.errors import SelfTPTError, told_in_one_line
from tools.embedded_model import __main__ as recipe
from tools.embedded_model import above, land, student, teacher
from tools.embedded_model.export import rescaled, small
from tools.embedded_model.ingredients import HOME, NAMES, read_looks
from tools.embedded_model.student import Lesson, Training, train, walk
from tools.embedded_model.teacher import Nouns, Space
from tools.embedded_model.wordnet import WordNet

DATA = """  1 a line of licence
00000001 03 n 01 thing 0 000 | what there is
00000002 05 n 03 cat 0 true_cat 0 angora 0 001 @ 00000001 n 0000 | a feline; "the cat purred"
00000003 18 n 01 Cat 0 001 @i 00000001 n 0000 | a singer
00000004 05 n 03 Felis_catus 0 Persian_cat 0 angora 0 001 @ 00000002 n 0000 | a breed
00000005 09 n 01 idea 0 001 @ 00000001 n 0000 | a thought
00000006 05 n 01 genus_Felis 0 001 @ 00000001 n 0000 | cats
"""
INDEX = """  1 a line of licence
cat n 2 1 @ 2 1 00000003 00000002
true_cat n 1 1 @ 1 0 00000002
thing n 1 1 @ 1 0 00000001
felis_catus n 1 1 @ 1 0 00000004
persian_cat n 1 1 @ 1 0 00000004
angora n 2 1 @ 2 1 00000002 00000004
idea n 1 1 @ 1 0 00000005
genus_felis n 1 1 @ 1 0 00000006
"""
ADJECTIVES = """00000011 00 a 02 furry(a) 0 fluffy 0 001 & 00000012 a 0000 | covered with fur; "a furry cat"
00000012 00 a 01 ex 0 000 | former
"""
ADJECTIVE_INDEX = """furry a 1 1 & 1 0 00000011
fluffy a 1 1 & 1 0 00000011
ex a 1 1 & 1 0 00000012
well-known a 1 1 & 1 0 00000012
"""


@pytest.fixture
def wordnet(tmp_path: Path) -> WordNet:
    files = {"data.noun": DATA, "index.noun": INDEX, "data.adj": ADJECTIVES, "index.adj": ADJECTIVE_INDEX}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return WordNet(tmp_path)


def test_wordnet(wordnet: WordNet) -> None:
    assert wordnet.meanings["00000002"].gloss == "a feline"
    assert [wordnet.kind(offset) for offset in ("00000001", "00000004")] == ["thing", "cat"]
    assert wordnet.ancestors("00000004") == {"00000004", "00000002", "00000001"}
    assert wordnet.nouns() == {
        "cat": ["00000002"],
        "true cat": ["00000002"],
        "thing": ["00000001"],
        "Persian cat": ["00000004"],
        "angora": ["00000002", "00000004"],
    }


def test_a_script_tells_a_mistake_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"), told_in_one_line():
        WordNet(tmp_path / "nowhere")
    said = capsys.readouterr().err
    assert said.startswith("error: there is no ")
    assert "wordnet-base" in said
    assert said.count("\n") == 1


def test_adjectives(wordnet: WordNet) -> None:
    text = "furry, fluffy: covered with fur"
    assert wordnet.adjectives() == {"furry": text, "fluffy": text}


@pytest.fixture
def nouns(wordnet: WordNet, monkeypatch: pytest.MonkeyPatch) -> Nouns:
    """Two classes, a breed of cat and a singer who is no noun; texts have vectors by their letters."""
    monkeypatch.setattr(teacher, "WNIDS", ["n00000004", "n00000003"])
    monkeypatch.setattr(teacher, "NAMES", ["Persian", "the singer"])

    looks = {"thing": [1, 0], "persian cat": [1], "persian": [1], "furry": [0]}
    return Nouns(wordnet, by_letters, looks)  # type: ignore[arg-type]


def by_letters(texts: Sequence[str]) -> Tensor:
    letters = [[text.lower().count(chr(97 + i)) + 0.1 for i in range(26)] for text in texts]
    return F.normalize(torch.tensor(letters), dim=-1)


PROTOTYPES = F.normalize(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
BOTH = torch.arange(2)


def test_a_meaning_is_told_the_mean_of_its_known_kinds(nouns: Nouns) -> None:
    cat, thing, persian = (int(nouns.first[nouns.names.index(name)]) for name in ("cat", "thing", "Persian cat"))
    told = nouns.kinds(PROTOTYPES, BOTH)
    torch.testing.assert_close(told[[cat, persian]], PROTOTYPES[[0, 0]])
    torch.testing.assert_close(told[thing], PROTOTYPES.mean(0))
    only = nouns.kinds(PROTOTYPES, torch.tensor([1]))
    assert not only[cat].any()
    torch.testing.assert_close(only[thing], PROTOTYPES[1])
    groups = {nouns.names[noun]: kinds for noun, kinds in nouns.groups(BOTH).items()}
    assert groups == {"thing": [0, 1]}


def test_things_lie_where_the_classes_are_that_they_look_like(nouns: Nouns) -> None:
    found = teacher.by_looks(["Thing", "Persian", "no such thing"], nouns.looks, PROTOTYPES, BOTH)
    expected = (PROTOTYPES[1] + 0.5 * PROTOTYPES[0]) / 1.5
    torch.testing.assert_close(found, torch.stack([expected, torch.zeros(5), torch.zeros(5)]))
    other = teacher.by_looks(["thing", "Persian"], nouns.looks, PROTOTYPES, torch.tensor([1]))
    torch.testing.assert_close(other, PROTOTYPES[[1, 1]])  # a class that is not known may look like one that is


def test_the_teacher_knows_what_it_was_told(nouns: Nouns) -> None:
    prototypes, exact = torch.eye(2), teacher.Kernel(ridge=0.0, doubt=math.inf)
    found, _ = nouns.teach(prototypes, BOTH, exact, kinds=0, looks=0)
    torch.testing.assert_close(found[:2], prototypes)
    names, glosses = nouns.by_name[:2], nouns.by_gloss[nouns.first[:2]]
    words = teacher.Kernel(name=0.3, gloss=0.7, place=0.0, ridge=0.0)
    for given in (None, glosses):
        torch.testing.assert_close(nouns.teach_words(names, given, prototypes, BOTH, words), prototypes)
    mostly = teacher.Kernel(name=0.01, gloss=0.99, place=0.0, ridge=0.0)
    swapped = nouns.teach_words(names, glosses.flip(0), prototypes, BOTH, mostly)
    torch.testing.assert_close(swapped, prototypes.flip(0), atol=0.1, rtol=0)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_what_is_known_is_one_long(nouns: Nouns, ridge: float) -> None:
    kernel = teacher.Kernel(ridge=ridge)
    found = nouns.teach(PROTOTYPES, BOTH, kernel, kinds=0, looks=0)[0][:2]
    words = nouns.teach_words(nouns.by_name[:2], nouns.by_gloss[nouns.first[:2]], PROTOTYPES, BOTH, kernel)
    for of in (found, words):
        assert of.norm(dim=-1).median().item() == pytest.approx(1)


def test_a_noun_is_the_mean_of_its_senses_and_of_its_looks(nouns: Nouns) -> None:
    angora, cat = (nouns.names.index(name) for name in ("angora", "cat"))
    of_angora = nouns.noun == angora
    assert nouns.weight[of_angora].tolist() == pytest.approx([2 / 3, 1 / 3])
    found, senses = nouns.teach(PROTOTYPES, BOTH, teacher.Kernel())
    torch.testing.assert_close(found[angora], nouns.weight[of_angora] @ senses[of_angora])
    nouns.looks = {"angora": [1], "cat": [1]}
    kernel = teacher.Kernel(doubt=math.inf)  # so that nothing else is inferred from them
    before, after = (nouns.teach(PROTOTYPES, BOTH, kernel, looks=weight) for weight in (0, 0.5))
    torch.testing.assert_close((after[0] - before[0])[[angora, cat]], 0.5 * PROTOTYPES[[1, 1]])
    more = after[1] - before[1]  # of two senses one does not know which looks so
    torch.testing.assert_close(more[of_angora], torch.zeros(2, 5))
    torch.testing.assert_close(more[nouns.noun == cat], 0.5 * PROTOTYPES[[1]])
    without, given = (nouns.teach(PROTOTYPES, BOTH, kernel, kinds=weight)[0][cat] for weight in (0, 2))
    torch.testing.assert_close(given - without, 2 * PROTOTYPES[0])


def test_nothing_is_known_of_classes_that_are_not(nouns: Nouns) -> None:
    prototypes = PROTOTYPES.clone()
    prototypes[0] = math.nan
    for of in nouns.teach(prototypes, torch.tensor([1]), teacher.Kernel()):
        assert of.isfinite().all()
    glosses = nouns.by_gloss[nouns.first]
    assert nouns.teach_words(nouns.by_name, glosses, prototypes, torch.tensor([1]), teacher.Kernel()).isfinite().all()


def test_lessons(nouns: Nouns, wordnet: WordNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and where they should land, with the singer not known."""
    monkeypatch.setattr(recipe, "NAMES", teacher.NAMES)
    monkeypatch.setattr(recipe, "LAND", {"water": (None, ["sea", "persian"]), "wood": (None, ["thing"])})
    from_above = F.normalize(torch.randn(2, 5, generator=torch.Generator().manual_seed(1)), dim=-1)
    known, kernel = torch.tensor([0]), teacher.Kernel()
    sentences = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: ["cat", "blue", "##s"]))

    class Letters(SimpleNamespace):
        def __call__(self, texts: Sequence[str]) -> Tensor:
            return by_letters(texts)

    taught = nouns.teach(PROTOTYPES, known, kernel)
    space = Space(torch.zeros(5, 8), torch.zeros(5), PROTOTYPES)
    tokenizer = open_clip.SimpleTokenizer()
    letters: Any = Letters(**vars(sentences))
    found = recipe.lessons(nouns, taught, from_above, wordnet.adjectives(), letters, tokenizer, space, known)
    classes, often, seldom, typed, defined, words, viewed = found
    assert (classes.texts, classes.plurals) == (["Persian"], ["Persians"])
    torch.testing.assert_close(classes.targets, PROTOTYPES[:1])
    assert often.texts == ["cat", "true cat", "thing", "Persian cat", "blue", "fluffy", "furry"]
    assert often.plurals == ["cats", "true cats", "things", "Persian cats", "blue", "fluffy", "furry"]
    assert (seldom.texts, seldom.plurals) == (["angora"], ["angoras"])
    texts = {
        "cat, a type of thing",
        "true cat, a type of thing",
        "thing, a type of thing",
        "Persian cat, a type of cat",
    }
    assert {*typed.texts} == {*typed.plurals} == texts | {"angora, a type of thing", "angora, a type of cat"}
    assert {*defined.texts} == {"a feline", "a singer", "a breed", "what there is"}
    assert not defined.plurals
    assert [lesson.company for lesson in found if lesson.plurals] == [True, True, True, False, True]
    assert (words.texts, words.plurals) == (["sea", "thing"], ["seas", "things"])  # a class stays what it is
    sea = nouns.teach_words(by_letters(["sea"]), None, PROTOTYPES, known, kernel)
    thing = taught[0][[nouns.names.index("thing")]]
    torch.testing.assert_close(words.targets, (F.normalize(torch.cat([sea, thing]), dim=-1) + from_above) / 2)
    torch.testing.assert_close(often.targets[2], words.targets[1])
    assert not viewed.plurals
    for word, kind in {"sea": 0, "persian": 0, "thing": 1}.items():
        for text in (f"{word} from above", f"a satellite photo of {word}.", f"an aerial view of the {word}."):
            torch.testing.assert_close(viewed.targets[[*viewed.texts].index(text)], from_above[kind] / 2**0.5)
    for lesson in found:
        assert (lesson.targets.norm(dim=-1) <= 1 + 1e-6).all()
        assert len(lesson.texts) == len(lesson.targets)

    def where(noun: str, meaning: str) -> Tensor:
        senses = [*zip(nouns.noun.tolist(), nouns.meaning.tolist(), strict=True)]
        i = senses.index((nouns.names.index(noun), int(nouns.first[nouns.names.index(meaning)])))
        return F.normalize(taught[1][i], dim=0)

    for text, expected in {
        "angora, a type of cat": where("angora", "Persian cat"),
        "a feline": where("cat", "cat"),
    }.items():
        (lesson,) = [lesson for lesson in found if text in lesson.texts]
        torch.testing.assert_close(F.normalize(lesson.targets[[*lesson.texts].index(text)], dim=0), expected)


def test_others_are_inferred_from_what_nouns_look_like(nouns: Nouns) -> None:
    """True cats come nearer to what a cat is said to look like, the more so the less that is doubted."""
    nouns.looks, other = {"cat": [1]}, nouns.names.index("true cat")
    near = []
    for doubt in (math.inf, 1.0, 0.1):
        found, _ = nouns.teach(PROTOTYPES, BOTH, teacher.Kernel(doubt=doubt), kinds=0)
        near.append(F.cosine_similarity(found[other], PROTOTYPES[1], dim=0).item())
    assert near == sorted(near)
    assert near[2] > near[0] + 0.1


def test_some_nouns_are_taught_as_all_are(nouns: Nouns) -> None:
    rows = torch.tensor([0, 1, nouns.names.index("thing"), nouns.names.index("angora")])
    some = nouns.only(rows)
    assert some.names == ["Persian", "the singer", "thing", "angora"]
    nothing = teacher.Kernel(doubt=math.inf)  # what others look like is not known to some
    expected, senses = nouns.teach(PROTOTYPES, BOTH, nothing)
    found, their = some.teach(PROTOTYPES, BOTH, nothing)
    torch.testing.assert_close(found, expected[rows])
    torch.testing.assert_close(their, senses[torch.isin(nouns.noun, rows)])
    assert [some.kind[i] for i in some.first] == ["cat", "thing", "thing", "thing"]
    assert some.definitions == [nouns.definitions[i] for i in rows]


def test_the_table_of_looks() -> None:
    looks, table = read_looks(), (HOME / "tools" / "embedded_model" / "looks.tsv").read_text("utf8")
    words = [line.split("\t")[0].lower() for line in table.splitlines()]
    assert words == sorted({*words})
    assert NAMES[looks["banjo"][0]] == "acoustic guitar"
    for label, name in enumerate(NAMES):
        assert label not in looks[name.lower()]
    assert all(len(classes) == len({*classes}) for classes in looks.values())


def test_the_space_keeps_what_tells_classes_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(6, 40, generator=generator)
    features = 3 * head.repeat(5, 1) + torch.randn(30, 40, generator=generator) + 7
    space = Space.of(head, features, torch.arange(6), 5)
    seen = space.see(features)
    torch.testing.assert_close(seen.norm(dim=-1), torch.ones(30))
    assert ((seen @ space.prototypes.t()).argmax(1) == torch.arange(6).repeat(5)).all()
    projected = features @ space.projection.t() + space.bias
    torch.testing.assert_close(projected.mean(0), torch.zeros(5), atol=1e-3, rtol=0)
    scores = (features - features.mean(0)) @ (head - head.mean(0)).t()  # five dimensions are all that six classes have
    kept = projected @ space.prototypes.t()  # of classes as directions: each has a factor of its own
    torch.testing.assert_close(F.normalize(kept, dim=0), F.normalize(scores, dim=0), atol=1e-3, rtol=0)


def test_land_is_drawn() -> None:
    """The same scene for the same number, another for another; half of them coarse; nothing is left blank."""
    for kind in above.LAND:
        images = [above.draw(kind, number) for number in (0, 1, 0)]
        assert [image.size for image in images[:2]] == [(224, 224), (64, 64)]
        assert images[0].tobytes() == images[2].tobytes() != above.draw(kind, 2).tobytes()
        assert min(low for low, _ in images[0].getextrema()) < max(high for _, high in images[0].getextrema())


def test_land_has_the_colours_it_should() -> None:
    kinds = ("forest", "open water", "snow", "sand", "pasture", "lake", "river")
    shown = {kind: torch.stack([pixels(above.draw(kind, n)) for n in range(1, 16, 2)]) for kind in kinds}
    colour = {kind: of.mean((0, 1)) for kind, of in shown.items()}
    assert colour["snow"].min() > colour["sand"].min() > colour["pasture"].min() > colour["forest"].min()
    assert [int(colour[kind].argmax()) for kind in ("sand", "forest", "open water")] == [0, 1, 2]

    def blue(kind: str) -> Tensor:
        """The share of each scene that is more blue than red and green: water, of the deeper kind."""
        return (shown[kind].argmax(-1) == 2).float().mean(1)

    assert blue("pasture").max() < 0.01
    assert 0.05 < blue("river").mean() < blue("lake").mean() < blue("open water").mean()


def pixels(image: Image.Image) -> Tensor:
    """Colours [n, 3]."""
    return torch.from_numpy(np.array(image)).float().flatten(0, 1)


def test_lumps_are_centred_noise_of_their_size() -> None:
    def steps(size: float) -> float:
        """How much the noise changes from a pixel to the next."""
        lumps = above.Land(np.random.default_rng(0), 1000).lumps(size, 1)
        assert lumps.mean() == pytest.approx(0, abs=1e-9)
        assert lumps.std() == pytest.approx(1)
        return float(abs(np.diff(lumps)).mean())

    assert 1.5 < steps(100) / steps(200) < 2.5


def test_textures_of_land_are_sorted_by_their_names(tmp_path: Path) -> None:
    for name in ("Town1.png", "drycrop1.png", "drycrop1.mask.png", "airport-grass.png", "void.png"):
        Image.new("RGB", (40, 30), "green").save(tmp_path / name)
    found = land.textures(tmp_path, each=2)
    assert [(path.name, number, [*land.SHOWN][kind]) for (path, number), kind in found] == [
        ("Town1.png", 0, "residential"),
        ("Town1.png", 1, "residential"),
        ("airport-grass.png", 0, "airport"),
        ("airport-grass.png", 1, "airport"),
        ("drycrop1.png", 0, "annual crops"),
        ("drycrop1.png", 1, "annual crops"),
    ]
    assert [land.crop(texture).size for texture, _ in found[:2]] == [(224, 224), (64, 64)]
    assert {*land.SHOWN} <= {*above.LAND}
    with pytest.raises(SelfTPTError, match="has no textures of land: name Textures/Terrain"):
        land.textures(tmp_path / "nowhere")


def test_words_for_land_are_of_one_kind() -> None:
    words = [word for _, words in above.LAND.values() for word in words]
    assert len(words) == len({*words})
    assert all(word == word.strip().lower() for word in words)


def test_drawings_tell_kinds_apart_by_what_differs_least_within_them() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(3).repeat(200)
    centres = torch.tensor([[1.0, 0, 2, 0], [-0.5, 0.9, 0, 0], [-0.5, -0.9, -2, 0]])
    common = torch.tensor([0.3, -0.2, 0.1, 5])
    images = centres[kinds] + common + torch.randn(600, 4, generator=generator) * torch.tensor([0.1, 0.1, 2, 0.1])
    found = teacher.by_drawings(images, kinds, ridge=0.01)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(3))
    assert (found[:, 2].abs() < 0.1).all()
    assert (found @ F.normalize(common, dim=0)).abs().max() < 0.05
    assert teacher.right(images, found, kinds) > 0.95
    assert teacher.right(images, F.normalize(centres, dim=-1), kinds) < 0.8


def test_the_space_is_blind_to_a_change_that_tells_nothing_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    head, change = torch.randn(6, 40, generator=generator), torch.randn(40, generator=generator)
    features = 3 * head.repeat(5, 1) + torch.randn(30, 40, generator=generator)
    space = Space.of(head, features, torch.arange(6), 5)
    blind = space.blind_to(change)

    def scores(of: Space, seen: Tensor) -> Tensor:
        return (seen @ of.projection.t() + of.bias) @ of.prototypes.t()

    assert (scores(space, features + 9 * change) - scores(space, features)).abs().max() > 1
    torch.testing.assert_close(scores(blind, features + 9 * change), scores(blind, features), atol=1e-3, rtol=0)
    torch.testing.assert_close(blind.prototypes.norm(dim=-1), torch.ones(6))
    told = [(blind.see(seen) @ blind.prototypes.t()).argmax(1) for seen in (features, features + 9 * change)]
    assert all((labels == torch.arange(6).repeat(5)).all() for labels in told)


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
        expected = clip.encode_text(tokens, normalize=True)
        torch.testing.assert_close(found, expected)
        in_half = walk(clip, clip.token_embedding.weight, rows, half=True)
    assert 1e-6 < (in_half - expected).abs().max() < 0.01


def test_the_student_learns(clip: CLIP, tmp_path: Path) -> None:
    """Names are brought where they should be, and tokens of no name are left alone."""
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    names = ["cat", "dog", "tram", "red kite", "boat", "rocket"]
    targets = F.normalize(torch.randn(6, 7, generator=torch.Generator().manual_seed(1)), dim=-1)
    before = clip.token_embedding.weight.detach().clone()
    lessons = [
        Lesson(names[:3], targets[:3], 3, ["cats", "dogs", "trams"]),
        Lesson(names[3:], targets[3:], 2, names[3:]),
        Lesson(["a small furry animal that purrs and would not fit into a template of twelve"], targets[:1], 1),
    ]
    config = Training(steps=320, lr=0.02, table_lr=0.02, warmup=5, groups=2, beside=0.3, plural=0.2)
    train(clip, tokenizer, lessons, config, tmp_path / "log.jsonl")
    with torch.no_grad():
        found = clip.encode_text(tokenizer([f"a photo of a {name}." for name in names]), normalize=True)
        many = clip.encode_text(tokenizer(["cats", "dogs", "trams"]), normalize=True)
        pair = clip.encode_text(tokenizer(["tram or dog", "dog or tram"]), normalize=True)
    assert (found * student.in_cone(targets)).sum(-1).min() > 0.95
    assert (many * student.in_cone(targets[:3])).sum(-1).min() > 0.95
    assert (pair @ found.t()).topk(2).indices.sort().values.tolist() == [[1, 2], [1, 2]]
    assert (F.normalize(found[:, :-1], dim=-1) * targets).sum(-1).min() > 0.8
    (banana,) = tokenizer.encode("banana")
    (cat,) = tokenizer.encode("cat")
    assert torch.equal(clip.token_embedding.weight[banana], before[banana])
    assert not torch.equal(clip.token_embedding.weight[cat], before[cat])


def test_names_beside_others() -> None:
    """They are written as people write them, and land between the names, nearer to those that count more."""
    tokenizer = open_clip.SimpleTokenizer()
    nouns = Lesson(["barn", "cat", "tram"], torch.eye(3), 1, ["barns", "cats", "trams"])
    alone = Lesson(["crane, a type of bird"], torch.eye(3)[:1], 1, ["crane, a type of bird"], company=False)
    writer = student.Writer(tokenizer, [nouns, alone], Training(steps=1, beside=0.6, plural=0.5, usual=1.0), 20)
    written = [writer.write(nouns, i % 3) for i in range(3000)]
    found = {tokenizer.decode(tokens[5:-2]).strip(): target.tolist() for tokens, target in written}
    assert {"barn", "barns", "barn cats", "cats in a barn", "cats or trams", "cat , tram"} <= {*found}
    for before, after in itertools.chain.from_iterable(itertools.pairwise(text.split()) for text in found):
        assert before != "a" or after in nouns.texts
        assert before not in nouns.plurals or after not in (*nouns.texts, *nouns.plurals)
    assert found["barn cat"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert found["cat in a barn"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert student._shares([("", 1.0), ("and", 1.0)]) == pytest.approx([1 / 6, 1 / 3, 1 / 2])  # barn cat and tram
    assert student._shares([("in a", 0.5), ("", 1.0)]) == pytest.approx([2 / 3, 1 / 9, 2 / 9])  # cat in a barn tram
    assert student._shares([("", 1.0), ("", 1.0)]) == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    listed = [text for text in found if text.count(" and ") + text.count(" or ") == 2 and len(text.split()) == 5]
    assert listed
    for text in listed:
        counts = [text.count(name) for name in nouns.texts]
        assert found[text] == pytest.approx([count / 3 for count in counts])
    assert {tokenizer.decode(writer.write(alone, 0)[0][5:-2]).strip() for _ in range(50)} == {"crane , a type of bird"}
    assert max(len(tokens) for tokens, _ in written) == 20
    assert {token for tokens, _ in written for token in tokens} <= {*writer.used}


def test_plurals() -> None:
    words = {"cat": "cats", "fox": "foxes", "bus": "bus", "church": "churches", "berry": "berries", "ray": "rays"}
    assert {word: student.plural(word) for word in words} == words


def test_draws_are_without_replacement() -> None:
    import random

    draws = student._rounds(10, 5, random.Random(0))
    assert sorted(next(draws) + next(draws)) == list(range(10))


def test_the_small_form_is_near_the_large_one() -> None:
    state = {"token_embedding.weight": 0.05 * torch.randn(100, 16), "w": torch.randn(4, 4), "b": torch.randn(4)}
    found = small(state)
    for name, bound in {"token_embedding.weight": 0.04, "w": 1e-3, "b": 0.0}.items():
        error = (found[name].float() - state[name]).norm() / state[name].norm()
        assert error <= bound, name


def test_a_rescaled_tower_says_the_same_and_minds_its_prompt_more(clip: CLIP) -> None:
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    tokens, moved = tokenizer(["a photo of a cat.", "a tram"]), []
    with torch.no_grad():
        for parameter in clip.transformer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # so that biases matter
    for factor in (100.0, 0.5):  # the first so that the normalisation's epsilon is nothing
        clip.load_state_dict(rescaled(clip.state_dict(), factor))
        features = clip.encode_text(tokens, normalize=True)
        features[0, 0].backward()
        moved.append((features.detach(), clip.token_embedding.weight.grad))
        clip.token_embedding.weight.grad = None
    torch.testing.assert_close(moved[1][0], moved[0][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(moved[1][1], 2 * moved[0][1], atol=1e-5, rtol=1e-3)


def test_texts_share_a_direction_and_vague_ones_reach_farther() -> None:
    cosines = (texts := student.in_cone(torch.eye(4))) @ texts.t()
    expected = student.CONE**2 / (1 + student.CONE**2)
    torch.testing.assert_close(cosines, torch.eye(4) * (1 - expected) + expected)
    vague = student.in_cone(0.5 * torch.eye(4))
    torch.testing.assert_close(vague.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(vague[:, :-1], 0.5**-student.REACH * texts[:, :-1])
    farthest = student.in_cone(torch.tensor([[0.01, 0.0], [0.0, 0.0]]), reach=1.0)
    torch.testing.assert_close(farthest, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
