"""Rows that the counts never saw have a place in the small form that is trained on, and learn one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.search.prune import Size, prune
from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection
from tests.serving_reference import Case, cases, keyed_jagged_tensor, routings, table_scheme

ROWS, SEEN = 40, 25
SHUFFLED = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
"""An order in which no block is dropped whole: the rows of such a one are in no block, as new ones are."""
TABLE = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])


def bags_of(ids: list[int]) -> object:
    return keyed_jagged_tensor({"f": [[(row, 1.0)] for row in ids]})


def searched(order: torch.Tensor) -> tuple[MixedDimensionScheme, dict[str, torch.Tensor], list[int], list[int]]:
    """A pruned table, the rows that were counted, and those that were not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[TABLE])})
    seen, new = order[:SEEN].tolist(), order[SEEN:].tolist()
    counts = count_frequencies([bags_of(seen[: SEEN // 2] + seen)], [TABLE])
    scheme = prune(model, blocks_from_counts(counts, [TABLE], num_blocks=4), counts, size=Size(compression=2))
    return scheme, {"t": model["ebc"].embedding_bags["t"].weight.detach()}, seen, new


@pytest.mark.parametrize("order", [torch.arange(ROWS), torch.arange(ROWS).flip(0), SHUFFLED])
def test_a_new_row_learns_and_no_other_does(order: torch.Tensor) -> None:
    scheme, tables, seen, new = searched(order)
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, dim_multiple=4)
    torch.testing.assert_close(module(bags_of(seen)).values(), tables["t"][seen])
    before = module(bags_of([*seen, *new])).values().detach()
    bound = ROWS**-0.5
    assert before[SEEN:].abs().max() <= bound
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        (module(bags_of([new[-1]])).values() - 1).square().sum().backward()
        optimizer.step()
    after = module(bags_of([*seen, *new])).values().detach()
    kept = int((after[-1] != 0).sum())
    assert kept > 0
    torch.testing.assert_close(after[-1].sum(), torch.tensor(float(kept)), atol=1e-3, rtol=0)
    assert torch.equal(after[:-1], before[:-1])


def test_without_a_place_they_are_zero_for_good() -> None:
    scheme, tables, _, new = searched(torch.arange(ROWS))
    module = MixedDimensionEmbeddingBagCollection.from_tables(scheme, tables, new_rows=False)
    assert not module(bags_of(new)).values().any()
    assert sum(p.numel() for p in module.parameters()) == scheme.tables["t"].block_area


@given(cases())
def test_rows_of_a_block_are_what_they_were(case: Case) -> None:
    module = MixedDimensionEmbeddingBagCollection.from_tables(case.scheme, case.tables)
    for table in case.scheme.tables.values():
        blocks = table.routing.all_blocks()
        for feature in table.feature_names:
            case.bags[feature] = [
                [own for own in bag if blocks[own[0]] < table.routing.num_blocks] for bag in case.bags[feature]
            ]
    for name, pooled in case.expected().items():
        torch.testing.assert_close(module(case.kjt()).to_dict()[name], pooled, rtol=1e-6, atol=1e-6)


@given(routings(), st.data())
def test_they_go_to_the_last_block_that_retains_a_column(routing: RowRouting, data: st.DataObject) -> None:
    keeps = data.draw(st.lists(st.booleans(), min_size=routing.num_blocks, max_size=routing.num_blocks))
    retained = torch.tensor(keeps).unsqueeze(1).expand(-1, 3)
    wider = table_scheme("t", routing, retained).with_new_rows()
    last = max((s for s, keep in enumerate(keeps) if keep), default=routing.num_blocks)
    expected = [last if block == routing.num_blocks else block for block in routing.all_blocks().tolist()]
    assert wider.routing.all_blocks().tolist() == expected
