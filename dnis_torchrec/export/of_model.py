"""export: from a merged and pruned model to an artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.checks import check_known, describe
from dnis_torchrec.export.exporting import ARTIFACT_FORMS, write_artifact
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.table_shards import collections, local_shards


def export(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    path: Path | str,
    *,
    forms: Sequence[str] = ARTIFACT_FORMS,
    run: Mapping[str, Any] | None = None,
    scipy_formats: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Writes a merged and pruned model as an artifact; its dense weights go along. Local, no collective.

    Args:
        model: the plain model that `merge_` gave and `prune` pruned.
        scheme: what `prune` returned.
        path: folder to write.
        forms: see `write_artifact`.
        run: configuration and figures to keep in the manifest; any JSON.
        scipy_formats: see `write_artifact`.
        overwrite: replace an artifact that stands at `path`.

    Returns:
        `path`.

    Raises:
        RuntimeError: if the model was never searched, or is not merged yet.
        ValueError: see `write_artifact`.
    """
    tables: dict[str, Tensor] = {}
    for fqn, module in collections(model).items():
        if not isinstance(module, EmbeddingBagCollection):
            place, received = f"FQN {fqn!r}", type(module).__name__
            raise RuntimeError(describe(place, "expected a merged collection", received, "call merge_, then prune"))
        tables |= {shard.table: shard.weight for shard in local_shards(module)}
    if not scheme.tables:
        raise RuntimeError(
            describe("export", "expected a scheme of searched tables", "an empty one", "search and prune first")
        )
    for name in scheme.tables:
        check_known("table", name, tables)
    dense = {name: value for name, value in model.state_dict().items() if ".embedding_bags." not in f".{name}"}
    return write_artifact(
        {name: tables[name] for name in scheme.tables},
        scheme,
        path,
        forms=forms,
        dense_state=dense,
        run=run,
        scipy_formats=scipy_formats,
        overwrite=overwrite,
    )
