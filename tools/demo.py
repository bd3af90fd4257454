"""The whole of Self-TPT on a made-up task: learn on some shapes, adapt to the names of others, predict.

The model has random weights, so that this runs anywhere, offline: what it answers means nothing.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from PIL import Image, ImageDraw

import selftpt


def draw(shape: str, rng: random.Random) -> Image.Image:
    """A picture of a shape in a random colour and place."""
    picture = Image.new("RGB", (320, 240), tuple(rng.randrange(160, 256) for _ in range(3)))
    x, y, size = rng.randrange(20, 160), rng.randrange(20, 100), rng.randrange(60, 120)
    ink, box = tuple(rng.randrange(0, 160) for _ in range(3)), (x, y, x + size, y + size)
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=ink)
    elif shape == "square":
        pen.rectangle(box, fill=ink)
    elif shape == "triangle":
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=ink)
    else:
        pen.line([(x, y), (x + size, y + size)], fill=ink, width=12)
        pen.line([(x, y + size), (x + size, y)], fill=ink, width=12)
    return picture


def main() -> None:
    rng, begin = random.Random(0), time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {text}", flush=True)

    print("selftpt demo. RANDOM WEIGHTS: this shows that everything runs; its answers mean nothing.\n")
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        for shape in ("circle", "square"):
            for i in range(8):
                path = photos / shape / f"{i}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                draw(shape, rng).save(path)
        new = {shape: Path(folder, f"{shape}.png") for shape in ("triangle", "cross")}
        for shape, path in new.items():
            draw(shape, rng).save(path)

        model = selftpt.load_model("ViT-S-32", pretrained="random")
        say(f"loaded {model.id}")
        prompt = selftpt.learn(model, photos, selftpt.LearnConfig(epochs=3), out=Path(folder, "shapes.safetensors"))
        say(f"stage 1: learned {len(prompt.context)} context vectors from {prompt.origin['pictures']} pictures")
        classifier = selftpt.adapt(model, prompt, list(new))
        say(f"stage 2: adapted to {', '.join(classifier.names)}, by their names alone")
        for p in classifier.predict(new.values()):
            name = Path(p.path or "").name
            say(f"stage 3: {name}: {p.names[0]} {p.probabilities[0]:.0%} (random weights: meaningless)")
    print("\nNext: `.venv/bin/selftpt --help`, and README.md for real weights and your own pictures.")


if __name__ == "__main__":
    main()
