"""Bits for every column of every block, under a budget of bytes or of loss."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dnis_torchrec.allocation import spending
from dnis_torchrec.allocation.curvature import Curvature
from dnis_torchrec.allocation.energies import (
    BITS,
    ModelTable,
    RoundingEnergies,
    blocked_tables,
    check_all_merged,
    rounding_energies,
)
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.codes import FLOAT_BITS, ColumnCodes, feedback_of
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import directory_bytes
from dnis_torchrec.checks import check, check_known
from dnis_torchrec.scheme import (
    PACKED,
    MixedDimensionScheme,
    TableScheme,
    compression_of,
    packed_index_bytes,
)

LISTED = 12
"""Tables that are listed one by one, the largest; the others are added up."""


def sizes_as_text(scheme: MixedDimensionScheme) -> list[str]:
    """A line for each table."""
    return [
        f"  {name}: {values:,} values, {size:,} bytes, {8 * size / values:.2f} bits a value"
        for name, values, size in _sizes(scheme)
    ]


def sizes_as_html(scheme: MixedDimensionScheme, captions: Sequence[str]) -> str:
    """A row for each table, for ``_repr_html_``."""
    rows = [
        f"<tr><th>{escape(name)}</th><td>{values:,}</td><td>{size:,}</td>"
        f"<td>{8 * size / values:.2f}</td></tr>"
        for name, values, size in _sizes(scheme)
    ]
    caption = "<br>".join(map(escape, captions))
    head = "<tr><th>table</th><th>values</th><th>bytes served</th><th>bits a value</th></tr>"
    body = f"<tbody>{''.join(rows)}</tbody>"
    return f"<table><caption>{caption}</caption><thead>{head}</thead>{body}</table>"


def _sizes(scheme: MixedDimensionScheme) -> list[tuple[str, int, int]]:
    """(name, values, bytes served) of each table."""
    sizes = [
        (name, table.num_embeddings * table.embedding_dim, table.served_bytes(PACKED))
        for name, table in scheme.tables.items()
    ]
    largest = sorted(sizes, key=lambda size: size[1], reverse=True)[:LISTED]
    rest = [size for size in sizes if size not in largest]
    if not rest:
        return sizes
    values, num_bytes = (sum(part) for part in list(zip(*rest, strict=True))[1:])
    sums = f"{len(rest)} other tables", values, num_bytes
    return [*(size for size in sizes if size in largest), sums]


GUESSES = 8
"""The price of a directory depends on which blocks get bytes. So many guesses are tried: the eighth
of the blocks that is worth most a row, two eighths, and so on."""
LEAST_CODED_ROWS, SMALL_SHARE, USUAL_COMPRESSION = 5, 0.1, 20.0
"""A column of fewer rows takes less as fp16 than in codes of 8 bits: such tables stay float32 where
all of them together take at most this share of the bytes, or of those at the usual compression."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What tables in codes are predicted to do to a model."""

    loss_increase: float
    output_shift: float = 0.0
    scheme: MixedDimensionScheme | None = None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Allocation:
    """An assignment of bits to every column of every block. The same on every rank."""

    scheme: MixedDimensionScheme
    predicted_loss_increase: float
    """What `predict` said, or else, to second order, the sum of H / 2 rho over all columns."""
    num_bytes: int
    output_shift: float = 0.0
    """What `dnis_torchrec.compress` has added to the output bias, and `Measured.shifted` adds."""
    starved_share: float = 0.0
    """Of the lookups in training, those of rows that are worth bytes and get none."""

    @property
    def compression(self) -> float:
        """Bytes of the float32 tables over the bytes served."""
        return compression_of(self.scheme.dense_parameters, self.num_bytes)

    def __repr__(self) -> str:
        """The whole in one line."""
        size = f"compression {self.compression:.2f}, {self.num_bytes:,} bytes"
        increase = f"predicted loss increase {self.predicted_loss_increase:.2g}"
        return f"Allocation({size}, {increase})"

    def __str__(self) -> str:
        """The whole, and a line for each table."""
        return "\n".join([*self._captions(), *sizes_as_text(self.scheme)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return sizes_as_html(self.scheme, self._captions())

    def _captions(self) -> list[str]:
        sentence = f"At this size rows of {self.starved_share:.1%} of the lookups read as zeros."
        return [repr(self)] + [sentence] * (self.starved_share > 0)


def allocate(
    model: nn.Module,
    blocks: RowBlocks,
    counts: FrequencyCounts,
    curvature: Curvature,
    *,
    compression: float | None = None,
    max_loss: float | None = None,
    bits: Sequence[int] = BITS,
    energies: RoundingEnergies | None = None,
    predict: Callable[[MixedDimensionScheme], Prediction] | None = None,
) -> Allocation:
    """Chooses how many bits every column of every block gets, for a compression or the loss that
    may be lost at most; `predict`, if given, says what the chosen scheme costs.

    Distributed: that of `rounding_energies`, where they are not given, and of `predict`, which is
    called once, or a dozen times for a largest loss. All ranks get the same bits.
    """
    _check_sizes({"compression": compression, "max_loss": max_loss})
    check_all_merged(model)
    every = blocked_tables(model, blocks)
    dense = sum(map(_dense_bytes, every))
    budget = _bytes_at(compression or USUAL_COMPRESSION, dense)
    tables, left_alone = _split(every, blocks, _smallest(every, blocks, curvature, budget))
    energy = energies or rounding_energies(model, blocks, counts, bits=bits)
    widths = sorted({0, *bits})
    losses = _predicted_losses(tables, blocks, curvature, energy, widths)
    problem = _Problem.of(tables, blocks, losses, torch.tensor(widths))

    def allocation(spent: spending.Spent) -> Allocation:
        schemes = problem.schemes(spent, energy, curvature.couplings) | left_alone
        scheme = MixedDimensionScheme({table.name: schemes[table.name] for table in every})
        result = Allocation(
            scheme=scheme,
            predicted_loss_increase=max(0.0, float(problem.losses(spent).sum())),
            num_bytes=scheme.served_bytes(PACKED),
            starved_share=problem.starved_share(spent),
        )
        if predict is None:
            return result
        prediction = predict(result.scheme)
        scheme = prediction.scheme or result.scheme
        increase, shift = prediction.loss_increase, prediction.output_shift
        return replace(result, scheme=scheme, predicted_loss_increase=increase, output_shift=shift)

    if max_loss is not None:
        return allocation(
            problem.within_loss(max_loss, lambda spent: allocation(spent).predicted_loss_increase)
        )
    base = sum(table.served_bytes(PACKED) for table in left_alone.values())
    return allocation(problem.within(compression or 1.0, dense, base))


def retained_columns(
    tables: Sequence[ModelTable],
    blocks: RowBlocks,
    worth: Mapping[str, Tensor],
    *,
    bits: int,
    compression: float,
) -> dict[str, Tensor]:
    """Chooses which columns of every block are worth their bytes, if a value takes the same number
    of bits everywhere."""
    losses = {}
    rest, left_alone = _split(tables, blocks)
    for table in rest:
        name = table.name
        has_rows = (blocks.routings[name].row_counts() > 0)[:, None]
        loss = worth[name].double().cpu().clamp(min=0) * has_rows
        losses[name] = torch.stack([loss, torch.zeros_like(loss)], 2)
    problem = _Problem.of(rest, blocks, losses, torch.tensor([0, bits]))
    base = sum(table.served_bytes(PACKED) for table in left_alone.values())
    dense = sum(map(_dense_bytes, tables))
    spent = problem.within(compression, dense, base)
    columns = {name: width > 0 for name, width in problem.bits_of(spent).items()}
    return columns | {name: table.retained for name, table in left_alone.items()}


def _smallest(
    tables: Sequence[ModelTable], blocks: RowBlocks, curvature: Curvature, budget: int
) -> list[str]:
    """Names of the tables that are too small for codes, if the budget has room for them."""
    smallest = []
    for table in tables:
        name, num_rows = table.name, table.config.num_embeddings
        is_small = num_rows < LEAST_CODED_ROWS and blocks.routings[name].num_blocks == 1
        worth = curvature.curvature.get(name)
        is_read = worth is not None and bool((worth > 0).any())
        if is_small and is_read and name not in blocks.left_alone:
            smallest.append(table)
    num_bytes = sum(_dense_bytes(table) + table.config.embedding_dim for table in smallest)
    return [table.name for table in smallest] if num_bytes <= SMALL_SHARE * budget else []


def _split(
    tables: Sequence[ModelTable], blocks: RowBlocks, smallest: Sequence[str] = ()
) -> tuple[list[ModelTable], dict[str, TableScheme]]:
    """The tables that get bits, and the schemes of those that are left alone: float32 in every
    column."""
    rest, alone = list[ModelTable](), dict[str, TableScheme]()
    names = blocks.left_alone | {*smallest}
    for table in tables:
        name = table.name
        if name not in names:
            rest.append(table)
            continue
        shape = (blocks.routings[name].num_blocks, table.config.embedding_dim)
        bits, scale = torch.full(shape, FLOAT_BITS, dtype=torch.uint8), torch.ones(shape)
        codes = ColumnCodes(bits, scale, torch.zeros(shape, dtype=torch.int16))
        alone[name] = table.scheme(blocks.routings[name], bits > 0, **vars(codes))
    check(bool(rest), "blocks", "a table beside those that are left alone", "none")
    return rest, alone


def _dense_bytes(table: ModelTable) -> int:
    return 4 * math.prod(table.shape)


@dataclass(frozen=True, eq=False)
class _Problem:
    """All tables together, their blocks one after the other, ready to be spent on."""

    tables: list[ModelTable]
    blocks: RowBlocks
    bits: Tensor
    rows: Tensor
    table_of_block: Tensor
    steps: spending.ColumnSteps
    options: spending.RowOptions

    @staticmethod
    def of(
        tables: list[ModelTable], blocks: RowBlocks, loss: Mapping[str, Tensor], bits: Tensor
    ) -> _Problem:
        """Finds the path through the predicted losses of all columns at all widths, table -> ``(S,
        D, K)``."""
        routings = [blocks.routings[table.name] for table in tables]
        widest = max(table.config.embedding_dim for table in tables)
        by_bits = torch.cat(
            [pad(part, (0, 0, 0, widest - part.shape[1])) for part in loss.values()]
        )
        rows = torch.cat([routing.row_counts() for routing in routings])
        steps = spending.column_steps(by_bits, rows, bits)
        options = spending.row_options(steps, by_bits[..., 0].sum(1), rows)
        num_blocks = torch.tensor([routing.num_blocks for routing in routings])
        table_of_block = torch.arange(len(tables)).repeat_interleave(num_blocks)
        return _Problem(tables, blocks, bits, rows, table_of_block, steps, options)

    def purses(self) -> Iterator[spending.Purse]:
        """Prices of directories, by guesses which blocks will have bytes. A table pays for that of
        its guess, and each block beyond for what its rows add: what comes true is exact."""
        worth, previous = self.options.loss[:, 0] / self.rows.clamp(min=1), None
        order = worth.argsort(descending=True, stable=True)[: int((worth > 0).sum())]
        for count in range(GUESSES, 0, -1):
            guess = torch.zeros(len(worth), dtype=torch.bool)
            guess[order[: -(-len(order) * count // GUESSES)]] = True
            prices = [self._directory(t, guess) for t in range(len(self.tables))]
            of_tables = torch.tensor([price for price, _ in prices])
            extra = torch.cat([of_blocks for _, of_blocks in prices])
            if previous is None or not torch.cat([of_tables, extra]).equal(previous):
                num_bytes = self.options.num_bytes.clone()
                num_bytes[:, 1:] += extra[:, None]
                path = spending.Path.of(replace(self.options, num_bytes=num_bytes))
                yield spending.Purse(path, self.table_of_block, of_tables)
            previous = torch.cat([of_tables, extra])

    def _directory(self, number: int, guess: Tensor) -> tuple[int, Tensor]:
        """What a table pays beside its codes if these blocks have bytes, and each other for its."""
        config = self.tables[number].config
        routing, here = self.blocks.routings[config.name], guess[self.table_of_block == number]
        base, each = directory_bytes(routing, here), torch.eye(len(here), dtype=torch.bool)
        extra = [
            0 if has_bytes else max(0, directory_bytes(routing, here | one) - base)
            for has_bytes, one in zip(here.tolist(), each, strict=True)
        ]
        return base + len(here) * config.embedding_dim, torch.tensor(extra)

    def within(self, compression: float, dense: int, base: int) -> spending.Spent:
        """The most that a compression of all tables buys, beside the bytes of those left alone."""
        budget, bought, smallest = _bytes_at(compression, dense) - base, [], []
        for purse in self.purses():
            spent, excess = purse.spend(budget), 0
            smallest += [spent.smallest]
            while bool(spent.row_bytes.any()) and (over := self._num_bytes(spent) - budget) > 0:
                excess += over  # many blocks beyond the guess share a directory of longer numbers
                spent = purse.spend(budget - excess)
            if bool(spent.row_bytes.any()):
                bought.append(spent)
        if not bought:  # more digits could not be met
            most = math.floor(100 * dense / (min(smallest) + base)) / 100
            requirement = f"at most {most:.2f} for these tables and blocks"
            alone = sorted(self.blocks.left_alone)
            remedy = f"leave less alone than {alone}: {base:,} of {dense:,} bytes stay float32"
            check(False, "compression", requirement, compression, remedy if alone else "")
        return min(bought, key=lambda spent: float(self.losses(spent).sum()))

    def losses(self, spent: spending.Spent) -> Tensor:
        """What each block loses."""
        return self.options.loss.gather(1, spent.row_bytes[:, None])[:, 0]

    def _num_bytes(self, spent: spending.Spent) -> int:
        """Bytes of all tables that have any; at most so many where float32 stands among codes."""
        num_bytes = int(self.options.num_bytes.gather(1, spent.row_bytes[:, None]).sum())
        for name, bits in self.bits_of(spent).items():
            if bool(bits.any()):
                num_bytes += packed_index_bytes(self.blocks.routings[name], bits)
        return num_bytes

    def within_loss(
        self, max_loss: float, loss_of: Callable[[spending.Spent], float]
    ) -> spending.Spent:
        """The fewest bytes along the path that are predicted to cost no more loss than this."""
        purse = next(self.purses())
        first, num_steps = purse.first, len(purse.path.block)
        most, least = (loss_of(first(count)) for count in (0, num_steps))
        remedy = "allow more loss, or offer more bits"
        requirement = f"at least {least:.3g} for these bits"
        check(max_loss >= least, "max_loss", requirement, max_loss, remedy)
        requirement = f"less than {most:.3g}, which dropping all tables is predicted to cost"
        check(max_loss < most, "max_loss", requirement, max_loss)
        counts = range(num_steps + 1)
        return first(bisect_left(counts, -max_loss, key=lambda count: -loss_of(first(count))))

    def bits_of(self, spent: spending.Spent) -> dict[str, Tensor]:
        """Table -> ``(S, D)``, the bits that the bytes have bought."""
        widest = max(table.config.embedding_dim for table in self.tables)
        index = spending.widths_of(self.steps, self.options, spent.row_bytes, widest)
        sizes = [self.blocks.routings[table.name].num_blocks for table in self.tables]
        return {
            table.name: of_table[:, : table.config.embedding_dim].contiguous()
            for table, of_table in zip(self.tables, self.bits[index].split(sizes), strict=True)
        }

    def schemes(
        self, spent: spending.Spent, energies: RoundingEnergies, couplings: Mapping[str, Tensor]
    ) -> dict[str, TableScheme]:
        """The schemes with the codes that the bytes have bought."""
        schemes = {}
        for table, (name, bits) in zip(self.tables, self.bits_of(spent).items(), strict=True):
            codes = energies.codes(name, bits)
            if name in couplings:
                codes = replace(codes, feedback=feedback_of(couplings[name], codes.bits))
            fields = vars(codes) | {"largest_value": energies.largest.get(name)}
            schemes[name] = table.scheme(self.blocks.routings[name], codes.bits > 0, **fields)
        return schemes

    def starved_share(self, spent: spending.Spent) -> float:
        """Of the lookups in training, those of rows that are worth bytes and get none."""
        lookups = torch.cat([self.blocks.occurrences[table.name] for table in self.tables])
        is_starved = (spent.row_bytes == 0) & (self.options.loss[:, 0] > 0)
        return float(lookups[is_starved].sum() / lookups.sum().clamp(min=1))


def _predicted_losses(
    tables: list[ModelTable],
    blocks: RowBlocks,
    curvature: Curvature,
    energies: RoundingEnergies,
    bits: list[int],
) -> dict[str, Tensor]:
    """Table -> ``(S, D, K)`` float64: H / 2 times the energy of every width; 0 in blocks without
    rows."""
    absent = sorted(set(bits) - set(energies.bits))
    remedy = "measure them with these bits"
    check(not absent, "energies", f"those of {bits} bits", f"none of {absent}", remedy)
    index = [energies.bits.index(width) for width in bits]
    losses = {}
    for table in tables:
        name = table.name
        shape = (blocks.routings[name].num_blocks, table.config.embedding_dim)
        check_known("table", name, curvature.curvature)
        check_known("table", name, energies.tables)
        worth, energy = curvature.curvature[name].double().cpu(), energies.tables[name].energy
        place, is_finite = f"table {name!r}", bool(worth.isfinite().all())
        for what, size in (("curvature", worth.shape), ("energies", energy.shape[:2])):
            check(size == shape, place, f"{what} of (S, D) = {shape}", tuple(size))
        check(is_finite, place, "a finite curvature", "NaN or infinity")
        has_rows = blocks.routings[name].row_counts() > 0
        losses[name] = energy[..., index] * (worth.clamp(min=0) / 2 * has_rows[:, None])[..., None]
    total = sum(float(loss[..., 0].sum()) for loss in losses.values())
    remedy = "train the model, and measure on samples that look these tables up"
    check(total > 0, "curvature", "a column of a table that is worth something", "none", remedy)
    return losses


def _check_sizes(sizes: Mapping[str, float | None]) -> None:
    options = {name: value for name, value in sizes.items() if value is not None}
    actual = ", ".join(options) or "none"
    check(len(options) == 1, "size", f"exactly one of {', '.join(sizes)}", actual)
    for name, value in options.items():
        check(math.isfinite(value) and value > 0, name, "a finite number above 0", value)


def _bytes_at(compression: float, dense: int) -> int:
    """Bytes that a compression leaves of those of the float32 tables: 25 of 224 at 8.96, where a
    quotient is 24.99.."""
    return math.floor(dense / compression * (1 + 1e-12))
