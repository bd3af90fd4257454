"""Measure prediction: images per second of `Classifier.predict` on JPEG files, relative to open_clip.

There are three ratios: to open_clip's image tower alone on prepared tensors, to selftpt's image tower alone on the same
tensors, and to open_clip's usual loop, which opens, transforms and encodes one image at a time. The model is ViT-B/32
with random weights, and the files have about 500 x 375 pixels.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import interleaved, ratio
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from selftpt.classifier import Classifier
from selftpt.config import PredictConfig
from selftpt.models import load_model


def make_images(folder: Path, count: int) -> list[Path]:
    """Write JPEG files of about 60 kB: noise at several scales, which has as much detail as a photograph."""
    rng, paths = random.Random(0), []
    for i in range(count):
        width, height = rng.randrange(480, 521), rng.randrange(355, 396)
        image = Image.new("RGB", (width, height))
        for scale in (4, 16, 64):
            small = (max(2, width // scale), max(2, height // scale))
            noise = Image.frombytes("RGB", small, rng.randbytes(3 * small[0] * small[1]))
            image = Image.blend(image, noise.resize((width, height), Image.Resampling.BICUBIC), 0.6)
        paths.append(folder / f"{i}.jpg")
        image.save(paths[-1], quality=92)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--images", type=int, default=96, help="number of images")
    parser.add_argument("--batch", type=int, default=32, help="images per batch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model("ViT-B-32", "random", device="cpu")
    weights = F.normalize(torch.randn(100, model.dimension), dim=-1)
    classifier = Classifier(tuple(f"class {i}" for i in range(100)), weights, 100.0, model.id, model=model)
    clip, config = model.clip, PredictConfig(batch=options.batch)
    transform = image_transform_v2(PreprocessCfg(**clip.visual.preprocess_cfg), is_train=False)

    with tempfile.TemporaryDirectory() as folder:
        paths = make_images(Path(folder), options.images)
        kilobytes = sum(path.stat().st_size for path in paths) / len(paths) / 1e3
        prepared = torch.stack([transform(Image.open(path)) for path in paths[: options.batch]])

        def open_clip_tower() -> None:
            with torch.inference_mode():
                for _ in range(options.images // options.batch):
                    clip.encode_image(prepared, normalize=True)

        def selftpt_tower() -> None:
            for _ in range(options.images // options.batch):
                model.encode_images(prepared)

        def predict() -> None:
            assert len(classifier.predict(paths, config=config)) == options.images

        def open_clip_loop() -> None:
            with torch.inference_mode():
                for path in paths:
                    image = transform(Image.open(io.BytesIO(path.read_bytes())))[None]
                    (100 * clip.encode_image(image, normalize=True) @ weights.t()).softmax(-1).topk(5)

        jobs = {"bare": open_clip_tower, "ours_bare": selftpt_tower, "predict": predict, "usual": open_clip_loop}
        seconds = interleaved(jobs, rounds=5)

    result = {
        "threads": options.threads,
        "batch": options.batch,
        "kilobytes_a_image": kilobytes,
        "images_a_second": {name: options.images / statistics.median(s) for name, s in seconds.items()},
        "of_bare_tower": ratio(seconds["bare"], seconds["predict"]),
        "of_our_bare_tower": ratio(seconds["ours_bare"], seconds["predict"]),
        "over_open_clip_loop": ratio(seconds["usual"], seconds["predict"]),
    }
    print(f"predict has {result['of_bare_tower']:.2f} times the speed of open_clip's image tower alone")
    print(f"predict has {result['of_our_bare_tower']:.2f} times the speed of selftpt's image tower alone")
    print(f"predict has {result['over_open_clip_loop']:.2f} times the speed of open_clip's usual loop")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
