"""`selftpt methods`: what can be compared."""

from __future__ import annotations

import dataclasses
import json

from selftpt.cli.options import Json


def command(as_json: Json = False) -> None:
    """List the methods that `selftpt bench --methods` takes."""
    from selftpt.methods import METHODS

    if as_json:
        rows = [
            {"name": m.name, "summary": m.summary, "reference": m.reference, "learns": m.learns}
            | {"views": sum(look.views for look in m.looks(m.settings)), "settings": dataclasses.asdict(m.settings)}
            for m in METHODS.values()
        ]
        print(json.dumps(rows))
        return
    for method in METHODS.values():
        views = sum(look.views for look in method.looks(method.settings))
        needs = [
            *(["learns from source pictures"] if method.learns else []),
            *([f"{views} views"] if views > 1 else []),
        ]
        print(f"{method.name:14} {'; '.join([method.summary, *needs])} ({method.reference})")
