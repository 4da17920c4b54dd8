"""Soft selection of single-id features written in several ways: which one a CPU runs fastest.

    python -m benchmarks.select_forms [--quick] [--no-inductor] [--batch-size 4096] --json FILE

Every way computes ``pooled[b, f] * alpha[rows[b, f]]`` and a gradient: of the pooled embeddings with alpha fixed (what
a lower step adds), or of alpha with the pooled embeddings fixed (an upper step). Pooled embeddings are the result of
another operation, as a lookup's are, so that a way may work in place. The ways take turns in one process on one thread;
ratios are medians over rounds of CPU time over that of the last one, which the search uses, with quartiles.

- formula: as one writes it, with torch's own gradients
- one_hot: rows of alpha by a matrix product with the one-hot block of every bag
- sorted: bags gathered block by block, each block multiplied by its row, and scattered back
- inductor: the formula under torch.compile
- per_sample: soft_selection.select_per_sample, which the search uses where nothing can be compiled
- operator: block_operators.select_pieces
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.files import output_file
from benchmarks.step_time import spread
from dnis_torchrec.data.files import write_json
from dnis_torchrec.ops.select import are_compiled, select_pieces
from dnis_torchrec.selection.alpha import select_per_sample

NUM_FEATURES, EMBEDDING_DIM, NUM_BLOCKS, BATCH_SIZE = 26, 64, 6, 4096
ROUNDS, QUICK_ROUNDS, WARM_UP_ROUNDS = 40, 6, 2

Select = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Pooled embeddings ``(B, F * D)``, alpha ``(S, D)`` and rows of alpha ``(B, F)`` -> ``(B, F * D)``."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One forward and backward pass.

    Attributes:
        seconds: of this process's CPU time.
        out: ``(B, F * D)``.
        gradient: of the pooled embeddings or of alpha.
    """

    seconds: float
    out: Tensor
    gradient: Tensor


def formula(pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Selects by the formula as it is written."""
    return pooled * alpha[rows].flatten(1)


def by_one_hot(pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Rows of alpha by a matrix product."""
    return pooled * (one_hot(rows, len(alpha)).to(alpha.dtype) @ alpha).flatten(1)


def sorted_by_block(pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """One row of alpha for all bags of a block, gathered and scattered back."""
    order = torch.argsort(rows.flatten(), stable=True)
    sizes = torch.bincount(rows.flatten(), minlength=len(alpha)).tolist()
    parts = pooled.view(-1, alpha.shape[1])[order].split(sizes)
    selected = torch.cat([part * row for part, row in zip(parts, alpha, strict=True)])
    return torch.empty_like(selected).index_copy(0, order, selected).view(pooled.shape)


def per_sample(pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """Selects by torch's operators, 256 samples at a time."""
    return select_per_sample(pooled.view(*rows.shape, -1), alpha, rows).flatten(1)


def by_operator(pooled: Tensor, alpha: Tensor, rows: Tensor) -> Tensor:
    """The compiled operator of the search, in place where autograd allows."""
    num_rows, dim = alpha.shape
    layout = torch.tensor([[f * dim, f * dim, dim, 0, f, 0, num_rows] for f in range(rows.shape[1])])
    return select_pieces(pooled, alpha.flatten(), rows.int(), None, layout, pooled.shape[1])


def forms(with_inductor: bool) -> dict[str, Select]:
    """Returns name -> way of selecting; the one that the search uses comes last."""
    found: dict[str, Select] = {"formula": formula, "one_hot": by_one_hot, "sorted": sorted_by_block}
    if with_inductor:
        found["inductor"] = torch.compile(formula)
    found["per_sample"] = per_sample
    if are_compiled():
        found["operator"] = by_operator
    return found


def take(select: Select, level: str, pooled: Tensor, alpha: Tensor, rows: Tensor, grad: Tensor) -> Taken:
    """Forward and the gradient that the level asks for."""
    leaf = (pooled if level == "lower" else alpha).clone().requires_grad_()
    values = leaf.clone() if level == "lower" else pooled.clone()
    start = time.process_time()
    out = select(values, alpha if level == "lower" else leaf, rows)
    gradient = torch.autograd.grad(out, leaf, grad)[0]
    return Taken(seconds=time.process_time() - start, out=out.detach(), gradient=gradient)


def measure(ways: dict[str, Select], batch_size: int, rounds: int) -> list[dict[str, Any]]:
    """A row per level and way."""
    generator = torch.Generator().manual_seed(0)
    pooled, grad = (torch.randn(batch_size, NUM_FEATURES * EMBEDDING_DIM, generator=generator) for _ in range(2))
    alpha = torch.rand(NUM_BLOCKS, EMBEDDING_DIM, generator=generator)
    rows = torch.randint(0, NUM_BLOCKS, (batch_size, NUM_FEATURES), generator=generator)
    found, reference = [], list(ways)[-1]
    for level in ("lower", "upper"):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(WARM_UP_ROUNDS + rounds):
            for name, select in ways.items():
                taken = take(select, level, pooled, alpha, rows, grad)
                if index >= WARM_UP_ROUNDS:
                    times[name].append(taken.seconds)
        for name, own in times.items():
            ratios = [value / base for value, base in zip(own, times[reference], strict=True)]
            row = {"level": level, "form": name, "reference": reference, "cpu_ms": 1000 * statistics.median(own)}
            found.append(row | {"cpu_ratio": round(statistics.median(ratios), 3), "cpu_quartiles": spread(ratios)})
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--no-inductor", action="store_true", help="leave torch.compile out, which takes a minute")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--json", type=output_file, help="file to write")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    ways = forms(with_inductor=not arguments.no_inductor)
    rows = measure(ways, arguments.batch_size, QUICK_ROUNDS if arguments.quick else ROUNDS)
    print(f"level  {'form':>10}    CPU ms   over {rows[0]['reference']}'s")
    for row in rows:
        low, high = row["cpu_quartiles"]
        print(f"{row['level']}  {row['form']:>10} {row['cpu_ms']:9.2f} {row['cpu_ratio']:8.2f} [{low:.2f}, {high:.2f}]")
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
