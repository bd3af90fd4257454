"""What several tests share: small models, images, folders, datasets, commands, a pretend GPU."""
