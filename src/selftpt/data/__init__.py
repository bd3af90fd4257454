"""Image data: decoding, preprocessing, views, features, labelled images and datasets."""
