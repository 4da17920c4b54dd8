"""Runs methods x sizes x seeds of a recipe; a line of JSON a cell.

    python -m benchmarks.rivals RECIPE --data D --sizes 8,20 --methods uniform,mde,search --seeds 0,1,2
        [--jobs 2] [--precisions fp32,int8,int4] [--train-on validation] [--ids shuffled] [--embedding-dim 16]
        [--gains] --out F.jsonl

Every method has the same bytes to serve, trains by the same rules on the same data, chooses on the
selection split and is measured on the test split as it is served. Where a method can serve in
several precisions, each is run at the same bytes, and the best on the selection split counts. The
plain model is trained once a seed, and lies beside F.jsonl in F.weights; ``seconds`` of a line are
those behind it. With ``--train-on validation`` methods that learn nothing on the validation split get
a second row: what they train is trained anew on it, too, for the number of epochs that was best, so
that none wins by data. With ``--gains`` every model but ours gets a second row with a gain for every
table and block, which fold into scales and take no byte. ``--ids shuffled`` renumbers the ids of every
table first: most recipes number them by frequency, so that whoever keeps frequent rows finds them free.

Cells that stand in the file are not run again; those that crashed are not in it. A line has
``recipe, embedding_dim, ids, split, method, seed, size, with_validation, gains, precision, bytes,
compression, metrics, selection_loss, settings, trials, seconds``, or ``reason`` where a method has
nothing of so few bytes; ``split`` is ``random`` or ``time`` where the recipe says so.
"""

import argparse
import json
import multiprocessing
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.rivals.cells import KEY, SHUFFLED, SORTED, Cell, run_cell
from benchmarks.rivals.methods import METHODS


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """All cells, seed by seed, the uncompressed model first."""
    rules = {name: getattr(arguments, name) for name in ("max_epochs", "patience", "trials")}
    return [
        Cell(
            recipe=arguments.recipe,
            data=arguments.data,
            method=name,
            size=size,
            seed=seed,
            with_validation=with_validation,
            gains=has_gains,
            ids=arguments.ids,
            embedding_dim=arguments.embedding_dim,
            rules=rules,
            precisions=tuple(arguments.precisions),
            weights=arguments.out.with_suffix(".weights"),
        )
        for seed in arguments.seeds
        for name in dict.fromkeys(["dense", *arguments.methods])
        for with_validation in sorted({False, arguments.train_on == "validation" and not METHODS[name].learns})
        for has_gains in sorted({False, arguments.gains and not METHODS[name].learns})
        for size in (arguments.sizes if METHODS[name].has_size else [None])
    ]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """What stands in a file; a last line that was cut short is no line."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = text.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run(cells: Sequence[Cell], out: Path, jobs: int) -> int:
    """Runs the cells that a file lacks, and adds their lines; how many crashed."""
    lines = lines_of(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    there = {tuple(line[name] for name in KEY) for line in lines}
    todo, crashes = [cell for cell in cells if cell.key not in there], 0
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        # The plain models first: others begin with them, and none is to be trained twice.
        first = [cell for cell in todo if cell.method == "dense" and not cell.gains]
        for part in (first, [cell for cell in todo if cell not in first]):
            futures = {pool.submit(run_cell, cell): cell for cell in part}
            for future in as_completed(futures):
                cell = futures[future]
                name = f"{label(vars(cell))} {cell.size or ''} seed {cell.seed}"
                try:
                    line = future.result()
                except Exception:
                    traceback.print_exc()
                    print(f"{name}: crashed", flush=True)
                    crashes += 1
                    continue
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{name}: {line.get('reason') or line['metrics']}", flush=True)
    return crashes


def label(line: Mapping[str, Any]) -> str:
    """A method, and what it was given."""
    return line["method"] + "+validation" * line["with_validation"] + "+gains" * line["gains"]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Means over seeds, a row a size and method."""
    rows = [
        {"size": line["size"] or 1.0, "method": label(line), "compression": line["compression"], **line["metrics"]}
        for line in lines
        if "metrics" in line
    ]
    groups = pd.DataFrame(rows, columns=None if rows else ["size", "method"]).groupby(["size", "method"])
    return groups.mean().assign(seeds=groups.size()).to_string(float_format="{:.4f}".format)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    names = list(METHODS)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("benchmarks.rivals", description=__doc__, formatter_class=form)
    parser.add_argument("recipe", help="module:function")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sizes", type=_list_of(float), default=[8.0, 20.0])
    parser.add_argument("--seeds", type=_list_of(int), default=[0, 1, 2])
    parser.add_argument("--methods", type=_list_of(str), default=names, help=", ".join(names))
    parser.add_argument("--precisions", type=_list_of(str), default=["fp32", "int8", "int4"])
    parser.add_argument("--train-on", choices=["train", "validation"], default="train")
    parser.add_argument("--ids", choices=[SORTED, SHUFFLED], default=SORTED)
    parser.add_argument("--embedding-dim", type=int, help="in place of the recipe's own")
    parser.add_argument("--gains", action="store_true")
    parser.add_argument("--max-epochs", type=int, default=60)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--trials", type=int, help="of methods that choose among several")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.methods) - set(names):
        parser.error(f"--methods: expected some of {', '.join(names)}, got {sorted(unknown)}")
    if min(arguments.sizes) <= 1:
        parser.error(f"--sizes: expected compressions above 1, got {arguments.sizes}")
    return arguments


def _list_of(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, prints the table."""
    arguments = parse(argv)
    crashes = run(cells_of(arguments), arguments.out, arguments.jobs)
    print(table(lines_of(arguments.out)))
    return 1 if crashes else 0


if __name__ == "__main__":
    raise SystemExit(main())
