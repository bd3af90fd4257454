"""Tests of the recipe of the embedded model (tools/embedded_model), with a small artificial vocabulary and model."""

from __future__ import annotations

import itertools
import math
import random
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

from selftpt.errors import SelfTPTError, exit_on_error
from tools.embedded_model import __main__ as recipe
from tools.embedded_model import aerial_scenes, evaluate_aerial, targets, text_training
from tools.embedded_model.export import quantize, scale_residual_stream
from tools.embedded_model.image_features import CLASS_NAMES, ROOT, read_visual_neighbours
from tools.embedded_model.targets import EmbeddingSpace, Kernel, Vocabulary
from tools.embedded_model.text_training import TextSet, TrainingConfig, encode_texts, train
from tools.embedded_model.wordnet import WordNet

pytestmark = pytest.mark.recipe

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


def test_wordnet_reads_definitions_hypernyms_and_visible_nouns(wordnet: WordNet) -> None:
    assert wordnet.synsets["00000002"].definition == "a feline"
    assert [wordnet.hypernym(offset) for offset in ("00000001", "00000004")] == ["thing", "cat"]
    assert wordnet.ancestors("00000004") == {"00000004", "00000002", "00000001"}
    assert wordnet.nouns() == {
        "cat": ["00000002"],
        "true cat": ["00000002"],
        "thing": ["00000001"],
        "Persian cat": ["00000004"],
        "angora": ["00000002", "00000004"],
    }


def test_scripts_report_errors_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"), exit_on_error():
        WordNet(tmp_path / "missing")
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "does not exist: install Debian's package wordnet-base" in message
    assert message.count("\n") == 1


def test_wordnet_reads_adjectives(wordnet: WordNet) -> None:
    text = "furry, fluffy: covered with fur"
    assert wordnet.adjectives() == {"furry": text, "fluffy": text}


@pytest.fixture
def vocabulary(wordnet: WordNet, monkeypatch: pytest.MonkeyPatch) -> Vocabulary:
    """Two classes: a breed of cat, and a singer who is not a noun. Texts are embedded by their letters."""
    monkeypatch.setattr(targets, "WNIDS", ["n00000004", "n00000003"])
    monkeypatch.setattr(targets, "CLASS_NAMES", ["Persian", "the singer"])
    neighbours = {"thing": [1, 0], "persian cat": [1], "persian": [1], "furry": [0]}
    return Vocabulary(wordnet, letter_vectors, neighbours)  # type: ignore[arg-type]


def letter_vectors(texts: Sequence[str]) -> Tensor:
    """Embed texts by the counts of their letters [N, 26], L2-normalised."""
    counts = [[text.lower().count(chr(97 + i)) + 0.1 for i in range(26)] for text in texts]
    return F.normalize(torch.tensor(counts), dim=-1)


PROTOTYPES = F.normalize(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
BOTH = torch.arange(2)


def test_hyponym_direction_is_the_mean_of_the_known_classes(vocabulary: Vocabulary) -> None:
    cat, thing, persian = (
        int(vocabulary.first_synset[vocabulary.names.index(name)]) for name in ("cat", "thing", "Persian cat")
    )
    found = vocabulary.hyponym_directions(PROTOTYPES, BOTH)
    torch.testing.assert_close(found[[cat, persian]], PROTOTYPES[[0, 0]])
    torch.testing.assert_close(found[thing], PROTOTYPES.mean(0))
    found = vocabulary.hyponym_directions(PROTOTYPES, torch.tensor([1]))
    assert not found[cat].any()
    torch.testing.assert_close(found[thing], PROTOTYPES[1])
    groups = {vocabulary.names[noun]: classes for noun, classes in vocabulary.class_groups(BOTH).items()}
    assert groups == {"thing": [0, 1]}


def test_neighbour_direction_is_weighted_by_rank(vocabulary: Vocabulary) -> None:
    neighbours = vocabulary.visual_neighbours
    found = targets.neighbour_directions(["Thing", "Persian", "unknown"], neighbours, PROTOTYPES, BOTH)
    expected = (PROTOTYPES[1] + 0.5 * PROTOTYPES[0]) / 1.5
    torch.testing.assert_close(found, torch.stack([expected, torch.zeros(5), torch.zeros(5)]))
    found = targets.neighbour_directions(["thing", "Persian"], neighbours, PROTOTYPES, torch.tensor([1]))
    torch.testing.assert_close(found, PROTOTYPES[[1, 1]])  # a class that is not known may have a known neighbour


def test_regression_without_ridge_reproduces_the_known_classes(vocabulary: Vocabulary) -> None:
    prototypes, exact = torch.eye(2), Kernel(ridge=0.0, neighbour_ridge=math.inf)
    found, _ = vocabulary.predict_targets(prototypes, BOTH, exact, hyponym_weight=0, neighbour_weight=0)
    torch.testing.assert_close(found[:2], prototypes)
    names = vocabulary.name_vectors[:2]
    definitions = vocabulary.definition_vectors[vocabulary.first_synset[:2]]
    kernel = Kernel(name=0.3, definition=0.7, hierarchy=0.0, ridge=0.0)
    for given in (None, definitions):
        found = vocabulary.predict_word_targets(names, given, prototypes, BOTH, kernel)
        torch.testing.assert_close(found, prototypes)
    mostly_definitions = Kernel(name=0.01, definition=0.99, hierarchy=0.0, ridge=0.0)
    found = vocabulary.predict_word_targets(names, definitions.flip(0), prototypes, BOTH, mostly_definitions)
    torch.testing.assert_close(found, prototypes.flip(0), atol=0.1, rtol=0)


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_targets_of_known_classes_have_a_median_norm_of_one(vocabulary: Vocabulary, ridge: float) -> None:
    kernel = Kernel(ridge=ridge)
    nouns = vocabulary.predict_targets(PROTOTYPES, BOTH, kernel, hyponym_weight=0, neighbour_weight=0)[0][:2]
    definitions = vocabulary.definition_vectors[vocabulary.first_synset[:2]]
    words = vocabulary.predict_word_targets(vocabulary.name_vectors[:2], definitions, PROTOTYPES, BOTH, kernel)
    for found in (nouns, words):
        assert found.norm(dim=-1).median().item() == pytest.approx(1)


def test_target_of_a_noun_combines_senses_neighbours_and_hyponyms(vocabulary: Vocabulary) -> None:
    angora, cat = (vocabulary.names.index(name) for name in ("angora", "cat"))
    of_angora = vocabulary.sense_noun == angora
    assert vocabulary.sense_weight[of_angora].tolist() == pytest.approx([2 / 3, 1 / 3])
    nouns, senses = vocabulary.predict_targets(PROTOTYPES, BOTH, Kernel())
    torch.testing.assert_close(nouns[angora], vocabulary.sense_weight[of_angora] @ senses[of_angora])
    vocabulary.visual_neighbours = {"angora": [1], "cat": [1]}
    kernel = Kernel(neighbour_ridge=math.inf)  # keeps neighbours out of the regression
    before, after = (
        vocabulary.predict_targets(PROTOTYPES, BOTH, kernel, neighbour_weight=weight) for weight in (0, 0.5)
    )
    torch.testing.assert_close((after[0] - before[0])[[angora, cat]], 0.5 * PROTOTYPES[[1, 1]])
    difference = after[1] - before[1]  # the senses of an ambiguous noun do not get its neighbours
    torch.testing.assert_close(difference[of_angora], torch.zeros(2, 5))
    torch.testing.assert_close(difference[vocabulary.sense_noun == cat], 0.5 * PROTOTYPES[[1]])
    before, after = (
        vocabulary.predict_targets(PROTOTYPES, BOTH, kernel, hyponym_weight=weight)[0][cat] for weight in (0, 2)
    )
    torch.testing.assert_close(after - before, 2 * PROTOTYPES[0])


def test_targets_do_not_depend_on_classes_that_are_not_known(vocabulary: Vocabulary) -> None:
    prototypes, known = PROTOTYPES.clone(), torch.tensor([1])
    prototypes[0] = math.nan
    for found in vocabulary.predict_targets(prototypes, known, Kernel()):
        assert found.isfinite().all()
    definitions = vocabulary.definition_vectors[vocabulary.first_synset]
    found = vocabulary.predict_word_targets(vocabulary.name_vectors, definitions, prototypes, known, Kernel())
    assert found.isfinite().all()


def test_text_sets_have_the_expected_texts_and_targets(
    vocabulary: Vocabulary, wordnet: WordNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The singer is not a known class."""
    monkeypatch.setattr(recipe, "CLASS_NAMES", targets.CLASS_NAMES)
    monkeypatch.setattr(recipe, "LAND_COVER", {"water": (None, ["sea", "persian"]), "wood": (None, ["thing"])})
    aerial = F.normalize(torch.randn(2, 5, generator=torch.Generator().manual_seed(1)), dim=-1)
    known, kernel = torch.tensor([0]), Kernel()

    class LetterEncoder:
        tokenizer = SimpleNamespace(get_vocab=lambda: ["cat", "blue", "##s"])

        def __call__(self, texts: Sequence[str]) -> Tensor:
            return letter_vectors(texts)

    predicted = vocabulary.predict_targets(PROTOTYPES, known, kernel)
    space = EmbeddingSpace(torch.zeros(5, 8), torch.zeros(5), PROTOTYPES)
    tokenizer = open_clip.SimpleTokenizer()
    encoder: Any = LetterEncoder()
    found = recipe.make_text_sets(vocabulary, predicted, aerial, wordnet.adjectives(), encoder, tokenizer, space, known)
    classes, common, rare, with_hypernym, defined, land, aerial_texts = found
    assert (classes.texts, classes.plurals) == (["Persian"], ["Persians"])
    torch.testing.assert_close(classes.targets, PROTOTYPES[:1])
    assert common.texts == ["cat", "true cat", "thing", "Persian cat", "blue", "fluffy", "furry"]
    assert common.plurals == ["cats", "true cats", "things", "Persian cats", "blue", "fluffy", "furry"]
    assert (rare.texts, rare.plurals) == (["angora"], ["angoras"])
    texts = {
        "cat, a type of thing",
        "true cat, a type of thing",
        "thing, a type of thing",
        "Persian cat, a type of cat",
        "angora, a type of thing",
        "angora, a type of cat",
    }
    assert {*with_hypernym.texts} == {*with_hypernym.plurals} == texts
    assert {*defined.texts} == {"a feline", "a singer", "a breed", "what there is"}
    assert not defined.plurals
    assert [text_set.combine for text_set in found if text_set.plurals] == [True, True, True, False, True]
    assert (land.texts, land.plurals) == (["sea", "thing"], ["seas", "things"])  # a class keeps its own direction
    sea = vocabulary.predict_word_targets(letter_vectors(["sea"]), None, PROTOTYPES, known, kernel)
    thing = predicted[0][[vocabulary.names.index("thing")]]
    torch.testing.assert_close(land.targets, (F.normalize(torch.cat([sea, thing]), dim=-1) + aerial) / 2)
    torch.testing.assert_close(common.targets[2], land.targets[1])
    assert not aerial_texts.plurals
    for word, kind in {"sea": 0, "persian": 0, "thing": 1}.items():
        for text in (f"{word} from above", f"a satellite photo of {word}.", f"an aerial view of the {word}."):
            row = [*aerial_texts.texts].index(text)
            torch.testing.assert_close(aerial_texts.targets[row], aerial[kind] / 2**0.5)
    for text_set in found:
        assert (text_set.targets.norm(dim=-1) <= 1 + 1e-6).all()
        assert len(text_set.texts) == len(text_set.targets)

    def sense_direction(noun: str, synset_of: str) -> Tensor:
        senses = [*zip(vocabulary.sense_noun.tolist(), vocabulary.sense_synset.tolist(), strict=True)]
        synset = int(vocabulary.first_synset[vocabulary.names.index(synset_of)])
        return F.normalize(predicted[1][senses.index((vocabulary.names.index(noun), synset))], dim=0)

    for text, expected in {
        "angora, a type of cat": sense_direction("angora", "Persian cat"),
        "a feline": sense_direction("cat", "cat"),
    }.items():
        (text_set,) = [text_set for text_set in found if text in text_set.texts]
        direction = F.normalize(text_set.targets[[*text_set.texts].index(text)], dim=0)
        torch.testing.assert_close(direction, expected)


def test_visual_neighbours_of_a_noun_move_similar_nouns(vocabulary: Vocabulary) -> None:
    """The smaller the ridge, the nearer "true cat" comes to the neighbour of "cat"."""
    vocabulary.visual_neighbours, other = {"cat": [1]}, vocabulary.names.index("true cat")
    cosines = []
    for ridge in (math.inf, 1.0, 0.1):
        found, _ = vocabulary.predict_targets(PROTOTYPES, BOTH, Kernel(neighbour_ridge=ridge), hyponym_weight=0)
        cosines.append(F.cosine_similarity(found[other], PROTOTYPES[1], dim=0).item())
    assert cosines == sorted(cosines)
    assert cosines[2] > cosines[0] + 0.1


def test_subset_has_the_same_targets(vocabulary: Vocabulary) -> None:
    rows = torch.tensor([0, 1, vocabulary.names.index("thing"), vocabulary.names.index("angora")])
    subset = vocabulary.subset(rows)
    assert subset.names == ["Persian", "the singer", "thing", "angora"]
    kernel = Kernel(neighbour_ridge=math.inf)  # the subset lacks the neighbours of other nouns
    nouns, senses = vocabulary.predict_targets(PROTOTYPES, BOTH, kernel)
    subset_nouns, subset_senses = subset.predict_targets(PROTOTYPES, BOTH, kernel)
    torch.testing.assert_close(subset_nouns, nouns[rows])
    torch.testing.assert_close(subset_senses, senses[torch.isin(vocabulary.sense_noun, rows)])
    assert [subset.hypernyms[i] for i in subset.first_synset] == ["cat", "thing", "thing", "thing"]
    assert subset.definitions == [vocabulary.definitions[i] for i in rows]


def test_table_of_visual_neighbours_is_valid() -> None:
    neighbours = read_visual_neighbours()
    table = (ROOT / "tools" / "embedded_model" / "visual_neighbours.tsv").read_text("utf8")
    words = [line.split("\t")[0].lower() for line in table.splitlines()]
    assert words == sorted({*words})
    assert CLASS_NAMES[neighbours["banjo"][0]] == "acoustic guitar"
    for label, name in enumerate(CLASS_NAMES):
        assert label not in neighbours[name.lower()]
    assert all(len(labels) == len({*labels}) for labels in neighbours.values())


def test_embedding_space_preserves_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(6, 40, generator=generator)
    features = 3 * head.repeat(5, 1) + torch.randn(30, 40, generator=generator) + 7
    space = EmbeddingSpace.fit(head, features, torch.arange(6), 5)
    images = space.project(features)
    torch.testing.assert_close(images.norm(dim=-1), torch.ones(30))
    assert ((images @ space.prototypes.t()).argmax(1) == torch.arange(6).repeat(5)).all()
    projected = features @ space.projection.t() + space.bias
    torch.testing.assert_close(projected.mean(0), torch.zeros(5), atol=1e-3, rtol=0)
    expected = (features - features.mean(0)) @ (head - head.mean(0)).t()  # six centred classes span five dimensions
    found = projected @ space.prototypes.t()  # prototypes are normalised, so each class has a factor of its own
    torch.testing.assert_close(F.normalize(found, dim=0), F.normalize(expected, dim=0), atol=1e-3, rtol=0)


def test_scenes_are_deterministic_and_not_blank() -> None:
    for kind in aerial_scenes.LAND_COVER:
        images = [aerial_scenes.draw_scene(kind, number) for number in (0, 1, 0)]
        assert [image.size for image in images[:2]] == [(224, 224), (64, 64)]
        assert images[0].tobytes() == images[2].tobytes() != aerial_scenes.draw_scene(kind, 2).tobytes()
        assert min(low for low, _ in images[0].getextrema()) < max(high for _, high in images[0].getextrema())


def test_scenes_have_plausible_colours() -> None:
    kinds = ("forest", "open water", "snow", "sand", "pasture", "lake", "river")
    scenes = {kind: torch.stack([pixels(aerial_scenes.draw_scene(kind, n)) for n in range(1, 16, 2)]) for kind in kinds}
    colour = {kind: of.mean((0, 1)) for kind, of in scenes.items()}
    assert colour["snow"].min() > colour["sand"].min() > colour["pasture"].min() > colour["forest"].min()
    assert [int(colour[kind].argmax()) for kind in ("sand", "forest", "open water")] == [0, 1, 2]

    def blue(kind: str) -> Tensor:
        """Return the fraction of blue pixels, which are deep water, in each scene."""
        return (scenes[kind].argmax(-1) == 2).float().mean(1)

    assert blue("pasture").max() < 0.01
    assert 0.05 < blue("river").mean() < blue("lake").mean() < blue("open water").mean()


def pixels(image: Image.Image) -> Tensor:
    """Return the colours of all pixels [N, 3]."""
    return torch.from_numpy(np.array(image)).float().flatten(0, 1)


def test_noise_is_standardised_and_has_the_given_scale() -> None:
    def roughness(size: float) -> float:
        """Return the mean absolute difference of neighbouring pixels."""
        noise = aerial_scenes.Scene(np.random.default_rng(0), 1000).noise(size, 1)
        assert noise.mean() == pytest.approx(0, abs=1e-9)
        assert noise.std() == pytest.approx(1)
        return float(abs(np.diff(noise)).mean())

    assert 1.5 < roughness(100) / roughness(200) < 2.5


def test_textures_are_labelled_by_their_file_names(tmp_path: Path) -> None:
    for name in ("Town1.png", "drycrop1.png", "drycrop1.mask.png", "airport-grass.png", "void.png"):
        Image.new("RGB", (40, 30), "green").save(tmp_path / name)
    found = evaluate_aerial.find_textures(tmp_path, crops_per_file=2)
    assert [(path.name, number, [*evaluate_aerial.KIND_PATTERNS][kind]) for (path, number), kind in found] == [
        ("Town1.png", 0, "residential"),
        ("Town1.png", 1, "residential"),
        ("airport-grass.png", 0, "airport"),
        ("airport-grass.png", 1, "airport"),
        ("drycrop1.png", 0, "annual crops"),
        ("drycrop1.png", 1, "annual crops"),
    ]
    assert [evaluate_aerial.crop(texture).size for texture, _ in found[:2]] == [(224, 224), (64, 64)]
    assert {*evaluate_aerial.KIND_PATTERNS} <= {*aerial_scenes.LAND_COVER}
    with pytest.raises(SelfTPTError, match="has no textures of land: pass the folder Textures/Terrain"):
        evaluate_aerial.find_textures(tmp_path / "missing")


def test_words_for_land_cover_have_one_kind() -> None:
    words = [word for _, words in aerial_scenes.LAND_COVER.values() for word in words]
    assert len(words) == len({*words})
    assert all(word == word.strip().lower() for word in words)


def test_discriminant_directions_ignore_noisy_and_common_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = torch.arange(3).repeat(200)
    centres = torch.tensor([[1.0, 0, 2, 0], [-0.5, 0.9, 0, 0], [-0.5, -0.9, -2, 0]])
    common = torch.tensor([0.3, -0.2, 0.1, 5])
    images = centres[kinds] + common + torch.randn(600, 4, generator=generator) * torch.tensor([0.1, 0.1, 2, 0.1])
    found = targets.discriminant_directions(images, kinds, ridge=0.01)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(3))
    assert (found[:, 2].abs() < 0.1).all()
    assert (found @ F.normalize(common, dim=0)).abs().max() < 0.05
    assert targets.accuracy(images, found, kinds) > 0.95
    assert targets.accuracy(images, F.normalize(centres, dim=-1), kinds) < 0.8


def test_invariant_space_ignores_a_shift_of_features() -> None:
    generator = torch.Generator().manual_seed(0)
    head, shift = torch.randn(6, 40, generator=generator), torch.randn(40, generator=generator)
    features = 3 * head.repeat(5, 1) + torch.randn(30, 40, generator=generator)
    space = EmbeddingSpace.fit(head, features, torch.arange(6), 5)
    invariant = space.invariant_to(shift)

    def logits(of: EmbeddingSpace, images: Tensor) -> Tensor:
        return (images @ of.projection.t() + of.bias) @ of.prototypes.t()

    assert (logits(space, features + 9 * shift) - logits(space, features)).abs().max() > 1
    torch.testing.assert_close(logits(invariant, features + 9 * shift), logits(invariant, features), atol=1e-3, rtol=0)
    torch.testing.assert_close(invariant.prototypes.norm(dim=-1), torch.ones(6))
    for images in (features, features + 9 * shift):
        predicted = (invariant.project(images) @ invariant.prototypes.t()).argmax(1)
        assert (predicted == torch.arange(6).repeat(5)).all()


@pytest.fixture
def clip() -> CLIP:
    torch.manual_seed(0)
    text = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    return CLIP(8, {"image_size": 32, "patch_size": 16, "width": 16, "layers": 1, "head_width": 8}, text).eval()


def test_text_features_equal_those_of_open_clip(clip: CLIP) -> None:
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    tokens = tokenizer(["a cat", "a photo of a big dog.", "tram"])
    rows = [row[: row.argmax() + 1].tolist() for row in tokens]
    with torch.no_grad():
        found = encode_texts(clip, clip.token_embedding.weight, rows)
        expected = clip.encode_text(tokens, normalize=True)
        torch.testing.assert_close(found, expected)
        in_bfloat16 = encode_texts(clip, clip.token_embedding.weight, rows, bfloat16=True)
    assert 1e-6 < (in_bfloat16 - expected).abs().max() < 0.01


def test_training_reaches_the_targets_and_keeps_unused_tokens(clip: CLIP, tmp_path: Path) -> None:
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    names = ["cat", "dog", "tram", "red kite", "boat", "rocket"]
    directions = F.normalize(torch.randn(6, 7, generator=torch.Generator().manual_seed(1)), dim=-1)
    before = clip.token_embedding.weight.detach().clone()
    text_sets = [
        TextSet(names[:3], directions[:3], 3, ["cats", "dogs", "trams"]),
        TextSet(names[3:], directions[3:], 2, names[3:]),
        TextSet(["a small furry animal that purrs and would not fit into a template of twelve"], directions[:1], 1),
    ]
    config = TrainingConfig(
        steps=320, lr=0.02, embedding_lr=0.02, warmup=5, length_buckets=2, combination_ratio=0.3, plural_ratio=0.2
    )
    train(clip, tokenizer, text_sets, config, tmp_path / "log.jsonl")
    with torch.no_grad():
        found = clip.encode_text(tokenizer([f"a photo of a {name}." for name in names]), normalize=True)
        plurals = clip.encode_text(tokenizer(["cats", "dogs", "trams"]), normalize=True)
        pairs = clip.encode_text(tokenizer(["tram or dog", "dog or tram"]), normalize=True)
    assert (found * text_training.add_shared_component(directions)).sum(-1).min() > 0.95
    assert (plurals * text_training.add_shared_component(directions[:3])).sum(-1).min() > 0.95
    assert (pairs @ found.t()).topk(2).indices.sort().values.tolist() == [[1, 2], [1, 2]]
    assert (F.normalize(found[:, :-1], dim=-1) * directions).sum(-1).min() > 0.8
    (banana,) = tokenizer.encode("banana")
    (cat,) = tokenizer.encode("cat")
    assert torch.equal(clip.token_embedding.weight[banana], before[banana])
    assert not torch.equal(clip.token_embedding.weight[cat], before[cat])


def test_combined_names_are_grammatical_and_have_weighted_targets() -> None:
    tokenizer = open_clip.SimpleTokenizer()
    nouns = TextSet(["barn", "cat", "tram"], torch.eye(3), 1, ["barns", "cats", "trams"])
    alone = TextSet(["crane, a type of bird"], torch.eye(3)[:1], 1, ["crane, a type of bird"], combine=False)
    config = TrainingConfig(steps=1, combination_ratio=0.6, plural_ratio=0.5, default_template_ratio=1.0)
    sampler = text_training.TextSampler(tokenizer, [nouns, alone], config, 20)
    sampled = [sampler.sample(nouns, i % 3) for i in range(3000)]
    found = {tokenizer.decode(tokens[5:-2]).strip(): target.tolist() for tokens, target in sampled}
    assert {"barn", "barns", "barn cats", "cats in a barn", "cats or trams", "cat , tram"} <= {*found}
    for before, after in itertools.chain.from_iterable(itertools.pairwise(text.split()) for text in found):
        assert before != "a" or after in nouns.texts
        assert before not in nouns.plurals or after not in (*nouns.texts, *nouns.plurals)
    assert found["barn cat"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert found["cat in a barn"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert text_training._name_weights([("", 1.0), ("and", 1.0)]) == pytest.approx(
        [1 / 6, 1 / 3, 1 / 2]
    )  # barn cat and tram
    assert text_training._name_weights([("in a", 0.5), ("", 1.0)]) == pytest.approx(
        [2 / 3, 1 / 9, 2 / 9]
    )  # cat in a barn tram
    assert text_training._name_weights([("", 1.0), ("", 1.0)]) == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    listed = [text for text in found if text.count(" and ") + text.count(" or ") == 2 and len(text.split()) == 5]
    assert listed
    for text in listed:
        counts = [text.count(name) for name in nouns.texts]
        assert found[text] == pytest.approx([count / 3 for count in counts])
    assert {tokenizer.decode(sampler.sample(alone, 0)[0][5:-2]).strip() for _ in range(50)} == {
        "crane , a type of bird"
    }
    assert max(len(tokens) for tokens, _ in sampled) == 20
    assert {token for tokens, _ in sampled for token in tokens} <= {*sampler.used_tokens}


def test_plural_follows_the_common_rules() -> None:
    words = {"cat": "cats", "fox": "foxes", "bus": "bus", "church": "churches", "berry": "berries", "ray": "rays"}
    assert {word: text_training.plural(word) for word in words} == words


def test_batches_are_drawn_without_replacement() -> None:
    batches = text_training._batches(10, 5, random.Random(0))
    assert sorted(next(batches) + next(batches)) == list(range(10))


def test_quantisation_error_is_small() -> None:
    state = {"token_embedding.weight": 0.05 * torch.randn(100, 16), "w": torch.randn(4, 4), "b": torch.randn(4)}
    found = quantize(state)
    for name, bound in {"token_embedding.weight": 0.04, "w": 1e-3, "b": 0.0}.items():
        error = (found[name].float() - state[name]).norm() / state[name].norm()
        assert error <= bound, name


def test_scaled_residual_stream_keeps_features_and_scales_gradients(clip: CLIP) -> None:
    tokenizer = open_clip.SimpleTokenizer(context_length=12)
    tokens, results = tokenizer(["a photo of a cat.", "a tram"]), []
    with torch.no_grad():
        for parameter in clip.transformer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # makes the biases non-zero
    for factor in (100.0, 0.5):  # the first makes the epsilon of the layer normalisation negligible
        clip.load_state_dict(scale_residual_stream(clip.state_dict(), factor))
        features = clip.encode_text(tokens, normalize=True)
        features[0, 0].backward()
        results.append((features.detach(), clip.token_embedding.weight.grad))
        clip.token_embedding.weight.grad = None
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(results[1][1], 2 * results[0][1], atol=1e-5, rtol=1e-3)


def test_less_confident_targets_have_less_of_the_shared_component() -> None:
    cosines = (texts := text_training.add_shared_component(torch.eye(4))) @ texts.t()
    expected = text_training.SHARED_NORM**2 / (1 + text_training.SHARED_NORM**2)
    torch.testing.assert_close(cosines, torch.eye(4) * (1 - expected) + expected)
    uncertain = text_training.add_shared_component(0.5 * torch.eye(4))
    torch.testing.assert_close(uncertain.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(uncertain[:, :-1], 0.5**-text_training.CONFIDENCE_EXPONENT * texts[:, :-1])
    limit = text_training.add_shared_component(torch.tensor([[0.01, 0.0], [0.0, 0.0]]), exponent=1.0)
    torch.testing.assert_close(limit, torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
