"""DiffTPT: TPT that also uses variations of the image that a diffusion model generated."""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from selftpt.config import setting
from selftpt.data.decoding import ImageError, ImageInput, open_image
from selftpt.data.sources import images_in
from selftpt.data.transforms import Preprocess
from selftpt.data.views import MAX_MEGAPIXELS, FileFingerprint, LazyImage, ViewSpec, fingerprint
from selftpt.errors import SelfTPTError
from selftpt.files import cache_folder, digest, write_atomically
from selftpt.methods import tpt
from selftpt.methods.method import FittedMethod, Method, always
from selftpt.methods.self_tpt import PROMPT_TENSORS, learn_config, train
from selftpt.models import Model, best_device

AUTHORS_MODEL = "lambdalabs/sd-image-variations-diffusers@v2.0"
GROUP = 4  # images that the diffusion model generates at once


@dataclass(frozen=True)
class DiffusionConfig(tpt.TuneConfig):
    """TPT's configuration with DiffTPT's values, and where generated images come from."""

    confidence_ratio: float = setting(
        0.3, "share of the views near the image that is tuned on, the most confident ones"
    )
    steps: int = setting(4, "steps of AdamW")
    near: float = setting(
        0.8, "share of the views that is considered, those with logits most like the image's", above=0, maximum=1
    )
    generated: str = setting("", "folder of generated images", local=True)
    diffusion: str = setting("", f"diffusion model that generates missing images, such as {AUTHORS_MODEL}", local=True)
    guidance: float = setting(3.0, "guidance scale of the diffusion model", minimum=0)
    denoising: int = setting(50, "denoising steps of the diffusion model", above=0)


@dataclass(frozen=True)
class DiffTptConfig(DiffusionConfig, tpt.TptConfig):
    """DiffTPT from the embeddings of words."""


@dataclass(frozen=True)
class CoopDiffTptConfig(DiffusionConfig, tpt.CoopTptConfig):
    """DiffTPT from the prompt that `coop` learns."""


@dataclass(frozen=True)
class Generated(ViewSpec):
    """`crops` generated variations of an image, in FOLDER/<name of the image's folder>/<name of the image>/.

    Attributes:
        folder: The folder of generated images; an empty string is a folder in the cache.
        diffusion: The model that generates missing ones, or an empty string.
        guidance: Its guidance scale.
        denoising: Its denoising steps.
    """

    folder: str = ""
    diffusion: str = ""
    guidance: float = 3.0
    denoising: int = 50

    @property
    def key(self) -> tuple[object, ...]:
        how = (self.diffusion, self.guidance, self.denoising) if self.diffusion else ()
        return *super().key, "generated", str(Path(self.folder).absolute()) if self.folder else "", *how

    def __str__(self) -> str:
        return f"{self.crops} generated images in {self.folder or 'the cache'}"

    def place(self, path: Path) -> Path:
        """The folder of the variations of an image."""
        how = digest(self.diffusion, self.guidance, self.denoising)
        folder = Path(self.folder) if self.folder else cache_folder() / "generated" / how
        return folder / path.absolute().parent.name / path.name

    def fingerprint(self, source: ImageInput) -> FileFingerprint | None:
        """Also of the generated images, unless the specification itself says how they are generated."""
        own = super().fingerprint(source)
        if self.diffusion or not isinstance(source, str | os.PathLike) or own is None:
            return own
        return *own, digest([fingerprint(file) for file in _generated(self.place(Path(source)))])

    def make_views(self, preprocess: Preprocess, image: LazyImage, only: int | None = None) -> Tensor:
        if not isinstance(image.source, str | os.PathLike):
            raise ImageError("DiffTPT finds generated images by the path of an image: give paths")
        path = Path(image.source)
        if self.diffusion and len(_generated(self.place(path))) < self.crops:
            self._generate(path, image)
        found = _generated(self.place(path))[: self.crops]
        if len(found) < self.crops:
            raise ImageError(
                f"{path}: {self.place(path)} has {len(found)} of {self.crops} generated images: put them there, "
                f"or generate them with diffusion={AUTHORS_MODEL}"
            )
        chosen = found if only is None else [found[only]]
        return torch.stack([preprocess(open_image(file, self.max_megapixels)) for file in chosen])

    def _generate(self, path: Path, image: LazyImage) -> None:
        """Generate the missing variations; each has its own seed, and the groups are always the same."""
        decoded, place = image.decode(self.max_megapixels), self.place(path)
        for start in range(0, self.crops, GROUP):
            files = {i: place / f"{i:03d}.png" for i in range(start, min(start + GROUP, self.crops))}
            if all(file.exists() for file in files.values()):
                continue
            seeds = [int(digest(*path.absolute().parts[-2:], i)[:15], 16) for i in files]
            with _LOCK:
                made = _variations(_pipeline(self.diffusion), decoded, seeds, self.guidance, self.denoising)
            for file, one in zip(files.values(), made, strict=True):
                if not file.exists():
                    content = io.BytesIO()
                    one.save(content, "png")
                    write_atomically(file, content.getvalue())


_LOCK = threading.Lock()  # views are made in threads, and there is one diffusion model


@functools.lru_cache(maxsize=1)
def _pipeline(name: str) -> Any:
    """The image-variation model of a local folder, or of a hub's NAME or NAME@REVISION."""
    try:
        from diffusers import StableDiffusionImageVariationPipeline
    except ImportError as error:
        raise SelfTPTError("generating images needs diffusers: pip install 'selftpt[diffusion]'") from error
    place, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
    try:
        pipeline = StableDiffusionImageVariationPipeline.from_pretrained(
            place, revision=revision or None, safety_checker=None, requires_safety_checker=False
        )
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0][:100]
        raise SelfTPTError(
            f"cannot load the diffusion model {name}: check the connection, or fetch it on another machine and "
            f"give its folder ({why})"
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(best_device())


def _variations(
    pipeline: Any, image: Image.Image, seeds: Sequence[int], guidance: float, denoising: int
) -> list[Image.Image]:
    """One variation of an image per seed. The model sees the image squeezed to a square, as in the authors' code."""
    extractor, size = pipeline.feature_extractor, pipeline.image_encoder.config.image_size
    pixels = F.interpolate(pil_to_tensor(image)[None].float() / 255, (size, size), mode="bicubic")
    mean, std = (torch.tensor(values)[:, None, None] for values in (extractor.image_mean, extractor.image_std))
    made: list[Image.Image] = pipeline(
        (pixels - mean) / std,
        guidance_scale=guidance,
        num_inference_steps=denoising,
        num_images_per_prompt=len(seeds),
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images
    return made


def _generated(folder: Path) -> list[Path]:
    return images_in(folder) if folder.is_dir() else []


def near_and_confident(logits: Tensor, near: float, confidence_ratio: float) -> Tensor:
    """Indices [K] of the views that are tuned on, from logits [V, C], of which the first are the image's own.

    First the share `near` of the views whose logits have the largest cosine with the image's is kept; of these and the
    image itself, the share with the lowest entropy.
    """
    alike = F.cosine_similarity(logits[:1], logits[1:], dim=-1)
    others = 1 + alike.argsort(descending=True, stable=True)[: int(len(alike) * near)]
    kept = torch.cat([others.new_zeros(1), others])
    return kept[tpt.most_confident(logits[kept], confidence_ratio)]


def tuner(model: Model, names: Sequence[str], prompt: Tensor, config: DiffusionConfig) -> tpt.Tuner:
    """A tuner with DiffTPT's selection and TPT's loss."""

    def select(logits: Tensor) -> Tensor:
        return near_and_confident(logits, config.near, config.confidence_ratio)

    def loss(logits: Tensor, _vectors: Tensor) -> Tensor:
        return tpt.mean_entropy(logits)

    return tpt.Tuner(model, names, prompt, config, select, loss)


def predictor(fitted: FittedMethod, names: Sequence[str], _template: str) -> tpt.Tuner:
    """DiffTPT from the embeddings of words."""
    return tuner(fitted.model, names, fitted.model.text.embed_words(fitted.config.words), fitted.config)


def predictor_from_coop(fitted: FittedMethod, names: Sequence[str], _template: str) -> tpt.Tuner:
    """DiffTPT from the prompt of CoOp."""
    return tuner(fitted.model, names, fitted.tensors["context"], fitted.config)


def check_generated(config: DiffusionConfig) -> dict[str, Any]:
    """Refuse a configuration that does not say where generated images come from; there is no other data."""
    if not config.generated and not config.diffusion:
        raise SelfTPTError(
            f"DiffTPT needs generated images: set generated to a folder of them, or diffusion={AUTHORS_MODEL} "
            "to generate them"
        )
    return {}


def views(config: DiffusionConfig) -> list[ViewSpec]:
    """TPT's views, and as many generated images as crops."""
    if config.views == 1:
        return tpt.views(config)
    made_by = config.diffusion, config.guidance, config.denoising
    return [*tpt.views(config), Generated(config.views - 1, None, MAX_MEGAPIXELS, False, config.generated, *made_by)]


DIFFTPT = Method(
    "difftpt",
    DiffTptConfig(),
    predictor,
    data=check_generated,
    views=views,
    inputs="views",
    more_cost=tpt.cost,
)
COOP_DIFFTPT = Method(
    "coop+difftpt",
    CoopDiffTptConfig(),
    predictor_from_coop,
    train,
    learn_config,
    check_generated,
    views,
    "views",
    tensors=PROMPT_TENSORS,
    uses_protocol_epochs=always,
    more_cost=tpt.cost,
)
