"""DiffTPT: TPT that also looks at pictures which a diffusion model made of the picture."""

from __future__ import annotations

import functools
import io
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
from selftpt.data.decoding import ImageError, open_image
from selftpt.data.features import Stamp, ViewSpec, stamp
from selftpt.data.sources import images_in
from selftpt.data.transforms import Preprocess
from selftpt.errors import SelfTPTError
from selftpt.files import cache_folder, digest, write_whole
from selftpt.methods import tpt
from selftpt.methods.method import Fitted, Job, Method
from selftpt.models import best_device

AUTHORS_MODEL = "lambdalabs/sd-image-variations-diffusers@v2.0"
GROUP = 4  # pictures that the diffusion model makes at once


@dataclass(frozen=True)
class DiffusionConfig(tpt.TuneConfig):
    """TPT's settings with DiffTPT's values, and where generated pictures come from."""

    confident: float = setting(0.3, "share of the views near the picture that is tuned on, the most confident ones")
    steps: int = setting(4, "steps of AdamW")
    near: float = setting(
        0.8, "share of the views that is looked at further, those with logits most like the picture's"
    )
    generated: str = setting("", "folder of generated pictures")
    diffusion: str = setting("", f"diffusion model that makes those that are missing, such as {AUTHORS_MODEL}")
    guidance: float = setting(3.0, "guidance of the diffusion model")
    denoising: int = setting(50, "denoising steps of the diffusion model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.near <= 1:
            raise SelfTPTError(f"near is a share of the views, above 0 and at most 1, not {self.near}")
        if not self.guidance >= 0:
            raise SelfTPTError(f"guidance must be 0 or more, not {self.guidance}")
        if not self.denoising > 0:
            raise SelfTPTError(f"denoising must be above 0, not {self.denoising}")


@dataclass(frozen=True)
class Settings(DiffusionConfig, tpt.Settings):
    """From words."""


@dataclass(frozen=True)
class LearnedSettings(DiffusionConfig, tpt.LearnedSettings):
    """From the prompt that `coop` learns."""


@dataclass(frozen=True)
class Generated(ViewSpec):
    """`crops` pictures made of a picture, in FOLDER/<name of the picture's folder>/<name of the picture>/.

    diffusion: the model that makes those that are missing, or none.
    """

    folder: str = ""
    diffusion: str = ""
    guidance: float = 3.0
    denoising: int = 50

    @property
    def key(self) -> tuple[object, ...]:
        making = (self.diffusion, self.guidance, self.denoising) if self.diffusion else ()
        return *super().key, "generated", str(Path(self.folder).absolute()), *making

    def __str__(self) -> str:
        return f"{self.crops} generated pictures of {self.folder}"

    def place(self, path: Path) -> Path:
        """The folder of what is made of a picture."""
        return Path(self.folder, path.absolute().parent.name, path.name)

    def stamp(self, path: Path) -> Stamp:
        """Others where the picture's generated ones have changed, unless the look itself says how they are made."""
        if self.diffusion:
            return super().stamp(path)
        return *super().stamp(path), digest([stamp(made) for made in _pictures(self.place(path))])

    def cut(self, preprocess: Preprocess, path: Path, only: int | None = None) -> Tensor | ImageError:
        try:
            if self.diffusion and len(_pictures(self.place(path))) < self.crops:
                self._make(path)
            found = _pictures(self.place(path))[: self.crops]
            if len(found) < self.crops:
                return ImageError(
                    f"{path}: {self.place(path)} has {len(found)} generated pictures of {self.crops}: put them there, "
                    f"or have them made by diffusion={AUTHORS_MODEL}"
                )
            chosen = found if only is None else [found[only]]
            return torch.stack([preprocess(open_image(made, self.max_megapixels)) for made in chosen])
        except ImageError as error:
            return error

    def _make(self, path: Path) -> None:
        """Make the pictures that are missing; each has a seed of its own, and groups are always the same."""
        picture, place = open_image(path, self.max_megapixels), self.place(path)
        for start in range(0, self.crops, GROUP):
            files = {i: place / f"{i:03d}.png" for i in range(start, min(start + GROUP, self.crops))}
            if all(file.exists() for file in files.values()):
                continue
            seeds = [int(digest(*path.absolute().parts[-2:], i)[:15], 16) for i in files]
            with _LOCK:
                made = _variations(_pipeline(self.diffusion), picture, seeds, self.guidance, self.denoising)
            for file, one in zip(files.values(), made, strict=True):
                if not file.exists():
                    content = io.BytesIO()
                    one.save(content, "png")
                    write_whole(file, content.getvalue())


_LOCK = threading.Lock()  # looks are cut in threads, and there is one diffusion model


@functools.lru_cache(maxsize=1)
def _pipeline(name: str) -> Any:
    """The image-variation model of a local folder, or of a hub's NAME or NAME@REVISION."""
    try:
        from diffusers import StableDiffusionImageVariationPipeline
    except ImportError as error:
        raise SelfTPTError("making pictures needs diffusers: pip install 'selftpt[diffusion]'") from error
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
    pipeline: Any, picture: Image.Image, seeds: Sequence[int], guidance: float, denoising: int
) -> list[Image.Image]:
    """A variation of a picture for each seed. It is shown to the model squeezed to a square, as by the authors."""
    extractor, size = pipeline.feature_extractor, pipeline.image_encoder.config.image_size
    pixels = F.interpolate(pil_to_tensor(picture)[None].float() / 255, (size, size), mode="bicubic")
    mean, std = (torch.tensor(values)[:, None, None] for values in (extractor.image_mean, extractor.image_std))
    made: list[Image.Image] = pipeline(
        (pixels - mean) / std,
        guidance_scale=guidance,
        num_inference_steps=denoising,
        num_images_per_prompt=len(seeds),
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images
    return made


def _pictures(folder: Path) -> list[Path]:
    return images_in(folder) if folder.is_dir() else []


def near_and_confident(logits: Tensor, near: float, confident: float) -> Tensor:
    """Of views with logits [V, C], the first the picture's own: the indices [K] of those that are tuned on.

    First the share `near` whose logits have the largest cosine with the picture's; of these and the picture itself, the
    share of least entropy.
    """
    alike = F.cosine_similarity(logits[:1], logits[1:], dim=-1)
    others = 1 + alike.argsort(descending=True, stable=True)[: int(len(alike) * near)]
    kept = torch.cat([others.new_zeros(1), others])
    return kept[tpt.most_confident(logits[kept], confident)]


def tuner(job: Job, prompt: Tensor, config: DiffusionConfig) -> Fitted:
    """DiffTPT proper."""
    return lambda names, _template: tpt.Tuner(
        job.model,
        names,
        prompt,
        config,
        lambda logits: near_and_confident(logits, config.near, config.confident),
        lambda logits, _vectors: tpt.mean_entropy(logits),
    )


def fit(job: Job, settings: Settings) -> Fitted:
    """From words."""
    _check(settings)
    return tuner(job, job.model.text.words(settings.words), settings)


def fit_learned(job: Job, settings: LearnedSettings) -> Fitted:
    """From the prompt of CoOp."""
    _check(settings)
    return tuner(job, job.prompt(settings.learn).context, settings)


def _check(config: DiffusionConfig) -> None:
    if not config.generated and not config.diffusion:
        raise SelfTPTError(
            f"DiffTPT looks at generated pictures: set generated to a folder of them, or diffusion={AUTHORS_MODEL} "
            "to have them made"
        )


def looks(settings: DiffusionConfig) -> list[ViewSpec]:
    """TPT's, and as many generated pictures as crops."""
    if settings.views == 1:
        return tpt.looks(settings)
    made_by = settings.diffusion, settings.guidance, settings.denoising
    folder = settings.generated or str(cache_folder() / "generated" / digest(*made_by))
    return [*tpt.looks(settings), Generated(settings.views - 1, None, ViewSpec.max_megapixels, False, folder, *made_by)]


REFERENCE = "Feng et al., ICCV 2023"
COST, NEEDS = "127 views, 4 steps", "features of views, generated pictures"
DIFFTPT = Method("difftpt", "tpt with generated pictures", REFERENCE, Settings(), fit, COST, NEEDS, looks)
COOP_DIFFTPT = Method(
    "coop+difftpt",
    "difftpt from the prompt of coop",
    REFERENCE,
    LearnedSettings(),
    fit_learned,
    COST,
    NEEDS,
    looks,
    papers_epochs=lambda _settings: True,
)
