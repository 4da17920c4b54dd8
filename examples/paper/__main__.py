"""``python -m examples.paper RECIPE --data FOLDER --out FOLDER``: a search, pruned to every size."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dnis_torchrec.data.recipe import build_recipe
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.search.prune import Size
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.training.evaluate import evaluate, primary_metric
from examples.paper.figures import draw_alpha, draw_frequencies, draw_history, draw_quality
from examples.paper.pruning import num_values, prune_values_
from examples.paper.search import Epoch, PaperSettings, copy_of, fine_tune_, search_as_published
from examples.paper.sparse_rows import KINDS, save_tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: of the command line; None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.paper", description=__doc__)
    parser.add_argument("recipe", help="MODULE:FUNCTION")
    parser.add_argument("--data", type=Path, help="what the recipe reads")
    parser.add_argument("--out", type=Path, required=True, help="folder for tables, results and figures")
    parser.add_argument("--compression", default="10", help="sizes, as 8,20,40")
    parser.add_argument("--form", choices=KINDS, default="csr", help="of the sparse matrices")
    parser.add_argument("--epochs", type=int, default=PaperSettings.epochs)
    parser.add_argument("--num-blocks", type=int, default=PaperSettings.num_blocks)
    parser.add_argument("--unrolled", action="store_true", help="second order, in one unrolled step")
    parser.add_argument("--fine-tune-epochs", type=int, default=0, help="training under a mask behind the pruning")
    parser.add_argument("--seed", type=int, default=0)
    run(parser.parse_args(arguments))
    return 0


def run(how: argparse.Namespace) -> list[dict[str, float]]:
    """Does what the command line asks for, and returns a row for each size."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = [Size(compression=float(compression)) for compression in how.compression.split(",")]
    recipe = build_recipe(how.recipe, how.data, seed=how.seed)
    shapes = [(table.num_embeddings, table.embedding_dim) for table in table_configs(recipe.model)]
    for size in sizes:
        num_values(size, shapes)  # refuses one out of reach before anything is trained
    settings = PaperSettings(epochs=how.epochs, num_blocks=how.num_blocks, is_unrolled=how.unrolled)
    torch.manual_seed(how.seed)
    outcome = search_as_published(recipe, settings, device, _print)
    metric, _ = primary_metric(recipe.task, recipe.data.test)
    rows = []
    for size in sizes:
        model = copy_of(outcome)
        scheme = prune_values_(model, outcome.blocks, outcome.counts, size)
        if how.fine_tune_epochs:
            fine_tune_(model, recipe, device, epochs=how.fine_tune_epochs)
        metrics = evaluate(TrainTask(model, recipe.task).to(device), recipe.data.test, recipe.task, device)
        save_tables(model, how.out / f"x{size.given[1]:g}", how.form)
        rows.append({"compression": size.given[1], "values": scheme.parameters, **metrics})
        print(f"x{size.given[1]:g}: {scheme.parameters:,} values, test {metric} {metrics[metric]:.4f}")
    (how.out / "results.json").write_text(json.dumps(rows, indent=1))
    draw_frequencies(outcome.counts, how.out / "frequencies.svg")
    draw_alpha(outcome.alpha, how.out / "alpha.svg")
    draw_history(outcome.history, how.out / "history.svg")
    draw_quality(rows, metric, how.out / "quality.svg")
    return rows


def _print(epoch: Epoch) -> None:
    losses = f"train loss {epoch.train_loss:.4f}, selection loss {epoch.selection_loss:.4f}"
    print(f"epoch {epoch.epoch}, {epoch.phase}: {losses}, alpha above 0 {epoch.alpha_density:.3f}")


if __name__ == "__main__":
    sys.exit(main())
