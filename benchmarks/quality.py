"""Quality at equal size: the search beside uniform tables and magnitude pruning, seed by seed.

    python -m benchmarks.quality RECIPE --data DIR --sizes 2,4,10,20 --seeds 0,1,2 --out DIR [--figure FILE]

One folder per seed and size; a finished one is not run again, so an interrupted measurement goes on where it stopped.
Every method has the same splits, the same early stopping on the selection split and is reported on the test split.
Prints a table of means over seeds and, as `difference`, the mean over seeds of (method - uncompressed) within each
seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch

from dnis_torchrec import Size
from dnis_torchrec.baselines import MagnitudePruning, train_uniform, uniform_dim
from dnis_torchrec.jobs import SearchJob, build_recipe, run_search, versions
from dnis_torchrec.report import ReportRow, quality_against_size, read_rows, save_png, write_rows
from dnis_torchrec.search import table_configs
from dnis_torchrec.training import primary_metric, process_group

PATIENCE = 3


def cell(folder: Path, name: str) -> Path:
    """File of one finished measurement."""
    return folder / f"{name}.json"


def measure_search(arguments: argparse.Namespace, seed: int, ratio: float, folder: Path) -> list[ReportRow]:
    """One search."""
    job = SearchJob(
        recipe=arguments.recipe,
        data=arguments.data,
        out=folder / f"run_{ratio:g}",
        size=Size(compression_ratio=ratio),
        seed=seed,
        overwrite=True,
    )
    return run_search(job)


def measure_uniform(arguments: argparse.Namespace, seed: int, ratio: float) -> list[ReportRow]:
    """Uniform tables of the size that a ratio comes to."""
    full = build_recipe(arguments.recipe, arguments.data, seed=seed)
    tables = table_configs(full.model)
    dense_dim = max(table.embedding_dim for table in tables)
    dense = sum(table.num_embeddings * table.embedding_dim for table in tables)
    dim = uniform_dim(dense_dim, ratio)
    recipe = build_recipe(arguments.recipe, arguments.data, seed=seed, embedding_dim=dim)
    with process_group() as device:
        torch.manual_seed(seed)
        return [train_uniform(recipe, dense_parameters=dense, seed=seed, device=device, patience=PATIENCE)]


def measure_magnitude(arguments: argparse.Namespace, seed: int, folder: Path) -> list[ReportRow]:
    """The uncompressed model, and magnitude pruning with fine-tuning at every size."""
    recipe = build_recipe(arguments.recipe, arguments.data, seed=seed)
    with process_group() as device:
        torch.manual_seed(seed)
        pruning = MagnitudePruning(recipe, seed=seed, device=device, folder=folder, patience=PATIENCE)
        return [pruning.dense_row(), *(pruning.pruned_row(ratio) for ratio in arguments.sizes)]


def measure_seed(arguments: argparse.Namespace, seed: int) -> list[ReportRow]:
    """Everything of one seed that is not measured yet."""
    folder = arguments.out / f"seed_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    todo = {"magnitude": lambda: measure_magnitude(arguments, seed, folder)}
    for ratio in arguments.sizes:
        todo[f"uniform_{ratio:g}"] = lambda ratio=ratio: measure_uniform(arguments, seed, ratio)
        todo[f"dnis_{ratio:g}"] = lambda ratio=ratio: measure_search(arguments, seed, ratio, folder)
    rows = []
    for name, work in todo.items():
        if not cell(folder, name).is_file():
            write_rows(cell(folder, name), work())
        rows += read_rows(cell(folder, name))
    return rows


def summary(rows: list[ReportRow], metrics: list[str], sizes: list[float]) -> list[dict[str, object]]:
    """One line per method and size: means over seeds, and paired differences to the uncompressed model."""
    dense = {row.seed: row for row in rows if row.method == "dense"}
    lines = []
    for method in ("dense", "dnis", "uniform", "magnitude"):
        for size in [1.0] if method == "dense" else sizes:
            group = [r for r in rows if r.method == method and abs(r.compression_ratio / size - 1) < 0.25]
            nearest = {}
            for row in group:
                distance = abs(row.compression_ratio - size)
                if row.seed not in nearest or distance < abs(nearest[row.seed].compression_ratio - size):
                    nearest[row.seed] = row
            if not nearest:
                continue
            line: dict[str, object] = {"method": method, "size": size, "seeds": len(nearest)}
            line["compression_ratio"] = round(statistics.mean(r.compression_ratio for r in nearest.values()), 2)
            for metric in metrics:
                line[metric] = round(statistics.mean(r.metrics[metric] for r in nearest.values()), 4)
                paired = [
                    r.metrics[metric] - dense[seed].metrics[metric] for seed, r in nearest.items() if seed in dense
                ]
                line[f"difference_{metric}"] = round(statistics.mean(paired), 4) if paired else None
            line["seconds"] = round(statistics.mean(r.seconds for r in nearest.values()))
            lines.append(line)
    return lines


def main() -> None:
    """Measures what is missing, prints the table, writes OUT/summary.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="module:function")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sizes", type=lambda text: [float(part) for part in text.split(",")], default=[2, 4, 10, 20])
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path, help="PNG of quality against size to write")
    arguments = parser.parse_args()
    rows = [row for seed in arguments.seeds for row in measure_seed(arguments, seed)]
    loss = build_recipe(arguments.recipe, arguments.data, seed=0).loss
    metrics = ["mse"] if primary_metric(loss)[0] == "mse" else ["auc", "logloss"]
    lines = summary(rows, metrics, arguments.sizes)
    print(" | ".join(lines[0]))
    for line in lines:
        print(" | ".join(str(value) for value in line.values()))
    head = {"recipe": arguments.recipe, "versions": versions()}
    temporary = arguments.out / "summary.json.partial"
    temporary.write_text(json.dumps({**head, "lines": lines, "rows": [row.to_json() for row in rows]}, indent=1) + "\n")
    os.replace(temporary, arguments.out / "summary.json")
    if arguments.figure:
        higher = primary_metric(loss)[1]
        save_png(quality_against_size(rows, metrics[0], higher_is_better=higher), arguments.figure, dpi=110)


if __name__ == "__main__":
    main()
