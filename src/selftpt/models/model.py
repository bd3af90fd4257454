"""A frozen vision-language model: two towers, tokenizer, preprocessing and temperature."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.data.transforms import Preprocess
from selftpt.errors import SelfTPTError
from selftpt.models.blocks import LayerPrompts
from selftpt.models.image import ImageTower
from selftpt.models.text import TextTower, encode_sentences
from selftpt.models.tokenizer import Tokenizer

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RANDOM = "random"
TEXT_CHUNK = 256  # number of sentences encoded at once


@dataclass(frozen=True)
class ModelId:
    """Identifies a model in files and messages.

    Attributes:
        name: The name of an open_clip model or of the embedded model, a repository, or a folder.
        pretrained: The name of the weights; None if `name` determines them.
        digest: A digest of architecture and weights.
    """

    name: str
    pretrained: str | None
    digest: str

    @property
    def random_init(self) -> bool:
        """Whether the weights are randomly initialised, so that predictions are meaningless."""
        return self.pretrained == RANDOM

    def __str__(self) -> str:
        return f"{self.name} ({self.pretrained})" if self.pretrained else self.name

    def check(self, model: Model, what: str) -> None:
        """Check that a model is this model.

        Args:
            model: The model to check.
            what: What was made with this model, for the error message.

        Raises:
            SelfTPTError: `model` is another model.
        """
        if self.digest != model.id.digest:
            raise SelfTPTError(
                f"{what} was made with {self} [{self.digest[:8]}], not with {model.id} [{model.id.digest[:8]}]: "
                "load that model, or learn a prompt for this one"
            )


class Model:
    """A frozen vision-language model, which `load_model` returns.

    Attributes:
        clip: The open_clip model.
        id: Its name, pretrained weights and digest.
        text: Its text tower.
        image: Its image tower.
        dimension: Dimension D of the features.
        scale: CLIP's logit scale, 1 / τ of Eq. 1.
        device: The device of the weights.
        precision: The precision of the image tower.
        preprocess: The preprocessing of images.
        encoded: The number of views that `selftpt.data.features.FeatureProvider` has encoded with this model.
    """

    def __init__(self, clip: Any, tokenizer: Any, id: ModelId, dimension: int, device: str, precision: str) -> None:
        clip = clip.eval().requires_grad_(False).to(device)
        clip.visual.to(PRECISIONS[precision])
        self.clip, self.id, self.dimension = clip, id, dimension
        self.device, self.precision = torch.device(device), precision
        self.text = TextTower(clip, Tokenizer(tokenizer, tokenizer.context_length))
        self.image = ImageTower(clip.visual)
        self.scale = float(clip.logit_scale.exp())
        self.preprocess = Preprocess.from_config(clip.visual.preprocess_cfg)
        self.encoded = 0
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"Model({self.id}, dimension={self.dimension}, device={self.device}, precision={self.precision})"

    def to(self, device: str | torch.device) -> Model:
        """Copy the model to a device.

        Like `torch.Tensor.to`, this leaves the model itself unchanged, because other threads may use it.

        Args:
            device: `"cpu"`, `"cuda"`, `"mps"` or a `torch.device`.

        Returns:
            A copy on the device; the model itself if it is already there.

        Raises:
            SelfTPTError: The device is not available.

        Example:
            >>> import selftpt
            >>> model = selftpt.load_model(device="cpu")
            >>> model.to("cpu") is model
            True
        """
        if check_device(device) == check_device(self.device):
            return self
        clip = copy.deepcopy(self.clip)
        return Model(clip, self._tokenizer, self.id, self.dimension, str(device), self.precision)

    def encode_image(self, pixels: Tensor, prompts: LayerPrompts | None = None, *, normalize: bool = False) -> Tensor:
        """Encode images. The features are differentiable w.r.t. float pixels and prompts.

        Args:
            pixels: [B, 3, S, S], uint8 or already normalised floats.
            prompts: n prompt vectors per layer, for an open_clip ViT.
            normalize: Whether the features are L2-normalised.

        Returns:
            Features [B, D] in fp32; [B, n, D] if the prompts are read-only.

        Raises:
            SelfTPTError: The image tower does not support prompts, or they have the wrong shape.

        Example:
            >>> import torch, selftpt
            >>> model = selftpt.load_model(device="cpu")
            >>> height, width = model.preprocess.size
            >>> pixels = torch.zeros(1, 3, height, width, dtype=torch.uint8)
            >>> model.encode_image(pixels).shape == (1, model.dimension)
            True
        """
        pixels = self.preprocess.normalize(pixels.to(self.device)).to(self.image.dtype)
        features = self.image(pixels, _to(prompts, self.device)).float()
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(
        self, texts: Sequence[str], prompts: LayerPrompts | None = None, *, normalize: bool = False
    ) -> Tensor:
        """Encode sentences. The features are differentiable w.r.t. prompts.

        Args:
            texts: N sentences.
            prompts: n prompt vectors per layer, which replace the first n tokens of each sentence; read-only prompts
                are appended after the end-of-text token.
            normalize: Whether the features are L2-normalised.

        Returns:
            Features [N, D] in fp32; [N, n, D] if the prompts are read-only.

        Raises:
            SelfTPTError: `texts` is not a sequence of strings, a text is too long for the model or contains a special
                token, or the prompts do not fit the text tower or a text.

        Example:
            >>> import selftpt
            >>> model = selftpt.load_model(device="cpu")
            >>> model.encode_text(["a photo of a cat.", "a photo of a dog."]).shape == (2, model.dimension)
            True
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise SelfTPTError("texts must be a sequence of str, such as a list")
        if not texts:
            return torch.empty(0, self.dimension, device=self.device)
        sentences = [self.text.tokenizer.encode_sentence(text) for text in texts]
        chunk = TEXT_CHUNK if prompts is None else None  # without prompts there is no graph
        features = encode_sentences(self.text, sentences, chunk, _to(prompts, self.device)).float()
        return F.normalize(features, dim=-1) if normalize else features

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Encode images without an autograd graph.

        Args:
            pixels: [B, 3, S, S], uint8 or already normalised floats.

        Returns:
            L2-normalised features [B, D] in fp32. They are not an inference tensor, so autograd accepts them.
        """
        with torch.inference_mode():
            features = self.encode_image(pixels, normalize=True)
        with torch.inference_mode(False):
            return features.clone()


def check_device(device: str | torch.device) -> torch.device:
    """Return the device, with its index, if it is available.

    Raises:
        SelfTPTError: The device is not available.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        usable = " or ".join(["cpu", *(name for name, found in available.items() if found)])
        raise SelfTPTError(f"the device {str(device)!r} cannot be used here: choose {usable}") from error


def _to(prompts: LayerPrompts | None, device: torch.device) -> LayerPrompts | None:
    return None if prompts is None else dataclasses.replace(prompts, vectors=prompts.vectors.to(device))
