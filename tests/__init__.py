"""Tests, in every process of which files are not flushed to the disk: that would take a part of their time."""

import os


def _unflushed(descriptor: int) -> None:
    """Takes the place of `os.fsync`; tests/storage/test_whole_files.py watches for what is flushed, and when."""


os.fsync = _unflushed
