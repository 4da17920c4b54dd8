"""Files that a measurement writes."""

import argparse
from pathlib import Path


def output_file(text: str) -> Path:
    """An argument that names a file to write, whose folder is looked for before anything is measured."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path
