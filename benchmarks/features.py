"""Measure feature extraction: images per second, relative to open_clip's image tower on prepared tensors.

Extraction reads JPEG files of about 500 x 375 pixels and writes shards of features to the cache. A second ratio is the
speedup when the features are read from the cache. The model is ViT-B/32 with random weights.
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
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object on the last line")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--images", type=int, default=128, help="number of images")
    parser.add_argument("--batch", type=int, default=32, help="images per batch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model("ViT-B-32", "random", device="cpu")
    clip = model.clip
    transform = image_transform_v2(PreprocessCfg(**clip.visual.preprocess_cfg), is_train=False)

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        os.environ["SELFTPT_CACHE"] = str(cache)
        paths = make_images(Path(folder), options.images)
        prepared = torch.stack([transform(Image.open(path)) for path in paths[: options.batch]])

        def run_tower() -> None:
            with torch.inference_mode():
                for _ in range(options.images // options.batch):
                    clip.encode_image(prepared, normalize=True)

        def extract_or_read() -> None:
            provider = FeatureProvider(model, [ViewSpec()], Cache(), fixed_batch=True)
            assert provider(paths).shape == (options.images, 1, model.dimension)

        def extract() -> None:
            shutil.rmtree(cache, ignore_errors=True)
            extract_or_read()

        # "kept" follows "extract", so it reads the features that "extract" has just written.
        seconds = interleaved({"bare": run_tower, "extract": extract, "kept": extract_or_read}, rounds=5)

    result = {
        "threads": options.threads,
        "images_a_second": {name: options.images / statistics.median(s) for name, s in seconds.items()},
        "of_bare_tower": ratio(seconds["bare"], seconds["extract"]),
        "kept_over_extracted": ratio(seconds["extract"], seconds["kept"]),
    }
    print(f"extraction has {result['of_bare_tower']:.2f} times the speed of open_clip's image tower alone")
    print(f"reading from the cache has {result['kept_over_extracted']:.0f} times the speed of extraction")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
