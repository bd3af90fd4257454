"""Recipe of the embedded model, selftpt-tiny; see README.md in this folder."""
