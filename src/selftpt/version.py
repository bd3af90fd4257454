"""The version of selftpt."""

__version__ = "0.1.0"
