"""Loss against bytes served: trained models compressed, beside what else makes the same bytes of them.

    python -m benchmarks.rate_distortion [--quick] [--recipes movielens:mf,anime:fm] [--seeds 0,1,2]
        [--sizes 8,20,40,64] [--search] [--without uniform] [--ablations] [--memory] [--cache DIR] --json FILE

Every recipe is trained once per seed, plainly and to its own early stop. Its weights are kept in `--cache`, by recipe,
seed, D and L2: empty the folder when a recipe changes. From this model come:

compress              bits for every column of every block, tables turned into their principal axes before
compress, not turned  the same in the axes that training has left (`--ablations`)
search                a search that begins with it, and its defaults (`--search`)
row-wise              FBGEMM's int8 and int4 rows of all D columns; compress meets the bytes of both, too
cut axes              turned tables, the first K columns of all, rows in int8 or int4
uniform               models trained at a smaller D, with the same L2 to their own early stop, rows in int8 or int4

K and D are the largest that a size leaves room for; of `cut axes` and `uniform` ``*`` marks the precision that the
selection split prefers. A row of int8 or int4 takes four bytes beside its values: at sizes that leave no column beside
them both store fp16 instead. Compression is bytes of the float32 tables over bytes served, all that a lookup reads
counted; metrics are those of the modules that serve. L2 is the recipe's for all methods.

Rows: ``{"recipe", "seed", "embedding_l2", "method", "precision", "size", "compression", "bytes", "metrics",
"selection", "predicted_loss_increase", "seconds"}``; a run that was interrupted goes on with the rows that its file
lacks. `--memory` measures compress on one large table in a process of its own (Linux only).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import nn

from benchmarks.files import output_file
from benchmarks.rate_compress import UnmetError
from benchmarks.rate_memory import measure_memory
from benchmarks.rate_methods import METHODS, RIVALS, Served, Wanted, wanted_rows
from benchmarks.rate_models import Case, Trained
from benchmarks.rate_summary import MemoryRow, Row, print_summary
from dnis_torchrec._dependencies import versions
from dnis_torchrec.data.files import read_json, write_json
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.training.evaluate import evaluate

RECIPES = {
    "examples.movielens:mf": "ml-1m",
    "examples.movielens:mlp": "ml-1m",
    "examples.movielens:neumf": "ml-1m",
    "examples.movielens:ctr_fm": "ml-1m",
    "examples.movielens:ctr_wide_deep": "ml-1m",
    "examples.movielens:ctr_deepfm": "ml-1m",
    "examples.movielens:ctr_dlrm": "ml-1m",
    "examples.movielens:ctr_dlrm_dcn": "ml-1m",
    "examples.ncf:neumf_topk": "ncf-ml-1m",
    "examples.criteo:fm": "criteo-kaggle-137k",
    "examples.criteo:wide_deep": "criteo-kaggle-137k",
    "examples.criteo:deepfm": "criteo-kaggle-137k",
    "examples.criteo:dlrm": "criteo-kaggle-137k",
    "examples.anime:mf": "second",
    "examples.anime:fm": "second",
    "examples.lastfm_tags:fm": "second",
    "examples.lastfm_tags:deepfm": "second",
    "examples.lastfm_tags:dlrm": "second",
    "examples.amazon_sports:fm": "second",
    "examples.amazon_sports:deepfm": "second",
}
"""Recipe -> folder of its data."""
QUICK_RECIPES = ("examples.anime:mf", "examples.lastfm_tags:fm")
SIZES, QUICK_SIZES = (8.0, 20.0, 40.0, 64.0), (8.0, 20.0)
SEEDS = (0, 1, 2)


class _File(TypedDict):
    rows: list[Row]
    memory: NotRequired[MemoryRow | None]


class Results:
    """The rows of a file, written anew with every row that comes.

    Args:
        path: of the file; rows that stand there are kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        held = read_json(path, _File) if path.is_file() else _File(rows=[])
        self.rows = held["rows"]
        self.memory = held.get("memory")

    def lacks(self, trained: Trained, wanted: Wanted) -> bool:
        """Whether a row is still to be measured."""
        case = trained.case
        key = (case.recipe, case.seed, trained.embedding_l2, wanted.method, wanted.precision, wanted.size)
        names = ("recipe", "seed", "embedding_l2", "method", "precision", "size")
        return all(tuple(row[name] for name in names) != key for row in cast(list[dict[str, Any]], self.rows))

    def add(self, row: Row) -> None:
        """Takes a row, and writes the file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        write_json(self.path, {"rows": self.rows, "memory": self.memory, "versions": versions()})


def measure(case: Case, wanted_of_all: Sequence[Wanted], results: Results) -> None:
    """Measures the rows of one trained model that a file lacks."""
    trained = Trained(case)
    for wanted in [wanted for wanted in wanted_of_all if results.lacks(trained, wanted)]:
        name = f"{case.recipe} seed {case.seed}, {wanted.method} {wanted.precision} {wanted.size or ''}".strip()
        try:
            row = row_of(trained, wanted, METHODS[wanted.method](trained, wanted))
        except UnmetError as reason:
            print(f"{name}: left out, {reason}", flush=True)
            continue
        results.add(row)
        print(f"{name}: {row['compression']:.2f} times, loss {row['metrics']['loss']:.5f}", flush=True)


def row_of(trained: Trained, wanted: Wanted, served: Served) -> Row:
    """Evaluates what is served."""
    made, started = served.made, time.monotonic()
    num_bytes = made.embedding_bytes() if served.num_bytes is None else served.num_bytes
    with made.served(torch.device("cpu")) as model:
        seconds = made.seconds + time.monotonic() - started
        metrics, selection = (_metrics(model, trained.recipe, split) for split in ("test", "selection"))
    row = Row(
        recipe=trained.case.recipe,
        seed=trained.case.seed,
        embedding_l2=trained.embedding_l2,
        method=wanted.method,
        precision=wanted.precision,
        size=wanted.size,
        compression=trained.dense_bytes / num_bytes,
        bytes=num_bytes,
        metrics=metrics,
        selection=selection,
        predicted_loss_increase=served.predicted,
        seconds=seconds,
    )
    return cast(Row, row | dict(served.extra))


def _metrics(model: nn.Module, recipe: Recipe, split: str) -> dict[str, float]:
    return evaluate(TrainTask(model, recipe.task), getattr(recipe.data, split), recipe.task, torch.device("cpu"))


def recipes(text: str) -> list[str]:
    """Recipes with commas between them, those of `RECIPES` with or without ``examples.``."""
    return [name if f"examples.{name}" not in RECIPES else f"examples.{name}" for name in text.split(",")]


def seeds(text: str) -> list[int]:
    """Seeds with commas between them."""
    return [int(part) for part in text.split(",")]


def methods(text: str) -> list[str]:
    """Names of `RIVALS` with commas between them."""
    if unknown := sorted(set(text.split(",")) - set(RIVALS)):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(RIVALS)}, got {unknown}")
    return text.split(",")


def sizes(text: str) -> list[float]:
    """Compressions above 1 with commas between them."""
    found = [float(part) for part in text.split(",")]
    if not all(size > 1 for size in found):
        raise argparse.ArgumentTypeError(f"expected numbers above 1 with commas between them, got {text!r}")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what is not said there follows from `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two recipes, one seed, sizes 8 and 20: minutes")
    parser.add_argument("--recipes", type=recipes, help="commas between them; all of RECIPES if not given")
    parser.add_argument("--seeds", type=seeds, help="commas between them (default 0,1,2)")
    parser.add_argument("--sizes", type=sizes, help="compressions, commas between them (default 8,20,40,64)")
    parser.add_argument("--l2", type=float, help="of all trainings, instead of the recipe's")
    data = Path(os.environ.get("DNIS_DATA", "../shared/data"))
    parser.add_argument("--data", type=Path, default=data, help="folder of the data sets' folders (default DNIS_DATA)")
    parser.add_argument("--cache", type=Path, help="folder to keep trained weights in; none are kept if not given")
    parser.add_argument("--without", type=methods, default=[], help="rivals to leave out; uniform trains its own")
    parser.add_argument("--search", action="store_true", help="search, too: at most two plain trainings a size")
    parser.add_argument("--ablations", action="store_true", help="compress without turning the tables, too")
    parser.add_argument("--memory", action="store_true", help="measure memory on one large table, too")
    parser.add_argument("--rows", type=int, default=4_000_000, help="of that table, 64 wide")
    parser.add_argument("--json", type=output_file, dest="json_file", required=True)
    arguments = parser.parse_args(argv)
    quick = arguments.quick
    arguments.recipes = arguments.recipes or list(QUICK_RECIPES if quick else RECIPES)
    arguments.seeds = arguments.seeds or list(SEEDS[:1] if quick else SEEDS)
    arguments.sizes = arguments.sizes or list(QUICK_SIZES if quick else SIZES)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the file lacks, writes it, prints tables and findings."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    results = Results(arguments.json_file)
    rows = wanted_rows(arguments.sizes, ablations=arguments.ablations, searches=arguments.search)
    rows = [wanted for wanted in rows if wanted.method not in arguments.without]
    with ExitStack() as stack:
        cache = arguments.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cache.mkdir(parents=True, exist_ok=True)
        for recipe in arguments.recipes:
            folder = RECIPES.get(recipe)
            for seed in arguments.seeds:
                case = Case(
                    recipe=recipe,
                    data=arguments.data / folder if folder else None,
                    seed=seed,
                    embedding_l2=arguments.l2,
                    cache=cache,
                )
                measure(case, rows, results)
    if arguments.memory:
        results.memory = measure_memory(arguments.rows)
        results.write()
    print_summary(results.rows, results.memory)


if __name__ == "__main__":
    main()
