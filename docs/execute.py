"""Runs the scripts of docs/notebooks/ and writes each as a notebook with its outputs.

python -m docs.execute --out site/notebooks
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from dnis_torchrec.cli import app
from docs.site import cells

SCRIPTS = sorted((Path(__file__).parent / "notebooks").glob("*.py"))


def output_of(code: str, names: dict[str, Any]) -> str:
    """Runs a cell and returns what it prints, with the value of its last line if that is an expression.

    Lines that begin with ``!dnis`` are commands. They run in this process, because starting Python anew takes seconds.

    Example:
        >>> output_of("print(1)\\nx = 2\\nx + 1", {})
        '1\\n3\\n'
        >>> output_of("!dnis --version", {}).split()[0]
        'dnis'
    """
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        if code.startswith("!dnis "):
            for line in code.splitlines():
                app(shlex.split(line)[1:], standalone_mode=False)
            return out.getvalue()
        lines = ast.parse(code).body
        last = lines.pop() if lines and isinstance(lines[-1], ast.Expr) else None
        exec(compile(ast.Module(lines, []), "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if value is not None:
            print(value)
    return out.getvalue()


def notebook(script: str, names: dict[str, Any]) -> dict[str, Any]:
    """A script in percent format as a notebook of format 4, whose cells ran and left their names."""
    entries: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(script)):
        entry: dict[str, Any] = {"id": str(number), "cell_type": kind, "metadata": {}, "source": text}
        if kind == "code":
            text = output_of(text, names)
            outputs = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
            entry |= {"execution_count": len(entries) + 1, "outputs": outputs}
        entries.append(entry)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": entries}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs the notebooks.")
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out.resolve()  # a notebook may go to a folder of its own
    for path in SCRIPTS:
        (folder / f"{path.stem}.ipynb").write_text(
            json.dumps(notebook(path.read_text("utf-8"), {"__name__": "__main__"}), indent=1), "utf-8"
        )
