"""Latency of lookups: p50 and p99 of every form, side by side with the uncompressed tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.jobs.verification.served import collections_of, served_module
from dnis_torchrec.scheme import MixedDimensionScheme

BATCH_SIZES = (1, 64, 1024, 4096)
WARM_UP_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Lookups of one form of all tables."""

    form: str
    batch_size: int
    p50_ms: float
    p99_ms: float
    ratio: float


def measure_latency(
    artifact: Path, scheme: MixedDimensionScheme, forms: Sequence[str], *, rounds: int = 100
) -> list[Latency]:
    """Times lookups of all forms, on torch's current number of threads."""
    parts = collections_of(scheme)
    modules = {
        form: [served_module(artifact, form, fqn, part) for fqn, part in parts.items()]
        for form in forms
    }
    results = []
    for batch_size in BATCH_SIZES:
        batches = [skewed_batch(part, batch_size) for part in parts.values()]
        times: dict[str, list[float]] = {form: [] for form in forms}
        for _ in range(WARM_UP_ROUNDS):
            for of_form in modules.values():
                _look_up(of_form, batches)
        for _ in range(rounds):
            for form, of_form in modules.items():
                times[form].append(_look_up(of_form, batches))
        dense = torch.tensor(times["uncompressed_fp32"])
        for form, seconds in times.items():
            taken = torch.tensor(seconds)
            results.append(
                Latency(
                    form=form,
                    batch_size=batch_size,
                    p50_ms=1000 * float(taken.quantile(0.5)),
                    p99_ms=1000 * float(taken.quantile(0.99)),
                    ratio=float((taken / dense).quantile(0.5)),
                )
            )
    return results


def skewed_batch(scheme: MixedDimensionScheme, batch_size: int) -> KeyedJaggedTensor:
    """One id per bag; a row's chance falls as one over its number, as in tables sorted by
    frequency."""
    generator = torch.Generator().manual_seed(batch_size)
    rows: dict[str, int] = {}
    for table in scheme.tables.values():
        for feature in table.feature_names:
            rows[feature] = min(rows.get(feature, table.num_embeddings), table.num_embeddings)
    draws = [
        ((count + 1) ** torch.rand(batch_size, generator=generator)).long() - 1
        for count in rows.values()
    ]
    values = torch.cat(
        [ids.clamp(max=count - 1) for ids, count in zip(draws, rows.values(), strict=True)]
    )
    is_weighted = next(iter(scheme.tables.values())).is_weighted
    return KeyedJaggedTensor(
        keys=list(rows),
        values=values,
        weights=torch.ones(values.numel()) if is_weighted else None,
        lengths=torch.ones(values.numel(), dtype=torch.int32),
    )


@torch.inference_mode()
def _look_up(modules: list[nn.Module], batches: list[KeyedJaggedTensor]) -> float:
    # a KeyedJaggedTensor remembers offsets that it once summed up: every lookup gets a fresh one,
    # as a server's do
    fresh = [
        KeyedJaggedTensor(
            keys=b.keys(), values=b.values(), weights=b.weights_or_none(), lengths=b.lengths()
        )
        for b in batches
    ]
    started = time.perf_counter()
    for module, batch in zip(modules, fresh, strict=True):
        module(batch)
    return time.perf_counter() - started
