"""Protocols, runs and tables."""
