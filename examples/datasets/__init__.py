"""Loaders for the publishers' own formats, plain or gzip, and a generator for what has to run without data."""
