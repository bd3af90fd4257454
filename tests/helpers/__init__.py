"""Helpers shared by several test files: small models, images, folders, datasets, commands, a simulated GPU."""
