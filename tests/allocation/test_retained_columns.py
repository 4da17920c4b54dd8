"""Which columns are worth their bytes where all values take the same bits: brute force; prepared models are taken."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dnis_torchrec.allocation.bits import allocate, retained_columns
from dnis_torchrec.allocation.energies import blocked_tables, check_all_merged, rounding_energies
from dnis_torchrec.forms import PACKED
from dnis_torchrec.selection.swap import prepare_
from tests import small_models
from tests.allocation.test_allocate import Model
from tests.reference import least_loss_reference

MODELS = st.builds(
    lambda sizes, num_blocks, seed: Model([n for n, _ in sizes], [d for _, d in sizes], num_blocks, seed, (0, 4)),
    sizes=st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 3, 8])), min_size=1, max_size=2),
    num_blocks=st.integers(1, 2),
    seed=st.integers(0, 10_000),
)
BITS = st.sampled_from([2, 4, 8])


def retained(model: Model, bits: int, compression: float) -> dict[str, Tensor]:
    """Of the worth that the model was drawn with."""
    tables = blocked_tables(model.collection, model.blocks)
    return retained_columns(tables, model.blocks, model.curvature.curvature, bits=bits, compression=compression)


def fixed_of(model: Model) -> list[int]:
    return [PACKED.index_bytes(model.blocks.routings[c.name], c.embedding_dim) for c in model.configs]


def bytes_of(model: Model, found: dict[str, Tensor], bits: int) -> int:
    """Rows of whole bytes, four bytes of scale and shift for every column of a block, the index of what is stored."""
    total = 0
    for (name, columns), fixed in zip(found.items(), fixed_of(model), strict=True):
        rows = model.blocks.routings[name].row_counts().tolist()
        own = [n * math.ceil(k * bits / 8) + 4 * k for n, k in zip(rows, columns.sum(1).tolist(), strict=True)]
        total += sum(own) + fixed if any(own) else 0
    return total


def worth_of(model: Model, name: str) -> list[list[float]]:
    return model.curvature.curvature[name].clamp(min=0).tolist()


def loss_of(model: Model, found: dict[str, Tensor]) -> float:
    """What the dropped columns were worth."""
    dropped = [
        value
        for name, columns in found.items()
        for worths, kept in zip(worth_of(model, name), columns.tolist(), strict=True)
        for value, is_kept in zip(worths, kept, strict=True)
        if not is_kept
    ]
    return sum(dropped)


def least_loss(model: Model, bits: int, budget: int, *, fixed: list[int]) -> float:
    """Of all ways to give every block so many of its best columns."""
    options, table_of_block = [], []
    for table, config in enumerate(model.configs):
        rows = model.blocks.routings[config.name].row_counts().tolist()
        for num_rows, worths in zip(rows, worth_of(model, config.name), strict=True):
            best = sorted(worths, reverse=True)
            counts = range(len(best) + 1) if num_rows else [0]
            options.append([(num_rows * math.ceil(k * bits / 8) + 4 * k, sum(best[k:])) for k in counts])
            table_of_block.append(table)
    return least_loss_reference(options, table_of_block, fixed, budget)


@settings(max_examples=60, deadline=None)
@given(model=MODELS, bits=BITS, compression=st.floats(1.1, 40))
@example(model=Model([1, 6], [8, 8], 1, 0, (0, 4)), bits=2, compression=9.0)  # 224 bytes / 8.96 is 24.99.. in floats
def test_columns_are_chosen_as_well_as_brute_force_would(model: Model, bits: int, compression: float) -> None:
    """Within the bytes, the best columns of each block, and no worse than what a step fewer could buy."""
    try:
        found = retained(model, bits, compression)
    except ValueError as error:
        largest = float(str(error).split("at most ")[1].split(" ")[0])
        assert largest < compression
        if largest > 1:
            found, compression = retained(model, bits, largest), largest
        else:
            return
    budget, fixed = math.floor(model.dense_bytes / compression * (1 + 1e-12)), fixed_of(model)
    assert bytes_of(model, found, bits) <= budget
    assert any(columns.any() for columns in found.values())
    for name, columns in found.items():
        for worths, kept in zip(model.curvature.curvature[name], columns, strict=True):
            if kept.any() and not kept.all():
                assert float(worths[kept].min()) >= float(worths[~kept].max())
    lost = loss_of(model, found)
    assert lost >= least_loss(model, bits, budget, fixed=fixed) - 1e-9
    rows = max(int(routing.row_counts().max()) for routing in model.blocks.routings.values())
    largest_step = rows * 8 + 4 * 8 + max(fixed)
    fewer = budget - largest_step - sum(fixed)
    if fewer >= 0:
        assert lost <= least_loss(model, bits, fewer, fixed=[0] * len(fixed)) + 1e-9


@settings(max_examples=40, deadline=None)
@given(model=MODELS, bits=BITS, compressions=st.lists(st.floats(1.1, 40), min_size=2, max_size=5))
def test_smaller_tables_never_lose_less(model: Model, bits: int, compressions: list[float]) -> None:
    losses = []
    for compression in sorted(compressions):
        try:
            losses.append(loss_of(model, retained(model, bits, compression)))
        except ValueError:  # and none that is smaller either
            losses.append(math.inf)
    assert all(larger <= smaller + 1e-12 for larger, smaller in pairwise(losses))


def test_what_is_worth_much_for_its_bytes_stays_however_few_its_columns() -> None:
    """A table of one column beside a wide one of as many rows."""
    model = Model([400, 400], [1, 16], 1, 0, (0, 4))
    model.curvature.curvature["t1"].copy_(torch.linspace(1.0, 0.2, 16))
    model.curvature.curvature["t0"].fill_(3.0)
    found = retained(model, 4, 12)
    assert bool(found["t0"].all())
    assert 0 < int(found["t1"].sum()) < 16
    model.curvature.curvature["t0"].fill_(0.1)
    assert not bool(retained(model, 4, 12)["t0"].any())


def test_a_prepared_model_whose_alpha_is_one_is_measured_as_the_plain_one_is() -> None:
    plain = small_models.dlrm()
    blocks, counts = small_models.blocks_for(plain, "table"), small_models.counts()
    expected = rounding_energies(plain, blocks, counts)
    prepared = prepare_(plain, blocks)
    check_all_merged(prepared)
    found = rounding_energies(prepared, blocks, counts)
    assert all(torch.equal(found.tables[name].energy, own.energy) for name, own in expected.tables.items())
    small_models.alpha_of(prepared).of(8)[0, 0] = 0.5
    with pytest.raises(RuntimeError, match="expected a merged collection, got alpha below 1; call merge_ first"):
        check_all_merged(prepared)
    with pytest.raises(RuntimeError, match="call merge_ first"):
        allocate(prepared, blocks, counts, None, compression=8, energies=found)  # type: ignore[arg-type]
