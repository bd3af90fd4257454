"""`selftpt demo`: all of it on photographs that come with scikit-image."""

from __future__ import annotations

import importlib.util
import io
import time
from pathlib import Path
from typing import Annotated

import typer

from selftpt.errors import SelfTPTError

# The files of scikit-image, and what a person would call them; the rest are there to be mistaken for.
SHOWN = {
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
OTHERS = ("dog", "bicycle", "airplane", "glass of beer", "clock")
RIGHT, WRONG = "#177245", "#b22222"


def command(
    out: Annotated[Path, typer.Option(help="where the contact sheet is written, as PNG")] = Path("selftpt-demo.png"),
) -> None:
    """Classify photographs by names alone, zero-shot and with Self-TPT, offline, on one sheet."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise SelfTPTError("the demo's photographs come with scikit-image: pip install 'selftpt[demo]'")
    from rich.console import Console
    from rich.table import Table

    from selftpt.adaptation import adapt, zero_shot
    from selftpt.data.decoding import open_image
    from selftpt.files import check_writable, write_whole
    from selftpt.models import load_model
    from selftpt.prompt import Prompt
    from selftpt.sheet import Tile, contact_sheet

    check_writable(out)
    names = [*SHOWN.values(), *OTHERS]
    images = [open_image(Path(spec.origin).parent / "data" / file) for file in SHOWN]
    begin = time.monotonic()
    model = load_model()
    loaded = time.monotonic()
    by_sentence = zero_shot(model, names)
    tuning = time.monotonic()
    by_prompt = adapt(model, Prompt.embedded(), names)
    adapted = time.monotonic()
    ways = {
        "zero-shot": list(by_sentence.predict(images, top=1)),
        "Self-TPT": list(by_prompt.predict(images, top=1)),
    }
    done = time.monotonic()

    print(f"{model.id}: a small model that comes with selftpt. {len(SHOWN)} photographs, {len(names)} names:")
    print(f"  {', '.join(names)}\n")
    table, tiles = Table("photograph", *ways, box=None), []
    for i, (file, truth) in enumerate(SHOWN.items()):
        told = {way: (said[i].names[0], said[i].probabilities[0]) for way, said in ways.items()}
        cells = {way: f"{'✓' if name == truth else '✗'} {name} {share:.0%}" for way, (name, share) in told.items()}
        table.add_row(f"{file} ({truth})", *cells.values())
        lines = [
            (f"{way}: {name} {share:.0%}", RIGHT if name == truth else WRONG) for way, (name, share) in told.items()
        ]
        tiles.append(Tile(images[i], [(truth, "black"), *lines]))
    Console(highlight=False).print(table)
    right = {way: sum(p.names[0] == t for p, t in zip(said, SHOWN.values(), strict=True)) for way, said in ways.items()}
    score = ", ".join(f"{count} right by {way}" for way, count in right.items())
    print(f"\nOf {len(SHOWN)} photographs {score}. That is a show, not a measurement; the model is small.")
    print(
        f"{loaded - begin:.1f} s to load, {adapted - tuning:.1f} s to adapt to the names, "
        f"{(done - adapted) / len(SHOWN) / 2:.2f} s a image."
    )
    png = io.BytesIO()
    contact_sheet(f"selftpt demo, {len(SHOWN)} photographs: {score}", tiles).save(png, "PNG")
    write_whole(out, png.getvalue())
    print(f"\nThe contact sheet: {out}\n\nNext, with your own images:")
    print("  selftpt classify photos/ --names 'tabby cat, golden retriever, parrot'")
    print("  selftpt learn photos/ --out mine.safetensors        (a folder of images for each class)")
    print("  selftpt models                                      (CLIP and others, when you are online)")
