"""The table of methods: Self-TPT and the systems it is compared with, one file each."""

from __future__ import annotations

from selftpt.methods.c_tpt import C_TPT
from selftpt.methods.clip import CLIP, ENSEMBLE
from selftpt.methods.cocoop import COCOOP
from selftpt.methods.coop import COOP
from selftpt.methods.difftpt import COOP_DIFFTPT, DIFFTPT
from selftpt.methods.four_prompts import FOUR_PROMPTS
from selftpt.methods.kgcoop import KGCOOP
from selftpt.methods.lasp import LASP
from selftpt.methods.method import FitContext, FittedMethod, Method, Predictor
from selftpt.methods.mta import MTA
from selftpt.methods.proda import PRODA
from selftpt.methods.self_tpt import SELF_TPT, SELF_TPT_V
from selftpt.methods.ship import SHIP
from selftpt.methods.swapprompt import SWAPPROMPT
from selftpt.methods.tda import TDA
from selftpt.methods.tpt import COOP_TPT, TPT
from selftpt.methods.visdesc import VISDESC
from selftpt.methods.waffleclip import WAFFLECLIP
from selftpt.methods.zero import ZERO

__all__ = ["METHODS", "FitContext", "FittedMethod", "Method", "Predictor"]

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        CLIP,
        ENSEMBLE,
        COOP,
        COCOOP,
        KGCOOP,
        PRODA,
        LASP,
        SHIP,
        VISDESC,
        WAFFLECLIP,
        TPT,
        COOP_TPT,
        C_TPT,
        DIFFTPT,
        COOP_DIFFTPT,
        SWAPPROMPT,
        TDA,
        MTA,
        ZERO,
        FOUR_PROMPTS,
        SELF_TPT,
        SELF_TPT_V,
    )
}
