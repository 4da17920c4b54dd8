"""export: from a merged and pruned model to an artifact; drop_in_: from there into a model that
serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingCollection

from dnis_torchrec.allocation.axes import has_axes, with_axes_
from dnis_torchrec.artifact.load import load, load_dense_state, read_scheme
from dnis_torchrec.artifact.write import write_over_ranks
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
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection


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
    it and writes its own shards, rank 0 the manifest, into one folder that all ranks see; what is
    read back is the same.

    Args:
        model: merged by `merge_` and pruned by `prune`, or compressed, plain or sharded.
        scheme: the result of `prune` or `compress`.
        path: folder to write; it appears when it is complete.
        forms: of the tables, ``"packed"`` and ``"mixed_dimension"``; None takes the first where
            columns have bits, else the second.
        run: configuration and figures to keep in the manifest; any JSON.
        overwrite: replace an artifact that stands at `path`.

    Returns:
        `path`.

    Raises:
        RuntimeError: if the model was never searched, or is not merged yet.
        ValueError: if the scheme retains no value at all, the tables hold values that it does not
            retain, or something else stands at `path`; on all ranks alike.
    """
    modules = collections(model)
    ranks = ranks_of(*modules.values())
    for fqn, module in modules.items():
        check_merged(fqn, module, ranks)
    if not scheme.tables:
        requirement, remedy = "a scheme of searched tables", "search and prune first"
        raise RuntimeError(describe("export", requirement, "an empty one", remedy))
    configs = [config for module in modules.values() for config in table_configs_of(module)]
    shards: dict[str, list[TableShard]] = {config.name: [] for config in configs}
    for module in modules.values():
        for shard in local_shards(module):
            shards[shard.table].append(shard)
    for name in scheme.tables:
        check_known("table", name, shards)
    remedy = "prune to a larger size"
    check(scheme.parameters > 0, "export", "a scheme that retains a value", "none", remedy)
    return write_over_ranks(
        shards,
        scheme,
        Path(path),
        ranks,
        forms=forms,
        dense_state=dense_state(model),
        run=run,
        overwrite=overwrite,
    )


def drop_in_(model: nn.Module, artifact: Path | str, *, form: str | None = None) -> nn.Module:
    """Puts an artifact's serving modules and dense weights into a model in place of its embedding
    collections."""
    scheme, modules, dense = read_scheme(artifact), collections(model), load_dense_state(artifact)
    names = sorted({table.collection for table in scheme.tables.values()})
    for name in names:
        check_known("FQN", name, modules)
        _check_features(modules[name], scheme, name, artifact)
    if has_axes(dense):
        with_axes_(model)
    for name in names:
        module, plain = load(artifact, form=form, collection=name), modules[name]
        if isinstance(module, ServedEmbeddingCollection) and isinstance(plain, EmbeddingCollection):
            module.pass_indices_(plain.need_indices())
        if not name:
            return module
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    prefixes = tuple(f"{name}." for name in names)
    state = {k: value for k, value in model.state_dict().items() if not k.startswith(prefixes)}
    others = sorted(set(state) ^ set(dense))
    actual = others[:3] if dense else "none"
    remedy = "use the model of the run" if dense else "export again with dense_state"
    check(not others, str(artifact), "the model's own dense weights", actual, remedy)
    for key, value in state.items():
        place, shape = f"{artifact}, {key}", tuple(value.shape)
        fits, remedy = tuple(dense[key].shape) == shape, "use the recipe and data of the run"
        check(fits, place, f"shape {shape}", tuple(dense[key].shape), remedy)
    model.load_state_dict(dense, strict=False)
    return model


def _check_features(
    collection: nn.Module, scheme: MixedDimensionScheme, fqn: str, artifact: Path | str
) -> None:
    """Refuses tables that read other features than the model's: the model would miss some, or take
    one for another."""
    configs = table_configs_of(collection)
    of_model = {config.name: list(config.feature_names) for config in configs}
    tables = [table for table in scheme.tables.values() if table.collection == fqn]
    features = {table.name: list(table.feature_names) for table in tables}
    for name in sorted({*of_model, *features}):
        place = f"{artifact}, table {name!r}"
        requirement = f"the features of the model's table, {of_model.get(name, [])}"
        fits, actual = of_model.get(name) == features.get(name), features.get(name, [])
        check(fits, place, requirement, actual, "use the model of the run")
