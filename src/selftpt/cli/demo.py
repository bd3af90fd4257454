"""`selftpt demo`: compare zero-shot with Self-TPT on photographs that come with scikit-image."""

from __future__ import annotations

import importlib.util
import io
import time
from pathlib import Path
from typing import Annotated

import typer

from selftpt.cli.options import OUTPUT
from selftpt.errors import SelfTPTError

# Files of scikit-image with their class names.
PHOTOGRAPHS = {
    "chelsea.png": "cat",
    "coffee.png": "cup of coffee",
    "rocket.jpg": "rocket",
    "astronaut.png": "astronaut",
    "motorcycle_left.png": "motorcycle",
    "camera.png": "man with a camera",
    "coins.png": "coins",
    "brick.png": "brick wall",
    "grass.png": "grass",
    "gravel.png": "gravel",
    "moon.png": "craters of the moon",
    "hubble_deep_field.jpg": "stars and galaxies",
}
OTHER_CLASSES = ("dog", "bicycle", "airplane", "glass of beer", "clock")
RIGHT, WRONG = "#177245", "#b22222"


def command(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The contact sheet to write, a PNG file.", rich_help_panel=OUTPUT)
    ] = Path("selftpt-demo.png"),
) -> None:
    """Classify twelve photographs with zero-shot and with Self-TPT, offline, and write a contact sheet."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise SelfTPTError("the photographs of the demo come with scikit-image: run pip install 'selftpt[demo]'")
    from rich.console import Console
    from rich.table import Table

    from selftpt.adaptation import adapt, zero_shot
    from selftpt.contact_sheet import Tile, contact_sheet
    from selftpt.data.decoding import open_image
    from selftpt.files import check_writable, write_atomically
    from selftpt.models import load_model
    from selftpt.prompt import Prompt

    check_writable(out)
    names = [*PHOTOGRAPHS.values(), *OTHER_CLASSES]
    images = [open_image(Path(spec.origin).parent / "data" / file) for file in PHOTOGRAPHS]
    start = time.monotonic()
    model = load_model()
    loaded = time.monotonic()
    zero_shot_classifier = zero_shot(model, names)
    adapting = time.monotonic()
    adapted_classifier = adapt(model, Prompt.embedded(), names)
    adapted = time.monotonic()
    predictions = {
        "zero-shot": zero_shot_classifier.predict(images, top=1),
        "Self-TPT": adapted_classifier.predict(images, top=1),
    }
    done = time.monotonic()

    print(
        f"{model.id}: a small model that comes with selftpt. {len(PHOTOGRAPHS)} photographs, {len(names)} class names:"
    )
    print(f"  {', '.join(names)}\n")
    table, tiles = Table("photograph", *predictions, box=None), []
    for i, (file, truth) in enumerate(PHOTOGRAPHS.items()):
        best = {method: (some[i].names[0], some[i].probabilities[0]) for method, some in predictions.items()}
        cells = [f"{'✓' if name == truth else '✗'} {name} {p:.0%}" for name, p in best.values()]
        table.add_row(f"{file} ({truth})", *cells)
        lines = [(f"{method}: {name} {p:.0%}", RIGHT if name == truth else WRONG) for method, (name, p) in best.items()]
        tiles.append(Tile(images[i], [(truth, "black"), *lines]))
    Console(highlight=False).print(table)
    correct = {
        method: sum(p.names[0] == truth for p, truth in zip(some, PHOTOGRAPHS.values(), strict=True))
        for method, some in predictions.items()
    }
    score = ", ".join(f"{method} {count} correct" for method, count in correct.items())
    print(f"\nOf {len(PHOTOGRAPHS)} photographs: {score}. This is a demonstration, not a measurement.")
    print(
        f"{loaded - start:.1f} s to load the model, {adapted - adapting:.1f} s to adapt to the names, "
        f"{(done - adapted) / len(PHOTOGRAPHS) / 2:.2f} s per image."
    )
    png = io.BytesIO()
    contact_sheet(f"selftpt demo, {len(PHOTOGRAPHS)} photographs: {score}", tiles).save(png, "PNG")
    write_atomically(out, png.getvalue())
    print(f"\nContact sheet: {out}\n\nNext, with your own images:")
    print("  selftpt classify photos/ --names 'tabby cat, golden retriever, parrot'")
    print("  selftpt learn photos/ --out mine.safetensors        (one folder of images per class)")
    print("  selftpt models                                      (CLIP and other models, online)")
