"""The `dnis` command: settings and printing in main, the work in commands."""

from dnis_torchrec.cli.main import app, main

__all__ = ["app", "main"]
