"""Prompts per layer in both towers: features equal open_clip's blocks with replaced rows, and gradients are exact."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selftpt.errors import SelfTPTError
from selftpt.models import LayerPrompts, Model
from selftpt.models.text import PackedTextForward, TextEncoder, encode_sentences
from selftpt.models.tokenizer import tokenize
from tests.helpers.models import BLOCKS, PACKED, SPECS, Small, names_of, relative, small
from tests.oracle import layer_prompts as oracle

TEXT_KINDS = tuple(kind for kind, spec in SPECS.items() if spec.pool in ("end", "last"))  # neither CoCa nor BERT
CLASS_TOKEN = tuple(kind for kind in BLOCKS if kind not in ("worldwide", "clipa", "coca"))
SENTENCES = ["a photo of a cat.", "a photo of a red kite", "a photo in the rain and snow.", "a photo of a cat."]


def vectors_of(width: int, layers: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(layers, count, width, generator=generator, dtype=torch.float64)


@functools.cache
def exact(kind: str) -> Small:
    """Return a separate copy of a small model with both towers in float64."""
    tiny = copy.deepcopy(small(kind, torch.float64))
    tiny.clip.visual.double()
    return tiny


def image_of(kind: str) -> tuple[Small, Tensor, int, int]:
    """Return a model with an image tower in float64, pixels, and the tower's width and number of blocks."""
    tiny = exact(kind)
    visual = tiny.clip.visual
    size = SPECS[kind].vision["image_size"]
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return tiny, pixels, visual.class_embedding.shape[0], len(visual.transformer.resblocks)


def ids_of(tiny: Small, sentences: list[str] = SENTENCES) -> list[list[int]]:
    return [tiny.encode(sentence) for sentence in sentences]


# The image tower


@pytest.mark.parametrize("kind", BLOCKS)
def test_image_features_with_prompts_equal_open_clip_blocks(kind: str) -> None:
    tiny, pixels, width, layers = image_of(kind)
    for depth in range(1, layers + 1):
        vectors = vectors_of(width, depth, 3)
        found = tiny.model.image(pixels, LayerPrompts(vectors))
        assert relative(found, oracle.image_features(tiny, pixels, vectors)) < 1e-9
        assert relative(found, tiny.model.image(pixels)) > 1e-3


@pytest.mark.parametrize("kind", CLASS_TOKEN)
def test_read_only_image_prompts_equal_masked_attention(kind: str) -> None:
    tiny, pixels, width, layers = image_of(kind)
    for depth in (1, layers):
        vectors = vectors_of(width, depth, 3)
        found = tiny.model.image(pixels, LayerPrompts(vectors, read_only=True))
        assert found.shape == (2, 3, tiny.spec.dimension)
        assert relative(found, oracle.image_features(tiny, pixels, vectors, read_only=True)) < 1e-9


@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("kind", ["vit", "qk-norm", "worldwide"])
def test_image_features_with_attention_mask_equal_open_clip_blocks(kind: str, boolean: bool) -> None:
    tiny, pixels, width, _ = image_of(kind)
    vectors = vectors_of(width, 2, 2)
    hidden = torch.rand(19, 19, generator=torch.Generator().manual_seed(2)) < 0.3
    hidden.fill_diagonal_(False)
    additive = torch.zeros(19, 19, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    found = tiny.model.image(pixels, LayerPrompts(vectors), mask=~hidden if boolean else additive)
    assert relative(found, oracle.image_features(tiny, pixels, vectors, mask=additive)) < 1e-9


@pytest.mark.parametrize("kind", ["vit", "coca"])
def test_observer_is_given_the_input_of_each_block(kind: str) -> None:
    tiny, pixels, width, layers = image_of(kind)
    vectors, expected, found = vectors_of(width, 2, 2), list[Tensor](), dict[int, Tensor]()
    oracle.image_features(tiny, pixels, vectors, hidden_states=expected)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            tiny.model.image(pixels, LayerPrompts(vectors), observer=found.__setitem__)
        assert list(found) == list(range(layers))
        for layer, states in enumerate(expected):
            assert relative(found[layer], states) < 1e-9
        assert torch.equal(found[1][:, -2:], vectors[1].expand(2, -1, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", BLOCKS)
def test_empty_image_prompts_do_not_change_features(kind: str, dtype: torch.dtype) -> None:
    tiny, pixels, width, layers = image_of(kind)
    tower = tiny.model.image if dtype == torch.float64 else small(kind).model.image
    empty = LayerPrompts(torch.zeros(layers, 0, width, dtype=dtype))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(tower(pixels.to(dtype), empty), tower(pixels.to(dtype)))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("kind", ["vit", "vit-quickgelu", "layerscale", "qk-norm"])
def test_image_gradients_equal_finite_differences(kind: str, read_only: bool) -> None:
    tiny, pixels, width, layers = image_of(kind)
    vectors = vectors_of(width, layers, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: tiny.model.image(pixels[:1], LayerPrompts(v, read_only)), vectors)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_image_features_with_random_prompt_shapes_equal_open_clip_blocks(data: st.DataObject) -> None:
    tiny, pixels, width, layers = image_of(data.draw(st.sampled_from(CLASS_TOKEN)))
    depth, count = data.draw(st.integers(1, layers)), data.draw(st.integers(1, 5))
    read_only = data.draw(st.booleans())
    vectors = vectors_of(width, depth, count, data.draw(st.integers(0, 9)))
    found = tiny.model.image(pixels, LayerPrompts(vectors, read_only))
    assert relative(found, oracle.image_features(tiny, pixels, vectors, read_only)) < 1e-9


def test_unsupported_image_prompts_raise() -> None:
    tiny, pixels, width, layers = image_of("vit")
    for shape in [(1, width), (layers + 1, 2, width), (1, 2, width + 1), (0, 2, width)]:
        with pytest.raises(SelfTPTError, match="must have the shape"):
            tiny.model.image(pixels, LayerPrompts(torch.zeros(shape, dtype=torch.float64)))
    other = small("resnet").model.image
    with pytest.raises(SelfTPTError, match="does not support prompts, tuned LayerNorms, a mask or an observer"):
        other(torch.zeros(1, 3, 64, 64), LayerPrompts(torch.zeros(1, 1, 8)))
    coca, pixels, width, _ = image_of("coca")
    with pytest.raises(SelfTPTError, match="attentional pooling"):
        coca.model.image(pixels, LayerPrompts(vectors_of(width, 1, 1), read_only=True))


# The text tower


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_text_features_with_prompts_equal_open_clip_blocks(kind: str) -> None:
    tiny = small(kind, torch.float64)
    tower = tiny.model.text
    for depth in range(1, tower.layers + 1):
        vectors = vectors_of(tower.width, depth, 2)
        expected = oracle.text_features(tiny, SENTENCES, vectors)
        for chunk in (None, 1, 3):
            found = encode_sentences(tower, ids_of(tiny), chunk, LayerPrompts(vectors))
            assert relative(found, expected) < 1e-9
        assert relative(expected, encode_sentences(tower, ids_of(tiny))) > 1e-3


@pytest.mark.parametrize("kind", PACKED)
def test_read_only_text_prompts_equal_masked_attention(kind: str) -> None:
    tiny = small(kind, torch.float64)
    for depth in (1, tiny.model.text.layers):
        vectors = vectors_of(tiny.model.text.width, depth, 3)
        for chunk in (None, 2):
            found = encode_sentences(tiny.model.text, ids_of(tiny), chunk, LayerPrompts(vectors, read_only=True))
            assert found.shape == (4, 3, tiny.spec.dimension)
            assert relative(found, oracle.text_features(tiny, SENTENCES, vectors, read_only=True)) < 1e-9


@pytest.mark.parametrize("kind", ["vit", "layerscale", "worldwide", "siglip"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_text_encoder_with_prompts_per_layer_and_infix(kind: str, chunk: int | None) -> None:
    """As in MaPLe, two prompt vectors replace "a photo" and are followed by "of a", the name and the full stop."""
    tiny = small(kind, torch.float64)
    names = ["cat", "red kite", "bird on the lake", "dog"]
    tokens = tokenize(names, tiny.model.text.tokenizer, 20)
    encoder = TextEncoder(tiny.model.text, tokens, 2, ("end",), chunk=chunk, infix="of a ")
    vectors = vectors_of(tiny.model.text.width, 2, 2).requires_grad_()
    expected = oracle.text_features(tiny, [f"a photo of a {name}." for name in names], vectors)
    assert relative(encoder(vectors)[0], expected) < 1e-9
    u = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=expected.dtype)
    (gradient,) = torch.autograd.grad(expected, vectors, u, create_graph=True)
    v = vectors_of(tiny.model.text.width, 2, 2, seed=5)
    (hvp,) = torch.autograd.grad((gradient * v).sum(), vectors)
    assert relative(encoder.vjp(vectors.detach(), u[None])[0], gradient) < 1e-9
    assert relative(encoder.hvp(vectors.detach(), u[None], v)[0], hvp) < 1e-9


@pytest.mark.parametrize("kind", PACKED)
def test_prompts_per_layer_in_end_and_front_views(kind: str) -> None:
    tiny = small(kind, torch.float64)
    names = names_of([3, 1, 2])
    tokens = tokenize(names, tiny.model.text.tokenizer, 20)
    depth = tiny.model.text.layers
    vectors = vectors_of(tiny.model.text.width, depth, 2)
    found = TextEncoder(tiny.model.text, tokens, 2)(vectors)
    for i, name in enumerate(names):
        size = len(tiny.encode(name))
        end = oracle.text_features(tiny, [f"a photo {name}."], vectors)
        front = oracle.text_features(tiny, [f"{name} a photo."], vectors, first=size)
        assert relative(found[:2, i], torch.cat([end, front])) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_empty_text_prompts_do_not_change_features(kind: str, dtype: torch.dtype) -> None:
    tower = small(kind, dtype).model.text
    ids = ids_of(small(kind))
    empty = LayerPrompts(torch.zeros(tower.layers, 0, tower.width, dtype=dtype))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(encode_sentences(tower, ids, prompts=empty), encode_sentences(tower, ids))


@pytest.mark.parametrize(
    ("kind", "read_only"),
    [(kind, read_only) for kind in ("vit", "vit-quickgelu", "layerscale", "qk-norm") for read_only in (False, True)]
    + [("siglip", False)],
)
def test_text_gradients_equal_finite_differences(kind: str, read_only: bool) -> None:
    tiny = small(kind, torch.float64)
    vectors = vectors_of(tiny.model.text.width, 2, 1).requires_grad_()
    ids = ids_of(tiny)[:2]
    assert torch.autograd.gradcheck(
        lambda v: encode_sentences(tiny.model.text, ids, prompts=LayerPrompts(v, read_only)), vectors
    )


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_text_features_with_random_prompt_shapes_equal_open_clip_blocks(data: st.DataObject) -> None:
    tiny = small(data.draw(st.sampled_from(["vit", "layerscale", "worldwide", "siglip", "mobileclip"])), torch.float64)
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    sentences = [f"a photo {name}" for name in names_of(sizes)]
    depth, count = data.draw(st.integers(1, tiny.model.text.layers)), data.draw(st.integers(1, 3))
    read_only = tiny.spec.packed and data.draw(st.booleans())
    vectors = vectors_of(tiny.model.text.width, depth, count, data.draw(st.integers(0, 9)))
    prompts = LayerPrompts(vectors, read_only)
    found = encode_sentences(
        tiny.model.text, ids_of(tiny, sentences), data.draw(st.none() | st.integers(1, 4)), prompts
    )
    assert relative(found, oracle.text_features(tiny, sentences, vectors, read_only=read_only)) < 1e-9


def test_text_observer_is_given_packed_rows() -> None:
    tiny = small("vit", torch.float64)
    ids, found = ids_of(tiny), dict[int, Tensor]()
    forward = PackedTextForward(tiny.model.text, [[[-1, *sentence[1:]] for sentence in ids]], False)
    vectors = vectors_of(tiny.model.text.width, 3, 1)
    forward(vectors, found.__setitem__)
    assert list(found) == [0, 1, 2]
    for layer in (1, 2):
        assert torch.equal(found[layer][0], vectors[layer, 0])  # the shared prefix comes first


def test_shared_prefix_includes_common_words_after_the_prompt() -> None:
    tiny = small("vit", torch.float64)
    forward = PackedTextForward(tiny.model.text, [[[-1, -2, *sentence[2:]] for sentence in ids_of(tiny)[:2]]], False)
    assert forward.segments[0].size == 4  # two vectors, "of" and "a"


def test_unsupported_text_prompts_raise() -> None:
    tiny = small("vit", torch.float64)
    tower, ids = tiny.model.text, ids_of(tiny)
    with pytest.raises(SelfTPTError, match="must have the shape"):
        encode_sentences(tower, ids, prompts=LayerPrompts(vectors_of(tower.width, tower.layers + 1, 1)))
    with pytest.raises(SelfTPTError, match="replace the first 9 tokens"):
        encode_sentences(tower, ids, prompts=LayerPrompts(vectors_of(tower.width, 1, 9)))
    other = small("bert", torch.float64)
    with pytest.raises(SelfTPTError, match="1 <= J <= 1"):
        encode_sentences(other.model.text, ids_of(other), prompts=LayerPrompts(vectors_of(32, 2, 1)))
    with pytest.raises(SelfTPTError, match="read-only prompts need a causal text tower"):
        encode_sentences(other.model.text, ids_of(other), prompts=LayerPrompts(vectors_of(32, 1, 1), read_only=True))


# The model


def model_of(kind: str) -> Model:
    return small(kind).model


@pytest.mark.parametrize("kind", SPECS)
def test_encode_text_equals_open_clip(kind: str) -> None:
    tiny = small(kind)
    expected = tiny.clip.encode_text(tiny.tokenizer(SENTENCES, context_length=tiny.context), normalize=False)
    assert relative(tiny.model.encode_text(SENTENCES), expected) < 1e-5
    normalised = tiny.model.encode_text(tuple(SENTENCES), normalize=True)
    assert torch.allclose(normalised.norm(dim=-1), torch.ones(4), atol=1e-6)
    assert tiny.model.encode_text([]).shape == (0, tiny.spec.dimension)


@pytest.mark.parametrize("kind", ["vit", "siglip"])
def test_encode_text_is_differentiable(kind: str) -> None:
    model = model_of(kind)
    vectors = vectors_of(model.text.width, 2, 2).float().requires_grad_()
    features = model.encode_text(SENTENCES, LayerPrompts(vectors))
    (gradient,) = torch.autograd.grad(features.square().sum(), vectors)
    assert (gradient.flatten(1).norm(dim=1) > 0).all()


@pytest.mark.parametrize("kind", SPECS)
def test_encode_image_equals_open_clip(kind: str) -> None:
    tiny = small(kind)
    size = SPECS[kind].vision["image_size"]
    pixels = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    floats = tiny.model.preprocess.normalize(pixels).requires_grad_()
    expected = tiny.clip.encode_image(floats, normalize=False)
    for given_pixels in (pixels, floats):
        assert relative(tiny.model.encode_image(given_pixels), expected) < 1e-5
    found = tiny.model.encode_image(floats, normalize=True)
    assert torch.allclose(found, tiny.model.encode_images(pixels), atol=1e-5)
    u = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    gradients = [torch.autograd.grad(f, floats, u)[0] for f in (tiny.model.encode_image(floats), expected)]
    assert relative(*gradients) < 1e-4


def test_encode_image_with_prompts_is_differentiable() -> None:
    model = model_of("vit")
    vectors = vectors_of(32, 2, 2).float().requires_grad_()
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    features = model.encode_image(pixels, LayerPrompts(vectors))
    assert features.shape == (2, 24)
    (gradient,) = torch.autograd.grad(features.square().sum(), vectors)
    assert (gradient.flatten(1).norm(dim=1) > 0).all()
    assert model.encode_image(pixels, LayerPrompts(vectors, read_only=True)).shape == (2, 2, 24)


def test_invalid_texts_raise() -> None:
    model = model_of("vit")
    for wrong in ("cat", ["cat", 1], [b"cat"]):
        with pytest.raises(SelfTPTError, match="sequence of str"):
            model.encode_text(wrong)  # type: ignore[arg-type]
    with pytest.raises(SelfTPTError, match="too long: it has 80 tokens"):
        model.encode_text([" ".join(["cat"] * 80)])
    with pytest.raises(SelfTPTError, match="special token"):
        model.encode_text(["cat <end_of_text>"])
