"""The naive dense oracle: loops over bags, in float64, obviously right. Fast code is tested against it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Bags = list[list[int]]


@dataclass
class ReferenceTable:
    """A dense table with one alpha row per table row, as in the paper: e~_i = e_i * alpha[block(i)]."""

    weight: Tensor
    alpha: Tensor
    alpha_row_of_row: Tensor
    is_mean: bool


def pooled_reference(table: ReferenceTable, bags: Bags, weights: Sequence[Sequence[float]] | None = None) -> Tensor:
    """Pools every bag by hand: sum or mean over the WHOLE bag of weight * e_i * alpha[block(i)]."""
    out = []
    for position, bag in enumerate(bags):
        total = torch.zeros(table.weight.shape[1], dtype=torch.float64)
        for index, row in enumerate(bag):
            factor = 1.0 if weights is None else weights[position][index]
            total = total + factor * table.weight[row] * table.alpha[table.alpha_row_of_row[row]]
        out.append(total / len(bag) if table.is_mean and bag else total)
    return torch.stack(out)


def embedding_l2_reference(reads: Sequence[tuple[ReferenceTable, Bags, Sequence[Sequence[float]] | None]]) -> Tensor:
    """Mean over samples of the sum over features, each one's (table, bags, weights), of |pooled embedding|^2."""
    total = torch.zeros((), dtype=torch.float64)
    for table, bags, weights in reads:
        for sample in pooled_reference(table, bags, weights):
            for value in sample:
                total = total + value * value
    return total / len(reads[0][1])


def normalised_reference(gradient: Tensor, hit: Sequence[bool]) -> Tensor:
    """Row-wise normalisation, one row at a time."""
    rows = []
    for row, was_hit in zip(gradient, hit, strict=True):
        rows.append(row / (row.abs().mean() + 1e-7) if was_hit else torch.zeros_like(row))
    return torch.stack(rows)


def elementwise_keep_reference(tables: Sequence[Tensor], num_keep: int) -> list[Tensor]:
    """Keeps the num_keep largest magnitudes over all tables; among equals the earlier table, row, column stays."""
    flat = [(-abs(float(v)), t, i) for t, table in enumerate(tables) for i, v in enumerate(table.flatten().tolist())]
    kept = [torch.zeros(table.numel(), dtype=torch.bool) for table in tables]
    for _, t, i in sorted(flat)[:num_keep]:
        kept[t][i] = True
    return [mask.view(table.shape) for mask, table in zip(kept, tables, strict=True)]


def blocks_reference(counts: Sequence[int], num_blocks: int) -> list[int]:
    """Block of every row: sorts the rows by descending count (ties in row order), walks down and cuts."""
    order = sorted(range(len(counts)), key=lambda row: (-counts[row], row))
    starts = {k * len(order) // num_blocks for k in range(num_blocks)}
    blocks, block = [0] * len(counts), -1
    for position, row in enumerate(order):
        block += position in starts
        blocks[row] = block
    return blocks


def rounded_reference(values: Sequence[float], scale: float, shift: int, bits: int) -> list[int]:
    """The code of every value: of all that there are, the one whose value scale * (q + shift / 2) comes nearest."""
    return [min(range(2**bits), key=lambda q, x=value: (abs(scale * (q + shift / 2) - x), q)) for value in values]


def rounding_error_reference(
    values: Sequence[float], weights: Sequence[float], scale: float, shift: int, bits: int
) -> float:
    """Weighted energy of the rounding error over the weighted energy of the values."""
    codes = rounded_reference(values, scale, shift, bits)
    errors = [scale * (q + shift / 2) - x for q, x in zip(codes, values, strict=True)]
    energies = [sum(w * x * x for w, x in zip(weights, of, strict=True)) for of in (errors, values)]
    return energies[0] / energies[1]


def error_feedback_reference(
    row: Tensor, couplings: Tensor, order: Sequence[int], round_one: Callable[[int, float], float]
) -> Tensor:
    """A row that is rounded column by column, each where the loss e^T H e / 2 is least given all errors made so far.

    `couplings` is H, ``(D, D)``, positive definite. Columns that are not rounded yet could take any value: of them and
    the fixed errors the least is where H_RR e_R + H_RF e_F = 0.
    """
    rounded = row.double().clone()
    for position, column in enumerate(order):
        fixed, rest = list(order[:position]), list(order[position:])
        errors = row[fixed].double() - rounded[fixed]
        moves = torch.linalg.solve(couplings[rest][:, rest], couplings[rest][:, fixed] @ errors)
        rounded[column] = round_one(column, float(row[column].double() + moves[0]))
    return rounded


def couplings_reference(
    predictions: Tensor,
    pooled: dict[tuple[str, str], Tensor],
    bags: dict[tuple[str, str], Bags],
    blocks: dict[str, Sequence[int]],
    second: Callable[[int], Tensor],
    *,
    num_blocks: int,
    is_mean: bool,
) -> dict[str, Tensor]:
    """Sums over samples, and over the ids that each reads, of L'' dz/dx dz/dx', by table and block of the id.

    `pooled` and `bags` are by (table, feature); `predictions` ``(B, T)`` come from `pooled`. `second` gives L'' of a
    sample, ``(T, T)``. Ids of block `num_blocks` count for nothing.
    """
    found = {
        table: torch.zeros(num_blocks, values.shape[1], values.shape[1], dtype=torch.float64)
        for (table, _), values in pooled.items()
    }
    for (table, feature), values in pooled.items():
        for n, bag in enumerate(bags[table, feature]):
            slopes = torch.stack(
                [torch.autograd.grad(z, values, retain_graph=True)[0][n].double() for z in predictions[n]]
            )
            for row in bag:
                if blocks[table][row] < num_blocks:
                    own = slopes / len(bag) if is_mean else slopes
                    found[table][blocks[table][row]] += own.T @ second(n).double() @ own
    return found


def least_loss_reference(
    options: Sequence[Sequence[tuple[int, float]]], table_of_block: Sequence[int], fixed: Sequence[int], budget: int
) -> float:
    """The least loss within a budget, of all ways to choose one (bytes, loss) for every block.

    A table of which any block takes bytes takes its fixed ones, too.
    """
    least = float("inf")
    for choice in itertools.product(*options):
        opened = {table for table, (num_bytes, _) in zip(table_of_block, choice, strict=True) if num_bytes}
        total = sum(num_bytes for num_bytes, _ in choice) + sum(fixed[table] for table in opened)
        if total <= budget:
            least = min(least, sum(loss for _, loss in choice))
    return least


def second_moment_reference(tables: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """``(D, D)`` float64: the outer product of every row with itself, as often as the row was looked up, added up."""
    dim = tables[0].shape[1]
    moment = torch.zeros(dim, dim, dtype=torch.float64)
    for table, of_rows in zip(tables, counts, strict=True):
        for row, count in zip(table.double(), of_rows.tolist(), strict=True):
            moment += count * torch.outer(row, row)
    return moment


def curvature_reference(
    predict: Callable[[dict[str, Tensor]], Tensor],
    alpha: dict[str, Tensor],
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradient and Gauss-Newton curvature of the loss in alpha, one sample, output, block and column at a time.

    `predict` gives ``(B, T)``, differentiable in every table's alpha, ``(S, D)``. Every sample's loss is derived alone.
    """
    alpha = {table: values.clone().requires_grad_() for table, values in alpha.items()}
    predictions = predict(alpha)
    num_samples, num_outputs = predictions.shape
    found = {table: (torch.zeros_like(v), torch.zeros_like(v)) for table, v in alpha.items()}
    for n in range(num_samples):
        z = predictions[n].detach()

        def of_sample(z: Tensor, n: int = n) -> Tensor:
            return loss(z if num_outputs == 1 else z.unsqueeze(0), labels[n : n + 1])

        first = torch.autograd.functional.jacobian(of_sample, z)
        second = torch.autograd.functional.hessian(of_sample, z)
        of_outputs = [
            torch.autograd.grad(predictions[n, t], list(alpha.values()), retain_graph=True, allow_unused=True)
            for t in range(num_outputs)
        ]
        for index, (table, values) in enumerate(alpha.items()):
            for block in range(values.shape[0]):
                for column in range(values.shape[1]):
                    gradients = [of_output[index] for of_output in of_outputs]
                    slopes = [0.0 if own is None else float(own[block, column]) for own in gradients]
                    for t in range(num_outputs):
                        found[table][0][block, column] += float(first[t]) * slopes[t] / num_samples
                        for u in range(num_outputs):
                            bend = slopes[t] * float(second[t, u]) * slopes[u]
                            found[table][1][block, column] += bend / num_samples
    return {table: (g.detach(), h.detach()) for table, (g, h) in found.items()}
