"""Loaders for the publishers' own formats, plain or gzip, and a generator for runs without data."""
