"""export: from a merged and pruned model to an artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dnis_torchrec.artifact.over_ranks import write_over_ranks
from dnis_torchrec.artifact.writing import write_artifact
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.selection.shards import (
    TableShard,
    check_merged,
    collections,
    dense_state,
    local_shards,
    ranks_of,
    table_configs_of,
)


def export(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    path: Path | str,
    *,
    forms: Sequence[str] | None = None,
    run: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a merged and pruned model as an artifact; its dense weights go along.

    Local, no collective, where the model is plain. Distributed: every rank of a sharded model calls
    it and writes its own shards, rank 0 the manifest, into one folder that all ranks see (see
    `over_ranks`); what is read back is the same.

    Args:
        model: merged by `merge_` and pruned by `prune`, plain or sharded.
        scheme: the result of `prune`.
        path: folder to write.
        forms: see `write_artifact`.
        run: configuration and figures to keep in the manifest; any JSON.
        overwrite: replace an artifact that stands at `path`.

    Returns:
        `path`.

    Raises:
        RuntimeError: if the model was never searched, or is not merged yet.
        ValueError: if the scheme retains no value at all; else see `write_artifact`; on all ranks
            alike.
    """
    found = collections(model)
    ranks = ranks_of(*found.values())
    for fqn, module in found.items():
        check_merged(fqn, module, ranks)
    if not scheme.tables:
        raise RuntimeError(
            describe(
                "export", "a scheme of searched tables", "an empty one", "search and prune first"
            )
        )
    shards: dict[str, list[TableShard]] = {
        config.name: [] for m in found.values() for config in table_configs_of(m)
    }
    for shard in (shard for module in found.values() for shard in local_shards(module)):
        shards[shard.table].append(shard)
    for name in scheme.tables:
        check_known("table", name, shards)
    check(
        scheme.parameters > 0,
        "export",
        "a scheme that retains a value",
        "none",
        "prune to a larger size",
    )
    dense, forms = dense_state(model), (scheme.form,) if forms is None else forms
    if ranks.world_size > 1:
        return write_over_ranks(
            shards,
            scheme,
            Path(path),
            ranks,
            forms=forms,
            dense_state=dense,
            run=run,
            overwrite=overwrite,
        )
    return write_artifact(
        {name: shards[name][0].weight for name in scheme.tables},
        scheme,
        path,
        forms=forms,
        dense_state=dense,
        run=run,
        overwrite=overwrite,
    )
