"""Small random models of every architecture that open_clip builds.

`small(kind)` returns a model and the facts about it that the reference implementations need. These facts are written
here and not computed by selftpt. The parameters are perturbed, because a new open_clip model has zero biases, unit
LayerNorm weights and almost uniform attention, which would hide mistakes.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import open_clip
import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.model import set_model_preprocess_cfg
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer, get_clean_fn
from open_clip.transform import PreprocessCfg
from torch import Tensor, nn

from selftpt.models import Model, ModelId
from selftpt.models.loading import _digest

# Each of these words is one token in every tokenizer of the small models.
WORDS = (
    "a photo of the in on and cat dog red blue fish bird tree car sun moon star kite lion bear duck frog rose corn "
    "rice soup cake boat ship road hill lake sand snow rain wind"
).split()

CLIP_END = 49407


@dataclass(frozen=True)
class Frame:
    """The special tokens of a tokenizer."""

    start: tuple[int, ...]
    end: int
    pad: int


CLIP_FRAME = Frame((49406,), CLIP_END, 0)


class Pieces:
    """Stub of a Hugging Face tokenizer: one token for each of `WORDS`, and one per letter for other words.

    Args:
        frame: The special tokens around a sentence.
        marks: Texts that become special ids, such as "[SEP]".
        left: Whether padding is on the left.
    """

    def __init__(self, frame: Frame, marks: dict[str, int], left: bool = False) -> None:
        self.frame, self.marks, self.left = frame, marks, left
        self.cls_token_id, self.sep_token_id, self.pad_token_id = 2, frame.end, frame.pad
        self.bos_token_id, self.eos_token_id = 2, frame.end
        self.all_special_ids = sorted({*frame.start, frame.end, frame.pad, *marks.values()})
        pattern = "|".join([*map(re.escape, marks), r"[^\W_]+", r"[^\w\s]|_"])
        self._pattern = re.compile(pattern)

    def ids_without_special_tokens(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pattern.findall(text):
            word = piece.lower()
            if piece in self.marks:
                ids.append(self.marks[piece])
            elif word in WORDS:
                ids.append(10 + WORDS.index(word))
            else:
                ids += [100 + ord(letter) % 800 for letter in word]
        return ids

    def __call__(
        self,
        text: str | list[str],
        add_special_tokens: bool = True,
        return_tensors: str | None = None,
        max_length: int | None = None,
        padding: str | bool = False,
        truncation: bool = False,
    ) -> Any:
        all_ids = []
        for one in [text] if isinstance(text, str) else text:
            ids = self.ids_without_special_tokens(one)
            if add_special_tokens:
                if truncation and max_length:
                    ids = ids[: max_length - len(self.frame.start) - 1]
                ids = [*self.frame.start, *ids, self.frame.end]
            if padding == "max_length":
                fill = [self.frame.pad] * (max_length - len(ids))
                ids = fill + ids if self.left else ids + fill
            all_ids.append(ids)
        if return_tensors == "pt":
            return SimpleNamespace(input_ids=torch.tensor(all_ids))
        found = all_ids[0] if isinstance(text, str) else all_ids
        return _Encoding(input_ids=found)


class _Encoding(SimpleNamespace):
    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


class PiecesTokenizer(HFTokenizer):
    """open_clip's tokenizer wrapper around `Pieces` instead of a tokenizer from the hub."""

    def __init__(
        self, pieces: Pieces, context_length: int, clean: str = "whitespace", strip: bool = False, mode: str = ""
    ) -> None:
        self.tokenizer_mode, self.context_length = mode, context_length
        self.clean_fn, self.strip_sep_token = get_clean_fn(clean), strip
        self.tokenizer = pieces


@dataclass(frozen=True)
class Spec:
    """How to build a small model, and the facts that tests need.

    Attributes:
        vision: `vision_cfg` of open_clip.
        text: `text_cfg` of open_clip; empty for a Hugging Face text encoder.
        packed: Whether the text tower supports the packed forward pass.
        blocks: Whether the image tower runs through the block loop.
        build: Class of the model.
        frame: Special tokens of the tokenizer.
        clean: Text cleaning of the tokenizer; None for CLIP's own tokenizer.
        marks: Texts that become special ids.
        strip: Whether open_clip removes the end token.
        causal: Whether the text tower is causal.
        pool: Pooling of the text tower: the end token, the last position, an extra class token, or the mean.
        preprocess: Differences from open_clip's default preprocessing.
        dimension: Dimension of the features.
        more: Further arguments of `build`.
    """

    vision: dict[str, Any]
    text: dict[str, Any]
    packed: bool
    blocks: bool
    build: Any = open_clip.CLIP
    frame: Frame = CLIP_FRAME
    clean: str | None = None
    marks: dict[str, int] = field(default_factory=dict)
    strip: bool = False
    causal: bool = True
    pool: Literal["end", "last", "class", "mean"] = "end"
    preprocess: dict[str, Any] = field(default_factory=dict)
    dimension: int = 24
    more: dict[str, Any] = field(default_factory=dict)


def _vit(**more: Any) -> dict[str, Any]:
    return {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32, **more}


def _text(**more: Any) -> dict[str, Any]:
    return {"width": 32, "heads": 4, "layers": 2, **more}


_BERT_FRAME = Frame((2,), 3, 0)
_BERT_MARKS = {"[CLS]": 2, "[SEP]": 3, "[PAD]": 0}
_EXTRAS = dict.fromkeys(("qk_norm", "scale_heads", "scale_attn_inner", "scale_attn", "scale_fc"), True)
_FEW = {"vocab_size": 1000}

SPECS: dict[str, Spec] = {
    "vit": Spec(_vit(), _text(layers=3), True, True),
    "vit-quickgelu": Spec(_vit(layers=3), _text(), True, True, more={"quick_gelu": True}),
    "resnet": Spec({"layers": (1, 1, 1, 1), "width": 8, "image_size": 64}, _text(), True, False),
    "custom-text": Spec(
        {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None, "image_size": 160},
        _text(width=48, heads=6, proj_bias=True),
        True,
        False,
        open_clip.CustomTextCLIP,
        preprocess={"interpolation": "bilinear"},
    ),
    "layerscale": Spec(
        _vit(ls_init_value=0.5, no_ln_pre=True, final_ln_after_pool=True),
        _text(width=24, heads=3, layers=4, context_length=32, ls_init_value=0.5),
        True,
        True,
    ),
    "qk-norm": Spec(_vit(**_EXTRAS), _text(**_EXTRAS, proj_type="none"), True, True, dimension=32),
    "one-layer": Spec(_vit(layers=1), _text(layers=1, mlp_ratio=2.0), True, True),
    # Like the worldwide models: no start token, and an end token that is not the highest id.
    "worldwide": Spec(
        _vit(pool_type="avg"),
        _text(**_FEW, pool_type="eos", eos_id=1),
        True,
        True,
        frame=Frame((), 1, 0),
        clean="canonicalize",
    ),
    "unused-vocabulary": Spec(_vit(pos_embed_type="sin_cos_2d"), _text(vocab_size=49412), False, True),
    "mobileclip": Spec(
        {"timm_model_name": "fastvit_t8", "timm_pool": "avg", "timm_proj": None, "image_size": 64},
        _text(no_causal_mask=True),
        False,
        False,
        open_clip.CustomTextCLIP,
        causal=False,
    ),
    "siglip": Spec(
        {"timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none", "image_size": 160},
        _text(
            **_FEW,
            context_length=64,
            no_causal_mask=True,
            proj_bias=True,
            pool_type="last",
            norm_kwargs={"eps": 1e-6},
            act_kwargs={"approximate": "tanh"},
        ),
        False,
        False,
        open_clip.CustomTextCLIP,
        Frame((), 1, 1),
        "canonicalize",
        causal=False,
        pool="last",
        preprocess={"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "squash"},
        dimension=64,
        more={"init_logit_bias": -10.0},
    ),
    # Like CLIPA: the tokenizer of BERT without [SEP].
    "clipa": Spec(
        _vit(pool_type="avg", final_ln_after_pool=True),
        _text(**_FEW, context_length=32, no_causal_mask=True, pool_type="last"),
        False,
        True,
        frame=Frame((2,), 0, 0),
        clean="whitespace",
        marks=_BERT_MARKS,
        strip=True,
        causal=False,
        pool="last",
    ),
    "coca": Spec(
        _vit(attentional_pool=True, attn_pooler_heads=4, attn_pooler_queries=5, output_tokens=True),
        _text(context_length=76, embed_cls=True, output_tokens=True),
        False,
        True,
        open_clip.CoCa,
        pool="class",
        more={"multimodal_cfg": {"context_length": 76, "width": 32, "heads": 4, "layers": 1, "vocab_size": 50}},
    ),
    "bert": Spec(
        _vit(), {}, False, True, open_clip.CustomTextCLIP, _BERT_FRAME, "whitespace", _BERT_MARKS, False, False, "mean"
    ),
    "roberta": Spec(
        _vit(),
        {},
        False,
        True,
        open_clip.CustomTextCLIP,
        Frame((2,), 3, 1),
        "whitespace",
        {"<s>": 2, "</s>": 3, "<pad>": 1},
        causal=False,
        pool="mean",
    ),
}
KINDS = tuple(SPECS)
PACKED = tuple(kind for kind, spec in SPECS.items() if spec.packed)
REFERENCE = tuple(kind for kind, spec in SPECS.items() if not spec.packed)
BLOCKS = tuple(kind for kind, spec in SPECS.items() if spec.blocks)


@dataclass(frozen=True)
class Small:
    """A small model with the open_clip model and tokenizer that it wraps."""

    kind: str
    spec: Spec
    clip: Any
    tokenizer: Any
    model: Model

    @property
    def text(self) -> Any:
        """The module that holds the text tower."""
        return self.clip if isinstance(self.clip, open_clip.CLIP) else self.clip.text

    @property
    def embedding(self) -> Tensor:
        is_hf = isinstance(self.text, HFTextEncoder)
        table = self.text.transformer.embeddings.word_embeddings if is_hf else self.text.token_embedding
        return table.weight.detach()

    @property
    def context(self) -> int:
        return self.tokenizer.context_length

    def encode(self, text: str) -> list[int]:
        """Return token ids without special tokens, from the output of open_clip's tokenizer."""
        sentence = self.tokenizer([text], context_length=self.context + 20)[0].tolist()
        ids = sentence[len(self.spec.frame.start) :]
        return ids[: ids.index(self.spec.frame.end)]

    def max_tokens(self, length: int) -> int:
        """Return the maximum number of tokens of a name in a sentence with `length` other tokens and a full stop."""
        return self.context - len(self.spec.frame.start) - 1 - length - len(self.encode("."))


@functools.cache
def small(kind: str, dtype: torch.dtype = torch.float32) -> Small:
    """Return the small model of a kind; float32 and float64 have separate copies of the same parameters."""
    spec = SPECS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(kind.encode()))
        clip = _build(kind, spec)
    perturb(clip, torch.Generator().manual_seed(zlib.crc32(kind.encode()) + 1))
    preprocess = {**asdict(PreprocessCfg(size=spec.vision["image_size"])), **spec.preprocess}
    set_model_preprocess_cfg(clip, preprocess)
    context = spec.text.get("context_length", 77)
    tokenizer = (
        SimpleTokenizer(context_length=context)
        if spec.clean is None
        else PiecesTokenizer(Pieces(_inner_frame(spec), spec.marks), context, spec.clean, spec.strip)
    )
    id = ModelId(kind, "random", _digest(clip, preprocess))
    model = Model(clip.to(dtype), tokenizer, id, spec.dimension, "cpu", "fp32")
    return Small(kind, spec, clip, tokenizer, model)


def model(kind: str = "vit") -> Model:
    """Return the `Model` of a small model."""
    return small(kind).model


def _inner_frame(spec: Spec) -> Frame:
    """Return the special tokens of the inner tokenizer, before open_clip removes the end token."""
    return _BERT_FRAME if spec.strip else spec.frame


def _build(kind: str, spec: Spec) -> nn.Module:
    if spec.text:
        clip: nn.Module = spec.build(
            embed_dim=spec.dimension, vision_cfg=dict(spec.vision), text_cfg=dict(spec.text), **spec.more
        )
        return clip
    import transformers

    config_class = transformers.BertConfig if kind == "bert" else transformers.RobertaConfig
    config = config_class(
        vocab_size=1000,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=80,
        pad_token_id=spec.frame.pad,
        bos_token_id=2,
        eos_token_id=3,
    )
    clip = spec.build(embed_dim=spec.dimension, vision_cfg=dict(spec.vision), text_cfg=_text(**_FEW, layers=1))
    clip.text = HFTextEncoder("", spec.dimension, config, "mean_pooler", "mlp")
    return clip


@torch.no_grad()
def perturb(clip: nn.Module, generator: torch.Generator) -> None:
    """Add noise to every parameter and to the statistics of batch norms, in place."""
    for name, parameter in clip.named_parameters():
        if "logit" not in name:
            size = 0.5 if "embed" in name else 0.02 if parameter.ndim == 4 else 0.15
            parameter += size * torch.randn(parameter.shape, generator=generator)
    for name, buffer in clip.named_buffers():
        if name.endswith("running_mean"):
            buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
        elif name.endswith("running_var"):
            buffer *= 0.5 + torch.rand(buffer.shape, generator=generator)


def name_of(tokens: int, seed: int = 0) -> str:
    """Return a name with the given number of tokens."""
    return " ".join(WORDS[(seed * 7 + 5 * k + k * k) % len(WORDS)] for k in range(tokens))


def names_of(sizes: Sequence[int]) -> list[str]:
    """Return one name per size, with that number of tokens."""
    return [name_of(size, seed) for seed, size in enumerate(sizes)]


def random_prompt(small: Small, length: int, seed: int = 0) -> Tensor:
    """Return random prompt vectors [length, d] with about the norm of word embeddings."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(length, small.embedding.shape[1], generator=generator)
    return (0.5 * vectors).to(small.embedding.dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected tensor, in float64."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    size = expected.norm().item()
    return (found - expected).norm().item() / (size if size > 0 else 1.0)
