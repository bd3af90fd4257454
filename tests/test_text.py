"""Text features and their derivatives equal those of the reference forward pass over every position."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.tokenizer import HFTokenizer
from torch import Tensor

from selftpt.config import VIEWS
from selftpt.models.text import (
    PackedTextForward,
    ReferenceTextForward,
    TextEncoder,
    TextTower,
    before_name,
    encode_pairs,
    encode_template,
)
from selftpt.models.tokenizer import ClassTokens, Tokenizer, end_ids, tokenize
from tests.helpers.models import KINDS, PACKED, SPECS, Small, names_of, random_prompt, relative, small
from tests.oracle import reference

BOUND = {torch.float32: 1e-5, torch.float64: 1e-9}
PACKED_AND_REFERENCE = (
    "vit",
    "vit-quickgelu",
    "layerscale",
    "qk-norm",
    "worldwide",
    "mobileclip",
    "siglip",
    "coca",
    "bert",
)


def tokens_of(model: Small, names: list[str]) -> ClassTokens:
    return tokenize(names, model.model.text.tokenizer, model.context)


def names_of_many_lengths(model: Small, length: int) -> list[str]:
    """Return names of up to 60 tokens, or as many as fit, in no particular order."""
    longest = min(60, model.max_tokens(max(length, 4)))
    return names_of([3, 1, longest, 1, 7, 2, longest - 1, 3])


def encoder_of(model: Small, names: list[str], length: int, views=VIEWS, chunk: int | None = None) -> TextEncoder:
    return TextEncoder(model.model.text, tokens_of(model, names), length, views, chunk=chunk)


def reference_features(model: Small, names: list[str], prompt: Tensor, views=VIEWS) -> Tensor:
    """Return reference features [V, C, D] in float64 for models of any precision."""
    exact = small(model.kind, torch.float64)
    return torch.stack([reference.encode(exact, view, names, prompt.double()) for view in views])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_forward_is_used_where_supported(kind: str) -> None:
    model = small(kind)
    assert model.model.text.supports_packed is SPECS[kind].packed
    forward = encoder_of(model, ["cat", "dog"], 2).forwards[0]
    assert isinstance(forward, PackedTextForward if SPECS[kind].packed else ReferenceTextForward)


def test_architectures_that_support_packed_are_listed() -> None:
    assert set(PACKED) == {
        "vit",
        "vit-quickgelu",
        "resnet",
        "custom-text",
        "layerscale",
        "qk-norm",
        "one-layer",
        "worldwide",
    }


def test_tower_without_causal_mask_does_not_support_packed() -> None:
    model = small("vit")
    mask = model.clip.attn_mask
    model.clip.attn_mask = torch.zeros_like(mask)
    try:
        assert not type(model.model.text)(model.clip, model.model.text.tokenizer).supports_packed
    finally:
        model.clip.attn_mask = mask


def test_number_of_prompt_vectors_before_the_name_depends_on_the_view() -> None:
    assert [before_name("end", length) for length in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [before_name("front", length) for length in range(6)] == [0, 0, 0, 0, 0, 0]
    assert [before_name("middle", length) for length in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_reference_features_depend_on_views_classes_and_every_prompt_vector(kind: str) -> None:
    """The other tests could not detect mistakes in a model whose features hardly depend on its input."""
    model = small(kind, torch.float64)
    names, prompt = names_of([1, 1, 2]), random_prompt(model, 4)
    features = reference_features(model, names, prompt)
    for a, b in pairwise(features):
        assert relative(a, b) > 1e-2
    for a, b in pairwise(features.unbind(1)):
        assert relative(a, b) > 1e-2
    for k in range(4):
        changed = prompt.clone()
        changed[k] = random_prompt(model, 4, seed=1)[k]
        assert (
            min(relative(a, b) for a, b in zip(reference_features(model, names, changed), features, strict=True)) > 1e-3
        )


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_features_equal_reference(kind: str, dtype: torch.dtype) -> None:
    model = small(kind, dtype)
    for length in (1, 2, 3, 4, 5, 8):
        names, prompt = names_of_many_lengths(model, length), random_prompt(model, length, seed=length)
        found, expected = encoder_of(model, names, length)(prompt), reference_features(model, names, prompt)
        for view, a, b in zip(VIEWS, found, expected, strict=True):
            for name, one, other in zip(names, a, b, strict=True):
                assert relative(one, other) < BOUND[dtype], f"{view} view of {name!r}, M = {length}"


@pytest.mark.parametrize("kind", ["vit", "layerscale", "worldwide", "siglip", "coca", "roberta"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_features_of_random_class_lists_equal_reference(kind: str, data: st.DataObject) -> None:
    model = small(kind, torch.float64)
    length = data.draw(st.integers(1, 8), "M")
    sizes = data.draw(st.lists(st.integers(1, min(60, model.max_tokens(length))), min_size=1, max_size=9), "tokens")
    views = data.draw(st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3, unique=True), "views")
    chunk = data.draw(st.none() | st.integers(1, 10), "chunk")
    names, prompt = names_of(sizes), random_prompt(model, length)
    found = encoder_of(model, names, length, views, chunk)(prompt)
    for a, b in zip(found.flatten(0, 1), reference_features(model, names, prompt, views).flatten(0, 1), strict=True):
        assert relative(a, b) < 1e-9


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("kind", ["vit", "worldwide", "mobileclip"])
def test_features_of_a_single_view_equal_reference(kind: str, length: int, view: str) -> None:
    """With one prompt vector, the middle and front views have no shared prefix."""
    model = small(kind, torch.float64)
    names, prompt = names_of([2, 1]), random_prompt(model, length)
    found = encoder_of(model, names, length, (view,))(prompt)
    assert relative(found, reference_features(model, names, prompt, (view,))) < 1e-9


TEMPLATES = ("a photo of a {}.", "{}", "{}.", "a {} on the road", "the cat and the dog in a photo of the {}, red.")


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_template_features_equal_reference(kind: str, dtype: torch.dtype) -> None:
    """Includes templates without text before the name."""
    model, exact = small(kind, dtype), small(kind, torch.float64)
    none = random_prompt(exact, 0)
    for template in TEMPLATES:
        names = names_of([2, 1, min(40, model.max_tokens(12)), 1])
        expected = reference.encode(exact, "hand_crafted", names, none, template)
        for chunk in (None, 1, 3):
            found = encode_template(model.model.text, tokens_of(model, names), template, chunk)
            assert not found.requires_grad
            for one, other in zip(found, expected, strict=True):
                assert relative(one, other) < BOUND[dtype], template


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_template_features_equal_open_clip(kind: str, template: str) -> None:
    """The hand-crafted view equals open_clip's encoding of the complete sentence, as in zero-shot classification."""
    model = small(kind, torch.float64)
    names = ["cat", "red kite", "blue bird in the rain"]
    ids = model.tokenizer([template.format(name) for name in names], context_length=model.context)
    expected = model.clip.encode_text(ids, normalize=False)
    assert relative(encode_template(model.model.text, tokens_of(model, names), template), expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_of_word_embeddings_equals_the_words(kind: str) -> None:
    model = small(kind, torch.float64)
    prompt = model.model.text.embed_words("a photo of a")
    assert prompt.shape == (4, model.model.text.width)
    assert not prompt.requires_grad
    sentences = ["a photo of a cat.", "cat a photo of a.", "a photo cat of a."]
    expected = model.clip.encode_text(model.tokenizer(sentences, context_length=model.context), normalize=False)
    assert relative(encoder_of(model, ["cat"], 4)(prompt)[:, 0], expected) < 1e-9


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_derivatives_equal_reference(kind: str, length: int) -> None:
    """Compares derivatives of a random linear function of the features."""
    model = small(kind, torch.float64)
    names = names_of([2, 1, 9, 1])
    encoder = encoder_of(model, names, length)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, len(names), model.spec.dimension, generator=generator, dtype=torch.float64)
    v = torch.randn(length, model.model.text.width, generator=generator, dtype=torch.float64)

    def both(features_of) -> tuple[Tensor, Tensor]:
        p = random_prompt(model, length).requires_grad_()
        (first,) = torch.autograd.grad((features_of(p) * u).sum(), p, create_graph=True)
        return first, torch.autograd.grad((first * v).sum(), p)[0]

    found, expected = both(encoder), both(lambda p: reference_features(model, names, p))
    assert expected[1].norm() > 1e-3
    assert relative(found[0], expected[0]) < 1e-9
    assert relative(found[1], expected[1]) < 1e-9


@pytest.mark.parametrize("no_graph_chunk", [2, 64])
@pytest.mark.parametrize("kind", PACKED_AND_REFERENCE)
def test_chunked_features_vjp_and_hvp_equal_reference(
    kind: str, no_graph_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selftpt.models.text.NO_GRAPH_CHUNK", no_graph_chunk)
    model = small(kind, torch.float64)
    names, length = names_of([4, 1, 12, 1, 2, 4, 9]), 3
    prompt = random_prompt(model, length)
    generator = torch.Generator().manual_seed(0)
    u, w = torch.randn(2, 3, len(names), model.spec.dimension, generator=generator, dtype=torch.float64)
    v = torch.randn(prompt.shape, generator=generator, dtype=torch.float64)

    p, cotangent = prompt.clone().requires_grad_(), u.clone().requires_grad_()
    features = reference_features(model, names, p)
    (vjp_u,) = torch.autograd.grad(features, p, cotangent, create_graph=True)
    (vjp_w,) = torch.autograd.grad(features, p, w, retain_graph=True)
    hvp, jvp = torch.autograd.grad((vjp_u * v).sum(), [p, cotangent])
    for chunk in (None, 1, 3, 7):
        encoder = encoder_of(model, names, length, chunk=chunk)
        assert encoder.single_pass is (chunk is None or chunk >= len(names))
        assert [len(c) for c in encoder.chunks[:-1]] == [chunk] * (len(encoder.chunks) - 1)
        encoder.on_forward = on_forward = Mock()
        assert relative(encoder(prompt), features) < 1e-9
        assert on_forward.call_count == len(encoder.no_graph_forwards)
        found = [*encoder.vjp(prompt, u, w), *encoder.hvp(prompt, u, v)]
        for one, expected in zip(found, [vjp_u, vjp_w, hvp, jvp], strict=True):
            assert relative(one, expected) < 1e-9, f"in chunks of {chunk}"
            assert not one.requires_grad


@pytest.mark.parametrize("kind", ["vit", "siglip"])
def test_features_of_a_class_do_not_depend_on_the_other_classes(kind: str) -> None:
    model = small(kind, torch.float64)
    names, prompt = names_of([5, 1, 3, 1, 2]), random_prompt(model, 4)
    together = encoder_of(model, names, 4, chunk=2)(prompt)
    backwards = encoder_of(model, names[::-1], 4)(prompt)
    assert relative(backwards, together.flip(1)) < 1e-12
    for i, name in enumerate(names):
        assert relative(encoder_of(model, [name], 4)(prompt)[:, 0], together[:, i]) < 1e-12


@pytest.mark.parametrize("keep_constants", [False, True])
def test_packed_forward_of_unsorted_sentences_equals_reference(keep_constants: bool) -> None:
    """`TextEncoder` sorts names by length; `PackedTextForward` does not require it."""
    model = small("vit", torch.float64)
    names, prompt = names_of([5, 1, 3, 1, 2, 5]), random_prompt(model, 4)
    ids, stop = [model.encode(name) for name in names], model.encode(".")
    slots = [-1, -2, -3, -4]
    groups = [[[*slots[:k], *name, *slots[k:], *stop] for name in ids] for k in (4, 0, 2)]
    forward = PackedTextForward(model.model.text, groups, keep_constants)
    assert relative(forward(prompt), reference_features(model, names, prompt)) < 1e-9


@pytest.mark.parametrize("kind", ["vit", "mobileclip", "bert"])
def test_encoding_does_not_change_the_model(kind: str) -> None:
    model = small(kind, torch.float64)
    ids = model.tokenizer(["a photo of a cat."], context_length=model.context)
    before = model.clip.encode_text(ids, normalize=False)
    encoder = encoder_of(model, ["cat", "dog"], 2)
    prompt = random_prompt(model, 2)
    features = encoder(prompt.requires_grad_())
    assert features.requires_grad
    assert not encoder(prompt.detach()).requires_grad
    with pytest.raises((RuntimeError, IndexError)):
        encoder(prompt.detach()[:1])  # a prompt of another length
    assert torch.equal(model.clip.encode_text(ids, normalize=False), before)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.clip.parameters())


def test_features_of_names_with_punctuation_and_unicode_equal_reference() -> None:
    """In the end view the name is tokenised together with the full stop; in the other views they are split."""
    model = small("vit", torch.float64)
    names = ["kite (bird of prey)", "café au lait", "猫", "🐱", "rock'n'roll!", "747-400", "cat"]
    prompt = random_prompt(model, 4)
    found = encoder_of(model, names, 4)(prompt)
    assert relative(found, reference_features(model, names, prompt)) < 1e-9
    ids = model.clip.encode_text(model.tokenizer(["a photo of a kite (bird of prey)."]))
    words = model.model.text.embed_words("a photo of a")
    assert relative(encoder_of(model, names[:1], 4)(words)[0], ids) < 1e-9


@pytest.mark.parametrize(("kind", "odd"), [("coca", "!@#"), ("vit", "!@#"), ("mobileclip", "!@#")])
def test_name_that_starts_with_the_padding_id_does_not_change_other_classes(kind: str, odd: str) -> None:
    """In CLIP's vocabulary the padding id is also the token `!`."""
    model = small(kind, torch.float64)
    assert model.encode(odd)[0] == model.spec.frame.pad
    prompt = random_prompt(model, 4)
    alone = encoder_of(model, ["red kite bird"], 4)(prompt)
    beside = encoder_of(model, [odd, "red kite bird"], 4)(prompt)
    assert relative(beside[:, 1:], alone) < 1e-9


@pytest.mark.parametrize("style", ["bytes", "pieces"])
def test_template_features_with_tokenizers_whose_tokens_include_spaces(style: str, tmp_path: Path) -> None:
    """RoBERTa's tokens include the space before a word; SentencePiece adds one before a separate full stop."""
    import tokenizers
    import transformers
    from tokenizers import models, pre_tokenizers, processors, trainers

    bare = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    if style == "bytes":
        bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        bare.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    special_tokens = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special_tokens, show_progress=False)
    bare.train_from_iterator(["a photo of a cat.", "cat a red kite. on the road"] * 9, trainer)
    bare.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    kinds = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), special_tokens, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare, **kinds).save_pretrained(tmp_path)
    tokenizer, clip = HFTokenizer(str(tmp_path), context_length=40), small("roberta", torch.float64).clip

    tower = TextTower(clip, Tokenizer(tokenizer, 40))
    names = ["cat", "red kite"]
    tokens = tokenize(names, tower.tokenizer, 20)
    for template in ("a photo of a {}.", "a {} on the road"):
        expected = clip.encode_text(tokenizer([template.format(name) for name in names]))
        assert relative(encode_template(tower, tokens, template), expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_encode_pairs_features_and_gradients_equal_reference(kind: str) -> None:
    model = small(kind, torch.float64)
    for length in (1, 4):
        names = names_of_many_lengths(model, length)[:5]
        prompts = torch.stack([random_prompt(model, length, seed) for seed in range(5)])
        ours, theirs = prompts.clone().requires_grad_(), prompts.clone().requires_grad_()
        found = encode_pairs(model.model.text, ours, end_ids(model.model.text.tokenizer, names))
        expected = torch.cat([reference.encode(model, "end", [n], p) for n, p in zip(names, theirs, strict=True)])
        assert relative(found, expected) < 1e-9
        u = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
        gradients = [torch.autograd.grad(f, p, u)[0] for f, p in ((found, ours), (expected, theirs))]
        assert relative(*gradients) < 1e-9


@pytest.mark.parametrize("kind", ["siglip", "bert", "vit"])
def test_encoding_is_thread_safe(kind: str) -> None:
    """Eight threads with different prompts, with and without an autograd graph, get the features of one thread."""
    model = small(kind)
    encoder = encoder_of(model, ["cat", "red kite", "dog"], 4)
    prompts = [random_prompt(model, 4, seed) for seed in range(8)]
    expected = [encoder(prompt.requires_grad_()).detach() for prompt in prompts]

    def encode(i: int) -> float:
        with torch.set_grad_enabled(i % 3 > 0):
            return relative(encoder(prompts[i % 8]), expected[i % 8])

    with ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(encode, range(300)))
    assert max(errors) < 1e-5


def test_reference_forward_changes_no_global_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of `torch.backends.cuda` that choose an attention kernel are shared by all threads."""
    model = small("siglip")
    monkeypatch.setattr(torch._C, "_set_sdp_use_flash", Mock(side_effect=AssertionError))
    monkeypatch.setattr(torch._C, "_set_sdp_use_math", Mock(side_effect=AssertionError))
    features = encoder_of(model, ["cat", "dog"], 2)(random_prompt(model, 2).requires_grad_())
    assert features.requires_grad


@pytest.mark.parametrize("kind", ["vit", "siglip", "bert"])
def test_encoder_built_in_inference_mode_is_differentiable_outside(kind: str) -> None:
    model = small(kind)
    prompt = random_prompt(model, 2)
    with torch.inference_mode():
        encoder = encoder_of(model, ["cat", "dog"], 2)
        inside = encoder(prompt)
        model.model.encode_text(["cat"])
        model.model.encode_images(torch.zeros(1, 3, *model.model.preprocess.size))
    p = prompt.clone().requires_grad_()
    features = encoder(p)
    assert relative(features, inside) < 1e-5
    assert torch.autograd.grad(features.sum(), p)[0].norm() > 0


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,4}([ '()./&+-]{1,2}[a-z0-9]{1,3}){0,2}[).!'\"]?", fullmatch=True)
HARD_NAMES = [
    "crane (bird)",
    "rock'n'roll!",
    "747-400",
    "St. Bernard",
    "jack-o'-lantern",
    "St.",
    "drivers' license",
    "F-16A/B",
    "T-shirt (XL)",
    "model 3.",
]


def check_tokens_and_features_of_sentences(kind: str, names: list[str]) -> None:
    """Check that templates and the end view have the tokens and features of open_clip for the complete sentence."""
    model = small(kind, torch.float64)
    text = model.model.text
    tokens = tokens_of(model, names)
    for template in ("a photo of a {}.", "{}", "itap of a {} (art)."):
        ids = model.tokenizer([template.format(name) for name in tokens.names], context_length=model.context)
        for name, row in zip(tokens.names, ids.tolist(), strict=True):
            assert text.tokenizer.add_special_tokens(text.tokenizer.encode_sentence(template.format(name))) == row
        expected = model.clip.encode_text(ids, normalize=False)
        assert relative(encode_template(text, tokens, template), expected) < 1e-9
    ids = model.tokenizer([f"a photo of a {name}." for name in tokens.names], context_length=model.context)
    expected = model.clip.encode_text(ids, normalize=False)
    end = encoder_of(model, list(tokens.names), 4, ("end",))(text.embed_words("a photo of a"))
    assert relative(end[0], expected) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_sentences_with_punctuation_have_the_tokens_and_features_of_open_clip(kind: str) -> None:
    check_tokens_and_features_of_sentences(kind, HARD_NAMES)


@pytest.mark.parametrize("kind", ["vit", "worldwide", "siglip", "clipa", "coca", "bert"])
@settings(max_examples=15, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=5))
def test_sentences_of_random_names_have_the_tokens_and_features_of_open_clip(kind: str, names: list[str]) -> None:
    check_tokens_and_features_of_sentences(kind, names)
