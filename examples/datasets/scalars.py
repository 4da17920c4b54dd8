"""Scalar (dense) features as fields of their own, for models that know nothing but ids: two ways.

Shapes: n samples of the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dnis_torchrec.checks import check
from examples.datasets.in_memory import Samples, frequency_rank


def bucketised(samples: Samples, names: Sequence[str], train_rows: Tensor, *, num_buckets: int = 32) -> Samples:
    """Turns every scalar into one id: the number of the quantile of the training data that its value falls into.

    Args:
        samples: whose `dense` to turn into further single-id features.
        names: names of the new features, one per column of `dense`.
        train_rows: the training samples; nothing else is counted.
        num_buckets: buckets at most; equal quantiles, as of a scalar that is often 0, share one.

    Returns:
        The samples without dense features; the new tables' rows are in falling order of frequency.

    Raises:
        ValueError: if there is not one name per scalar, or `num_buckets` is below 2.

    Example:
        >>> dense, ids = torch.tensor([[0.0], [0.0], [5.0], [9.0]]), torch.zeros(4, 0, dtype=torch.int64)
        >>> samples = Samples(dense=dense, ids=ids, labels=torch.zeros(4), feature_names=(), num_embeddings={})
        >>> bucketised(samples, ["age"], torch.arange(4), num_buckets=4).ids.flatten().tolist()
        [0, 0, 1, 2]
    """
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
    """Serves every scalar as a bag of one id whose per-sample weight is the value; the table has one row per scalar.

    Args:
        samples: whose `dense` to serve.
        names: names of the new features, one per column of `dense`.

    Returns:
        The same samples for tables of ``build_tables(..., scalar_names=names)``; `dense` stays.

    Raises:
        ValueError: if there is not one name per scalar.
    """
    _check_names(samples, names)
    return replace(samples, scalar_names=tuple(names))


def _check_names(samples: Samples, names: Sequence[str]) -> None:
    num_scalars = samples.dense.shape[1]
    check(len(names) == num_scalars > 0, "scalars", f"{num_scalars} names of at least one scalar", len(names))
