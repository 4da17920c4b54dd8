"""Scalar (dense) features as fields of their own, for models that know nothing but ids: two ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dnis_torchrec.checks import check
from examples.datasets.in_memory import Samples, frequency_rank


def bucketised(samples: Samples, names: Sequence[str], train_rows: Tensor, *, num_buckets: int = 32) -> Samples:
    """Turns every scalar into one id: the number of the quantile of the training data that its value falls into."""
    check(num_buckets >= 2, "num_buckets", "an integer >= 2", num_buckets)
    _check_names(samples, names)
    inner = np.linspace(0, 1, num_buckets + 1)[1:-1]
    ids, num_embeddings = [samples.ids], dict(samples.num_embeddings)
    for name, values in zip(names, samples.dense.t(), strict=True):
        quantiles = np.quantile(values[train_rows].numpy(), inner, method="inverted_cdf")
        boundaries = torch.from_numpy(np.unique(quantiles))
        buckets = torch.bucketize(values, boundaries, out_int32=True)
        num_embeddings[name] = len(boundaries) + 1
        rank = frequency_rank(buckets[train_rows], num_embeddings[name]).to(samples.ids.dtype)
        ids.append(rank[buckets].unsqueeze(1))
    return replace(
        samples,
        dense=samples.dense[:, :0],
        ids=torch.cat(ids, dim=1),
        feature_names=(*samples.feature_names, *names),
        num_embeddings=num_embeddings,
    )


def weighted(samples: Samples, names: Sequence[str]) -> Samples:
    """Serves every scalar as a bag of one id whose per-sample weight is the value; the table has one row per scalar."""
    _check_names(samples, names)
    return replace(samples, scalar_names=tuple(names))


def _check_names(samples: Samples, names: Sequence[str]) -> None:
    num_scalars = samples.dense.shape[1]
    check(len(names) == num_scalars > 0, "scalars", f"{num_scalars} names of at least one scalar", len(names))
