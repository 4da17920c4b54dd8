"""Budget: a requested size as an amount, and the cost of each retained column of a block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.checks import check, describe
from dnis_torchrec.forms import DEFAULT_FORM, FORMS, form_named

UNSPENT_SHARE = 0.03
"""Share of a budget that may be left unspent before a worse but better fitting choice is taken."""


class SizeOutOfReachError(ValueError):
    """A size that the tables cannot be brought to, or that would leave nothing of them."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A requested size of all tables together: bytes of a form, told in one of two ways.

    Attributes:
        compression: bytes of the float32 tables over those of the form `form`, index bytes counted;
            above 1.
        embedding_bytes: the bytes themselves.
        form: of `dnis_torchrec.forms.FORMS` one in which every column costs the same whatever else
            is retained.
        compression_ratio: the former name of `compression`, for scripts that give it.

    Raises:
        ValueError: if not exactly one of the two is given, it is out of range, or the form is
            another.

    Example:
        >>> Size(compression=10).given, Size(compression=10).num_bytes(dense_parameters=1000)
        (('compression', 10), 400.0)
    """

    compression: float | None = None
    embedding_bytes: int | None = None
    form: str = DEFAULT_FORM
    compression_ratio: InitVar[float | None] = None

    def __post_init__(self, compression_ratio: float | None) -> None:
        if compression_ratio is not None:
            check(
                self.compression is None,
                "size",
                "compression or compression_ratio, its former name",
                "both",
            )
            object.__setattr__(self, "compression", compression_ratio)
        given = self._all_given()
        check(len(given) == 1, "size", "one of compression, embedding_bytes", given or "none")
        name, value = self.given
        above = 1 if name == "compression" else 0
        is_fit = math.isfinite(value) and value > above
        check(is_fit, name, f"a finite number above {above}", value)
        by_column = [form for form, known in FORMS.items() if known.has_column_bytes]
        check(self.form in by_column, "form", f"one of {by_column}", repr(self.form))

    @property
    def given(self) -> tuple[str, float]:
        """Which of the two is given, and its value."""
        ((name, value),) = self._all_given().items()
        return name, value

    def num_bytes(self, dense_parameters: int) -> float:
        """Bytes that the tables may take.

        Args:
            dense_parameters: parameters of the uncompressed tables: the sum of N D.
        """
        if self.compression is not None:
            return round(
                4 * dense_parameters / self.compression, 6
            )  # 6864 / 8.8 is 779.9999999999999
        return self.given[1]

    def _all_given(self) -> dict[str, float]:
        both = {"compression": self.compression, "embedding_bytes": self.embedding_bytes}
        return {name: value for name, value in both.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Budget:
    """An amount of parameters or bytes that may be spent, and the cost of each column."""

    amount: float
    column_costs: Mapping[str, Tensor]

    @staticmethod
    def of(size: Size, blocks: RowBlocks) -> Budget:
        """Turns a size into a budget."""
        budget = Budget.unchecked(size, blocks)
        prices = [cost[blocks.seen_rows[table] > 0] for table, cost in budget.column_costs.items()]
        check(
            any(cost.numel() for cost in prices), "blocks", "rows that training looked up", "none"
        )
        cheapest = min(float(cost.min()) for cost in prices if cost.numel())
        if budget.amount < cheapest:
            raise out_of_reach(size, blocks, cheapest)
        return budget

    @staticmethod
    def unchecked(size: Size, blocks: RowBlocks) -> Budget:
        """Turns a size into a budget as `of` does, even if it pays for nothing."""
        form, dims = form_named(size.form), blocks.embedding_dims
        costs = {
            table: form.bytes_per_column(rows, dims[table])
            for table, rows in blocks.seen_rows.items()
        }
        return Budget(size.num_bytes(_dense_parameters(blocks)) - _fixed_bytes(size, blocks), costs)


def keep_within(scores: Tensor, costs: Tensor, amount: float) -> Tensor:
    """Chooses what to keep: highest score first, as long as the budget lasts; earlier ones first
    among equals."""
    kept = torch.zeros(scores.numel(), dtype=torch.bool)
    left = amount
    for index in torch.argsort(scores, descending=True, stable=True).tolist():
        cost = float(costs[index])
        if float(scores[index]) > 0 and cost <= left:
            kept[index] = True
            left -= cost
    if left > UNSPENT_SHARE * amount:
        _exchange_one_(kept, scores, costs, left)
    return kept


def _exchange_one_(kept: Tensor, scores: Tensor, costs: Tensor, left: float) -> None:
    """Replaces one kept item by a dropped, dearer one, so that less than before is left of the
    budget."""
    dropped = (~kept & (scores > 0)).nonzero().flatten().tolist()
    best: tuple[float, float, int, int] | None = None
    for out in kept.nonzero().flatten().tolist():
        for into in dropped:
            gain = float(costs[into] - costs[out])
            if 0 < gain <= left and (best is None or (gain, -float(scores[out])) > best[:2]):
                best = (gain, -float(scores[out]), out, into)
    if best is not None:
        kept[best[2]], kept[best[3]] = False, True


def _fixed_bytes(size: Size, blocks: RowBlocks) -> int:
    """Bytes that the tables take if nothing of them is retained."""
    form = form_named(size.form)
    return sum(
        form.fixed_bytes(routing, blocks.embedding_dims[t])
        for t, routing in blocks.routings.items()
    )


def _dense_parameters(blocks: RowBlocks) -> int:
    return sum(
        routing.num_embeddings * blocks.embedding_dims[t] for t, routing in blocks.routings.items()
    )


def out_of_reach(size: Size, blocks: RowBlocks, amount: float) -> SizeOutOfReachError:
    """The error for a size that retains nothing; names the smallest one, as the user gave it, that
    retains something."""
    name, received = size.given
    smallest = _fixed_bytes(size, blocks) + amount
    if name == "compression":
        limit = (
            math.floor(100 * 4 * _dense_parameters(blocks) / smallest) / 100
        )  # rounded up, it could not be met
        requirement = f"at most {limit:.2f} for these tables and blocks"
    else:
        requirement = f"at least {math.ceil(smallest * (1 - 1e-12))} for these tables and blocks"
    return SizeOutOfReachError(describe(name, requirement, received))


def check_compresses(size: Size, dense_parameters: int) -> None:
    """Checks that a size in bytes is none above that of the uncompressed tables."""
    name, value = size.given
    limit = 4 * dense_parameters
    if name == "embedding_bytes":
        check(
            value <= limit,
            name,
            f"at most {limit}, what the uncompressed tables take",
            value,
            "ask for less",
        )
