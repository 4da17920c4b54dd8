"""Criteo-shaped data made up on the spot, with a planted number of useful dimensions per block of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from dnis_torchrec.checks import check
from dnis_torchrec.data.batches import Bags
from examples.datasets.in_memory import Samples

NUM_DENSE = 13
LATENT_DIM = 16
PLANTED_BLOCKS = ((0.02, 16), (0.08, 8), (0.3, 4), (1.0, 1))
"""(share of a table's rows, from the most frequent on; useful dimensions of the rows that it adds)."""

SINGLE_ID_TABLES = {"cat_0": 4000, "cat_1": 2000, "cat_2": 1500, "cat_3": 1000, "cat_4": 800, "cat_5": 500}
MULTI_HOT_TABLES = {"multi_0": 1000, "multi_1": 500}
MAX_BAG_LENGTH = 4
ZIPF_EXPONENT = 2.5
ZIPF_SHIFT = 5
"""The id of frequency rank r is drawn with a probability proportional to ``(r + ZIPF_SHIFT) ** -ZIPF_EXPONENT``; the
shift gives every table a dozen frequent rows instead of one, without which two dimensions would do."""
BACKGROUND_SHARE = 0.05
"""Share of ids drawn evenly from all rows instead: about half of a large table's rows are seen, most once or twice."""

_BASE_LOGIT = -0.8
_LOGIT_STD = {"first_order": 0.3, "interaction": 2.5, "dense": 0.5}


@dataclass(frozen=True, kw_only=True, eq=False)
class PlantedSamples:
    """Generated samples and the truth behind them."""

    samples: Samples
    useful_dims: Mapping[str, Tensor]
    logits: Tensor


@lru_cache(maxsize=2)
def generate(num_samples: int, *, seed: int) -> PlantedSamples:
    r"""Generates Criteo-shaped samples: 13 dense features, 6 single-id and 2 multi-hot ones."""
    check(num_samples >= 2, "num_samples", "an integer >= 2", num_samples)
    random = torch.Generator().manual_seed(seed)
    num_embeddings = SINGLE_ID_TABLES | MULTI_HOT_TABLES
    tables = {
        name: _plant_table(num_samples, rows, name in MULTI_HOT_TABLES, random) for name, rows in num_embeddings.items()
    }
    dense = torch.randn(num_samples, NUM_DENSE, generator=random).exp().log1p()
    pooled = torch.stack([table.pooled_latent for table in tables.values()])
    terms = {
        "first_order": torch.stack([table.first_order for table in tables.values()]).sum(dim=0),
        "interaction": (pooled[0::2] * pooled[1::2]).sum(dim=(0, 2)),
        "dense": dense @ torch.randn(NUM_DENSE, generator=random),
    }
    scaled = [(term - term.mean()) * (_LOGIT_STD[name] / term.std()) for name, term in terms.items()]
    logits = _BASE_LOGIT + torch.stack(scaled).sum(dim=0)
    samples = Samples(
        dense=dense,
        ids=torch.stack([tables[name].bags.values for name in SINGLE_ID_TABLES], dim=1),
        labels=torch.bernoulli(torch.sigmoid(logits), generator=random),
        feature_names=tuple(SINGLE_ID_TABLES),
        multi_hot={name: tables[name].bags for name in MULTI_HOT_TABLES},
        num_embeddings=num_embeddings,
    )
    useful_dims = {name: table.useful_dims for name, table in tables.items()}
    return PlantedSamples(samples=samples, useful_dims=useful_dims, logits=logits)


@dataclass(frozen=True, eq=False)
class _PlantedTable:
    bags: Bags
    useful_dims: Tensor
    pooled_latent: Tensor
    first_order: Tensor


def _plant_table(num_samples: int, rows: int, multi_hot: bool, random: torch.Generator) -> _PlantedTable:
    ranked = _draw_bags(num_samples, rows, multi_hot, random)
    row_of_rank = torch.randperm(rows, generator=random)
    bags = Bags(row_of_rank[ranked.values], ranked.offsets)
    ends = torch.tensor([share * rows for share, _ in PLANTED_BLOCKS])
    dims_of_block = torch.tensor([dims for _, dims in PLANTED_BLOCKS])
    rank = torch.argsort(row_of_rank)
    useful_dims = dims_of_block[torch.searchsorted(ends, rank + 1.0)]
    latent = torch.randn(rows, LATENT_DIM, generator=random) * (torch.arange(LATENT_DIM) < useful_dims.unsqueeze(1))
    weights = torch.randn(rows, 1, generator=random)
    return _PlantedTable(bags, useful_dims, _sum_of_bags(latent, bags), _sum_of_bags(weights, bags).squeeze(1))


def _draw_bags(num_samples: int, rows: int, multi_hot: bool, random: torch.Generator) -> Bags:
    """Bags of frequency ranks that follow the law: one id each, or 0..`MAX_BAG_LENGTH` ids."""
    lengths = torch.ones(num_samples, dtype=torch.int64)
    if multi_hot:
        lengths = torch.randint(0, MAX_BAG_LENGTH + 1, (num_samples,), generator=random)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mass = (torch.arange(1, rows + 1, dtype=torch.float64) + ZIPF_SHIFT).pow(-ZIPF_EXPONENT).cumsum(0)
    mass = mass / mass[-1] * (1 - BACKGROUND_SHARE) + torch.linspace(0, BACKGROUND_SHARE, rows + 1)[1:]
    drawn = torch.rand(int(offsets[-1]), dtype=torch.float64, generator=random)
    return Bags(torch.searchsorted(mass, drawn).clamp_(max=rows - 1), offsets)


def _sum_of_bags(table: Tensor, bags: Bags) -> Tensor:
    return functional.embedding_bag(bags.values, table, bags.offsets[:-1], mode="sum")
