"""Image features, from JPEG files to shards on disk, against the bare image tower on preprocessed tensors.

ViT-B/32 with random weights, files of about 500 x 375, as a ratio of images per second in one run; also how much faster
it is the second time, when the features are in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from measure import interleaved, ratio
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from predict import make_images

from selftpt.data.cache import Cache
from selftpt.data.features import FeatureProvider
from selftpt.data.views import ViewSpec
from selftpt.models import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model("ViT-B-32", "random", device="cpu")
    clip = model.clip
    transform = image_transform_v2(PreprocessCfg(**clip.visual.preprocess_cfg), is_train=False)

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        os.environ["SELFTPT_CACHE"] = str(cache)
        paths = make_images(Path(folder), options.images)
        ready = torch.stack([transform(Image.open(path)) for path in paths[: options.batch]])

        def bare() -> None:
            with torch.inference_mode():
                for _ in range(options.images // options.batch):
                    clip.encode_image(ready, normalize=True)

        def kept() -> None:
            provider = FeatureProvider(model, [ViewSpec()], Cache(), fixed_batch=True)
            assert provider(paths).shape == (options.images, 1, model.dimension)

        def extract() -> None:
            shutil.rmtree(cache, ignore_errors=True)
            kept()

        seconds = interleaved({"bare": bare, "extract": extract, "kept": kept}, rounds=5)

    result = {
        "threads": options.threads,
        "images_a_second": {name: options.images / statistics.median(s) for name, s in seconds.items()},
        "of_bare_tower": ratio(seconds["bare"], seconds["extract"]),
        "kept_over_extracted": ratio(seconds["extract"], seconds["kept"]),
    }
    print(f"extraction: {result['of_bare_tower']:.2f} of open_clip's bare tower on ready tensors")
    print(f"the second time: {result['kept_over_extracted']:.0f} times as fast")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
