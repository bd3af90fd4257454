"""The table of methods: Self-TPT and the methods it is compared with, one module each.

`METHODS` imports the module of a method when the method is first used. Names and descriptions are plain data, so
listing the methods does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from selftpt.methods.method import FitContext, FittedMethod, Method, Predictor

__all__ = ["METHODS", "FitContext", "FittedMethod", "Method", "MethodInfo", "MethodTable", "Predictor"]

Inputs = Literal["features", "views", "pixels"]  # features of the image, features of several views of it, or pixels
Requirement = Literal["any", "transformer image tower"]


@dataclass(frozen=True)
class MethodInfo:
    """A row of the table of methods: the location of a method, and what `selftpt methods` prints about it.

    `inputs`, `needs_labels`, `transductive`, `stochastic`, `requires` and `cost` must equal those of the `Method`
    object with its default configuration. A test checks this.

    Attributes:
        location: `module:NAME` of the `Method` object. A module without a dot is a module of `selftpt.methods`.
        summary: What the method does, in a few words.
        reference: The publication.
        inputs: The input for each image: features of the image, features of several views, or pixels.
        needs_labels: Whether the method learns from labelled images.
        transductive: Whether the method adapts to all test images at once.
        stochastic: Whether the result depends on a seed.
        requires: The kind of image tower that the method needs.
        cost: The computation for each image, in words.
        also_needs: What the method needs besides images and labels, in words.
    """

    location: str
    summary: str
    reference: str
    inputs: Inputs = "features"
    needs_labels: bool = False
    transductive: bool = False
    stochastic: bool = False
    requires: Requirement = "any"
    cost: str = "1 view"
    also_needs: str = ""

    @property
    def needs(self) -> str:
        """The inputs and everything else that the method needs, in words."""
        inputs = "features of views" if self.inputs == "views" else self.inputs
        return f"{inputs}, {self.also_needs}" if self.also_needs else inputs

    @property
    def trains_on(self) -> str:
        """The training data, in words."""
        return "labelled images" if self.needs_labels else "nothing"

    def load(self) -> Method:
        """Import the module of the method and return the `Method` object."""
        module, _, name = self.location.partition(":")
        method: Method = getattr(
            importlib.import_module(module if "." in module else f"selftpt.methods.{module}"), name
        )
        return method


class MethodTable(Mapping[str, "Method"]):
    """A mapping from names to methods. Iteration, `in` and `len` do not import any method.

    Args:
        info: The rows, by the name of the method. Rows can be added later.

    Example:
        >>> from selftpt import METHODS
        >>> METHODS.info["coop"].summary
        'a prompt learned with cross-entropy'
        >>> METHODS["coop"].needs_labels
        True
    """

    def __init__(self, info: dict[str, MethodInfo]) -> None:
        self.info = info

    def __getitem__(self, name: str) -> Method:
        return self.info[name].load()

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def __repr__(self) -> str:
        return f"MethodTable({', '.join(self.info)})"


_CLIP = "Radford et al., ICML 2021"
_TPT = "Shu et al., NeurIPS 2022"
_DIFFTPT = "Feng et al., ICCV 2023"
_SELF_TPT = "Efficient Test-Time Prompt Tuning for Vision-Language Models, 2024"

METHODS = MethodTable(
    {
        "clip": MethodInfo("clip:CLIP", "zero-shot with one template", _CLIP),
        "clip-ensemble": MethodInfo("clip:ENSEMBLE", "zero-shot, mean over 80 templates", _CLIP),
        "coop": MethodInfo(
            "coop:COOP",
            "a prompt learned with cross-entropy",
            "Zhou et al., IJCV 2022",
            needs_labels=True,
            stochastic=True,
        ),
        "cocoop": MethodInfo(
            "cocoop:COCOOP",
            "a prompt that depends on the image, from a small network",
            "Zhou et al., CVPR 2022",
            needs_labels=True,
            stochastic=True,
            cost="1 view, text encoding of all class names",
        ),
        "kgcoop": MethodInfo(
            "kgcoop:KGCOOP",
            "coop, with class vectors kept near those of a template",
            "Yao et al., CVPR 2023",
            needs_labels=True,
            stochastic=True,
        ),
        "proda": MethodInfo(
            "proda:PRODA",
            "mean of 32 prompts, learned as a Gaussian distribution",
            "Lu et al., CVPR 2022",
            needs_labels=True,
            stochastic=True,
        ),
        "lasp": MethodInfo(
            "lasp:LASP",
            "a prompt regularised by templates, and tuned LayerNorms",
            "Bulat and Tzimiropoulos, CVPR 2023",
            inputs="pixels",
            needs_labels=True,
            stochastic=True,
            also_needs="or features if the image tower is not a ViT of open_clip",
        ),
        "ship": MethodInfo(
            "ship:SHIP",
            "coop, with features generated for new class names",
            "Wang et al., ICCV 2023",
            needs_labels=True,
            stochastic=True,
        ),
        "visdesc": MethodInfo(
            "visdesc:VISDESC",
            "mean over sentences with descriptors of each class",
            "Menon and Vondrick, ICLR 2023",
            also_needs="descriptors",
        ),
        "waffleclip": MethodInfo(
            "waffleclip:WAFFLECLIP",
            "mean over sentences with random words and characters",
            "Roth et al., ICCV 2023",
            stochastic=True,
        ),
        "tpt": MethodInfo("tpt:TPT", "a prompt tuned for each image", _TPT, inputs="views", cost="64 views, 1 step"),
        "coop+tpt": MethodInfo(
            "tpt:COOP_TPT",
            "tpt, starting from the prompt of coop",
            _TPT,
            inputs="views",
            needs_labels=True,
            stochastic=True,
            cost="64 views, 1 step",
        ),
        "c-tpt": MethodInfo(
            "c_tpt:C_TPT",
            "tpt with a term that keeps class vectors apart",
            "Yoon et al., ICLR 2024",
            inputs="views",
            cost="64 views, 1 step",
        ),
        "difftpt": MethodInfo(
            "difftpt:DIFFTPT",
            "tpt with generated images as further views",
            _DIFFTPT,
            inputs="views",
            cost="127 views, 4 steps",
            also_needs="generated images",
        ),
        "coop+difftpt": MethodInfo(
            "difftpt:COOP_DIFFTPT",
            "difftpt, starting from the prompt of coop",
            _DIFFTPT,
            inputs="views",
            needs_labels=True,
            stochastic=True,
            cost="127 views, 4 steps",
            also_needs="generated images",
        ),
        "swapprompt": MethodInfo(
            "swapprompt:SWAPPROMPT",
            "a prompt tuned on the test images by swapped prediction",
            "Ma et al., NeurIPS 2023",
            inputs="views",
            transductive=True,
            stochastic=True,
            cost="5 views, tuning",
            also_needs="all test images at once",
        ),
        "tda": MethodInfo(
            "tda:TDA",
            "logits corrected by caches of earlier test images",
            "Karmanov et al., CVPR 2024",
            transductive=True,
            stochastic=True,
            cost="1 view, cache lookup",
            also_needs="the test images as a stream",
        ),
        "mta": MethodInfo(
            "mta:MTA",
            "the mode of the views, found by mean shift",
            "Zanella and Ben Ayed, CVPR 2024",
            inputs="views",
            cost="64 views",
        ),
        "zero": MethodInfo(
            "zero:ZERO",
            "a majority vote of the confident views",
            "Farina et al., NeurIPS 2024",
            inputs="views",
            cost="64 views",
        ),
        "four-prompts": MethodInfo(
            "four_prompts:FOUR_PROMPTS",
            "a prompt for each of self-tpt's views, learned with cross-entropy, averaged",
            "a control",
            needs_labels=True,
            stochastic=True,
        ),
        "self-tpt": MethodInfo(
            "self_tpt:SELF_TPT",
            "CPT and gradient matching, then CPT on the class names",
            _SELF_TPT,
            needs_labels=True,
            stochastic=True,
        ),
        "self-tpt-v": MethodInfo(
            "self_tpt:SELF_TPT_V",
            "self-tpt, averaged over 64 views",
            _SELF_TPT,
            inputs="views",
            needs_labels=True,
            stochastic=True,
            cost="64 views",
        ),
    }
)


def __getattr__(name: str) -> Any:
    if name in ("FitContext", "FittedMethod", "Method", "Predictor"):
        return getattr(importlib.import_module("selftpt.methods.method"), name)
    raise AttributeError(f"module 'selftpt.methods' has no attribute {name!r}")
