"""Images in: decoding, transforms, sources, features, datasets."""
