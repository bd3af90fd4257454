"""A frozen vision-language model: two towers, tokenizer, preprocessing, temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selftpt.data.transforms import Preprocess
from selftpt.errors import SelfTPTError
from selftpt.models.image import ImageTower
from selftpt.models.text import TextTower
from selftpt.models.tokenizer import Tokenizer

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RANDOM = "random"


@dataclass(frozen=True)
class ModelId:
    """Which model a file was made with. `digest` tells weights and architecture; random weights mean nothing."""

    name: str
    pretrained: str | None
    digest: str

    @property
    def meaningless(self) -> bool:
        return self.pretrained == RANDOM

    def __str__(self) -> str:
        return f"{self.name} ({self.pretrained})" if self.pretrained else self.name

    def check(self, model: Model, what: str) -> None:
        """Refuse to use `what`, which was made with this model, with another one."""
        if self.digest != model.id.digest:
            raise SelfTPTError(
                f"{what} was made with {self} [{self.digest[:8]}], not with {model.id} [{model.id.digest[:8]}]: "
                "load that model, or learn a prompt for this one"
            )


class Model:
    """A frozen model: `text` and `image` are its towers, `dimension` that of their features, `scale` 1 / τ of Eq. 1.

    encoded: how many pictures and views have passed the image tower to be kept (`selftpt.data.features`).
    """

    def __init__(self, clip: Any, tokenizer: Any, id: ModelId, dimension: int, device: str, precision: str) -> None:
        clip = clip.eval().requires_grad_(False).to(device)
        clip.visual.to(PRECISIONS[precision])
        self.id, self.dimension = id, dimension
        self.device, self.precision = torch.device(device), precision
        self.text = TextTower(clip, Tokenizer(tokenizer, tokenizer.context_length))
        self.image = ImageTower(clip)
        self.scale = float(clip.logit_scale.exp())
        self.preprocess = Preprocess.of(clip.visual.preprocess_cfg)
        self.encoded = 0

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Pictures [B, 3, S, S], uint8 or already normalised floats, to unit features [B, D] in fp32."""
        with torch.inference_mode():
            pixels = self.preprocess.normalize(pixels.to(self.device)).to(PRECISIONS[self.precision])
            features = F.normalize(self.image(pixels).float(), dim=-1)
        return features.clone()  # outside, so that autograd may use it
