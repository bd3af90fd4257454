"""Tokenization of class names: special tokens, clean names, equal names, and names that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

from selftpt.config import ContrastConfig
from selftpt.errors import SelfTPTError
from selftpt.models.tokenizer import Tokenizer, class_tokens, clean_name, end_ids, tokenize
from tests.helpers.models import KINDS, Frame, Pieces, PiecesTokenizer, name_of, small

OPEN_CLIP = SimpleTokenizer()
CLIP = Tokenizer(OPEN_CLIP, 77)


# Special tokens


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_equal_open_clip(kind: str) -> None:
    model = small(kind)
    found, frame = model.model.text.tokenizer, model.spec.frame
    assert found.start == frame.start
    assert found.end == (frame.end,)
    assert found.pad == frame.pad
    assert found.context == model.context
    for text in ("cat", "a photo of a red kite.", name_of(20)):
        assert found.encode(text) == model.encode(text)
        assert found.add_special_tokens(found.encode(text)) == model.tokenizer([text])[0].tolist()


def test_ids_of_clip_special_tokens() -> None:
    assert CLIP.add_special_tokens(CLIP.encode("a cat")) == [49406, 320, 2368, 49407] + [0] * 73


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_ids_of_random_texts_equal_open_clip(text: str) -> None:
    ids = CLIP.encode(text)
    if len(ids) <= 75:
        assert CLIP.add_special_tokens(ids) == OPEN_CLIP([text])[0].tolist()


class StubTokenizer:
    """A tokenizer with one token per word; `make` adds special tokens and padding."""

    context_length = 20

    def __init__(self, make: Any) -> None:
        self._make = make

    def encode(self, text: str) -> list[int]:
        return [10 + len(word) for word in text.split()]

    def __call__(self, texts: list[str], context_length: int = 20) -> torch.Tensor:
        return torch.tensor([self._make(self.encode(text), context_length) for text in texts])


def pad(ids: list[int], context: int, token: int = 0) -> list[int]:
    return ids + [token] * (context - len(ids))


@pytest.mark.parametrize(
    "make",
    [
        lambda ids, n: pad([1, *ids, 2, 3], n),  # two tokens at the end
        lambda ids, n: [0] * (n - len(ids) - 1) + [*ids, 2],  # padding first
        lambda ids, n: [0] * (n - len(ids)) + ids,  # padding first, and no end
        lambda ids, n: [*pad([1, *ids, 2], n - 1), 9],  # a class token after the padding
        lambda ids, n: pad([1, *ids[::-1], 2], n),  # reversed
        lambda ids, n: pad([1, *(2 * i for i in ids), 2], n),  # other tokens than those of the words
        lambda ids, n: pad([1, *[i for w in ids for i in (w, 5)], 2], n),  # a separator after each word
    ],
)
def test_tokenizer_with_unsupported_special_tokens_raises(make: Any) -> None:
    with pytest.raises(SelfTPTError, match="tokenizer StubTokenizer"):
        Tokenizer(StubTokenizer(make), 20)


def test_stub_tokenizer_with_supported_special_tokens_is_accepted() -> None:
    found = Tokenizer(StubTokenizer(lambda ids, n: pad([1, 4, *ids, 2], n)), 20)
    assert (found.start, found.end, found.pad) == ((1, 4), (2,), 0)


def test_tokenizer_without_token_for_a_common_word_raises() -> None:
    class Empty(StubTokenizer):
        def encode(self, text: str) -> list[int]:  # noqa: ARG002
            return []

    with pytest.raises(SelfTPTError, match="tokenizer Empty"):
        Tokenizer(Empty(lambda ids, n: pad([1, *ids, 2], n)), 20)


def test_open_clip_tokenizer_with_clips_mode_or_left_padding_raises() -> None:
    pieces = Pieces(Frame((2,), 3, 0), {})
    with pytest.raises(SelfTPTError, match="special tokens or its padding are unusual"):
        Tokenizer(PiecesTokenizer(pieces, 77, mode="clips"), 77)
    with pytest.raises(SelfTPTError, match="special tokens or its padding are unusual"):
        Tokenizer(PiecesTokenizer(Pieces(Frame((2,), 3, 0), {}, left=True), 77), 77)


@pytest.fixture
def hf_tokenizer(tmp_path: Path) -> HFTokenizer:
    """Return a Hugging Face tokenizer as open_clip loads it: lower-case words, [CLS] and [SEP]."""
    import tokenizers
    import transformers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", "cat", "dog", "."]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special_tokens = {f"{token.strip('[]').lower()}_token": token for token in vocabulary[:4]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(tmp_path)
    return HFTokenizer(str(tmp_path), context_length=12)


def test_special_tokens_and_ids_of_a_hugging_face_tokenizer(hf_tokenizer: HFTokenizer) -> None:
    found = Tokenizer(hf_tokenizer, 12)
    assert (found.start, found.end, found.pad) == ((2,), (3,), 0)
    tokens = tokenize(["Cat", "dog", "cat", "weasel"], found, 5)
    assert tokens.ids == ((7,), (8,), (7,), (1,))
    assert tokens.name_ids.tolist() == [0, 1, 0, 3]
    for name in ("[SEP]", "cat [CLS]", "[PAD] dog"):
        with pytest.raises(SelfTPTError, match="special token"):
            tokenize(["cat", name], found, 5)


# Names


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("cat", "cat"),
        ("red_kite", "red kite"),
        ("__red__kite__", "red kite"),
        ("  red \t kite\n", "red kite"),
        ("red\u00a0kite\u3000bird", "red kite bird"),
        ("Kite (bird_of_prey)", "Kite (bird of prey)"),
        ("café", "café"),
        ("", ""),
        ("_ _", ""),
    ],
)
def test_names_are_cleaned(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@pytest.mark.parametrize("kind", ["vit", "siglip", "clipa", "bert", "roberta"])
def test_names_with_equal_tokens_are_duplicates(kind: str) -> None:
    model = small(kind)
    names = ["Cat", "red_kite", "dog", "cat", "red  Kite", "cats", "CAT", "red kite "]
    tokens = tokenize(names, model.model.text.tokenizer, 20)
    assert tokens.names == ("Cat", "red kite", "dog", "cat", "red Kite", "cats", "CAT", "red kite")
    assert tokens.name_ids.tolist() == [0, 1, 2, 0, 1, 5, 0, 1]
    assert tokens.duplicates == ["Cat", "red kite"]
    assert len(tokens) == len(names)
    assert [list(ids) for ids in tokens.ids] == [model.encode(name) for name in tokens.names]


def test_different_names_are_not_duplicates() -> None:
    tokens = tokenize(["cat", "dog"], CLIP, 20)
    assert tokens.name_ids.tolist() == [0, 1]
    assert tokens.duplicates == []


def test_ids_of_unicode_names_equal_open_clip() -> None:
    """Composed and decomposed forms of a letter are equal."""
    names = ["café", "猫", "🐱", "Ελλάδα", "rock'n'roll", "a & b", "747-400", "naïve", "cafe\u0301"]
    tokens = tokenize(names, CLIP, 20)
    for name, ids in zip(names, tokens.ids, strict=True):
        assert OPEN_CLIP([name])[0, 1 : len(ids) + 2].tolist() == [*ids, 49407]
    assert tokens.name_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]


def test_name_and_full_stop_are_tokenised_together_in_the_end_view() -> None:
    tokens = tokenize(["kite (bird of prey)"], CLIP, 20)
    bracket, stop = CLIP.encode(")")[0], CLIP.encode(".")[0]
    assert tokens.ids[0][-1] == bracket
    (joint,) = end_ids(CLIP, tokens.names)
    assert joint == CLIP.encode("kite (bird of prey).")
    assert joint[-1] not in (bracket, stop)


@pytest.mark.parametrize("name", ["", "   ", "_", " _ _ ", "\t\n"])
def test_empty_name_raises(name: str) -> None:
    with pytest.raises(SelfTPTError, match="class name 2 of 3 is empty"):
        tokenize(["cat", name, "dog"], CLIP, 20)


def test_empty_list_of_names_raises() -> None:
    with pytest.raises(SelfTPTError, match="no class names"):
        tokenize([], CLIP, 20)


def test_name_that_is_too_long_raises() -> None:
    assert len(tokenize([name_of(20)], CLIP, 20).ids[0]) == 20
    with pytest.raises(SelfTPTError, match=r"too long: it has 21 tokens, .* accepts 20 ") as raised:
        tokenize(["cat", name_of(21)], CLIP, 20)
    assert name_of(21)[:40] in str(raised.value)
    with pytest.raises(SelfTPTError, match="too long: it has 300 tokens") as raised:
        tokenize([name_of(300)], CLIP, 60)
    assert len(str(raised.value)) < 200


def test_name_without_tokens_raises() -> None:
    """SigLIP's tokenizer removes all punctuation."""
    tokenizer = small("siglip").model.text.tokenizer
    with pytest.raises(SelfTPTError, match=r"'\?!' has no token"):
        tokenize(["cat", "?!"], tokenizer, 20)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("vit", "<end_of_text>"),
        ("vit", "<start_of_text>"),
        ("vit", "a <END_of_text> cat"),
        ("vit", "&lt;end&#95;of&#95;text&gt;"),
        ("bert", "[SEP]"),
        ("bert", "cat [CLS]"),
        ("bert", "[PAD] cat"),
        ("clipa", "cat [SEP]"),
        ("clipa", "[PAD]"),
        ("roberta", "</s>"),
        ("roberta", "cat <pad>"),
    ],
)
def test_name_with_special_token_raises(kind: str, name: str) -> None:
    with pytest.raises(SelfTPTError, match="special token") as raised:
        tokenize(["cat", name], small(kind).model.text.tokenizer, 20)
    assert repr(name) in str(raised.value)


def test_text_similar_to_special_tokens_is_accepted() -> None:
    names = ["end of text", "<end of text>", "! cat", "[sep] of a cat"]
    assert len(tokenize(names, CLIP, 20)) == 4


def test_subset_of_classes_keeps_tokens_and_duplicates() -> None:
    tokens = tokenize(["cat", "dog", "Cat", "red_kite", "DOG", "cat"], CLIP, 20)
    some = tokens.subset([5, 4, 3, 2, 1])
    assert some.names == ("cat", "DOG", "red kite", "Cat", "dog")
    assert some.ids == tuple(tokens.ids[i] for i in (5, 4, 3, 2, 1))
    assert some.name_ids.tolist() == [0, 1, 2, 0, 1]
    assert some.duplicates == ["cat", "DOG"]
    assert tokens.subset([3, 1]).duplicates == []
    assert tokens.subset(range(6)).name_ids.tolist() == tokens.name_ids.tolist()


@settings(max_examples=60, deadline=None)
@given(names=st.lists(st.text(max_size=12), min_size=1, max_size=6), max_tokens=st.integers(1, 12))
def test_random_names_are_tokenised_or_raise_selftpt_error(names: list[str], max_tokens: int) -> None:
    try:
        tokens = tokenize(names, CLIP, max_tokens)
    except SelfTPTError:
        return
    for i, ids in enumerate(tokens.ids):
        assert 1 <= len(ids) <= max_tokens
        assert not {49406, 49407} & set(ids)
        assert int(tokens.name_ids[i]) == tokens.ids.index(ids)


def test_length_limit_applies_to_the_complete_sentence() -> None:
    """A closing bracket and a full stop form one token, so this name fits although its separate tokens would not."""
    name = " ".join(["red"] * 65) + " (sun)"  # 68 tokens on its own
    contrast = ContrastConfig(views=("end", "hand_crafted"), template="a photo of a red {}.")
    assert len(CLIP.encode(name)) == 68
    assert len(CLIP.encode(contrast.template.replace("{}", name))) == 73
    assert class_tokens(CLIP, [name, "cat"], 6, contrast).names == (name, "cat")
    longer = "a photo of a red blue red {}."
    with pytest.raises(SelfTPTError, match=r"too long: it has 69 tokens, .* accepts 68 "):
        class_tokens(CLIP, [f"red {name}", "cat"], 4, ContrastConfig(views=("end", "hand_crafted"), template=longer))


def test_sentence_that_is_too_long_raises() -> None:
    assert len(CLIP.encode_sentence(name_of(75))) == 75
    with pytest.raises(SelfTPTError, match="too long: it has 76 tokens, and this model accepts 75"):
        CLIP.encode_sentence(name_of(76))
