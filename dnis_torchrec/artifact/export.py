"""export: from a model to an artifact; load_model: from there into a model that serves it;
load_predictor: into one that reads raw rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dnis_torchrec.allocation.axes import has_axes, with_axes_, without_axes_
from dnis_torchrec.allocation.compress import served_collections
from dnis_torchrec.artifact.load import ArtifactFolder, load
from dnis_torchrec.artifact.manifest import read_plain_file
from dnis_torchrec.artifact.write import check_forms, write_artifact
from dnis_torchrec.blocks.counts import table_name
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.scheme import PACKED, MixedDimensionScheme, TableScheme
from dnis_torchrec.selection import shards
from dnis_torchrec.selection.shards import TableShard, collections
from dnis_torchrec.serving.gate import Gate
from dnis_torchrec.serving.packed import PackedEmbeddingBagCollection
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection

if TYPE_CHECKING:
    from dnis_torchrec.data.frames import Frame, FrameEncoder


def export(
    model: nn.Module,
    scheme: MixedDimensionScheme,
    path: Path | str,
    *,
    forms: Sequence[str] | None = None,
    run: Mapping[str, Any] | None = None,
    encoder: FrameEncoder | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a compressed model, or a merged and pruned one, as an artifact; `load_model` reads it.

    The model's dense weights go along, with the axes that its tables were turned into. Tables that
    `compress` packed are written bit for bit.

    Local, no collective, where the model is plain. Distributed: every rank of a sharded model calls
    it and writes its own shards, rank 0 the manifest, into one folder that all ranks see; what is
    read back is the same.

    Args:
        model: compressed, or merged by `merge_` and pruned by `prune`, plain or sharded.
        scheme: the result of `prune` or `compress`.
        path: folder to write; it appears when it is complete.
        forms: of the tables, ``"packed"`` and ``"mixed_dimension"``; None takes the first where
            columns have bits, else the second. Packed tables are written in the first alone; `load`
            makes the second of it.
        run: configuration and figures to keep in the manifest; any JSON.
        encoder: of a data frame, as ``recipe.data.encoder``: it turns raw rows into what the model
            reads, for `load_predictor`.
        overwrite: replace an artifact that stands at `path`.

    Returns:
        `path`.

    Raises:
        RuntimeError: if the model was never searched, or is not merged yet.
        ValueError: if the scheme retains no value at all, the tables hold values that it does not
            retain, the encoder has another number of rows than a table, or something else stands at
            `path`; on all ranks alike.
    """
    facts: dict[str, Any] = {"run": run, "overwrite": overwrite}
    facts["encoder"] = b"" if encoder is None else _bytes_of(encoder, scheme)
    served_modules = served_collections(model)
    if served_modules:
        rows = _bit_fields(model, served_modules, scheme, forms)
        facts |= {"forms": (PACKED,), "dense_state": shards.dense_state(model, served_modules)}
        return write_artifact(rows, scheme, path, **facts)
    modules = collections(model)
    ranks = shards.ranks_of(*modules.values())
    for fqn, module in modules.items():
        shards.check_merged(fqn, module, ranks)
    if not scheme.tables:
        requirement, remedy = "a scheme of searched tables", "search and prune first"
        raise RuntimeError(describe("export", requirement, "an empty one", remedy))
    fqns, of_model = {table.collection for table in scheme.tables.values()}, set(modules)
    requirement = f"the tables of the model's collections, {sorted(of_model)}"
    remedy = "export the model that was measured, with its whole scheme"
    check(fqns == of_model, "scheme", requirement, sorted(fqns), remedy)
    configs = [config for module in modules.values() for config in shards.table_configs_of(module)]
    parts: dict[str, list[TableShard]] = {config.name: [] for config in configs}
    for module in modules.values():
        for part in shards.local_shards(module):
            parts[part.table].append(part)
    for name, table in scheme.tables.items():
        if name not in parts and table.table_name in parts:  # several collections have one
            of_one = shards.local_shards(modules[table.collection])
            parts[name] = [part for part in of_one if part.table == table.table_name]
        check_known("table", name, parts)
    remedy = "prune to a larger size"
    check(scheme.parameters > 0, "export", "a scheme that retains a value", "none", remedy)
    facts |= {"forms": forms, "dense_state": shards.dense_state(model)}
    return write_artifact(parts, scheme, path, ranks, **facts)


def _bytes_of(encoder: FrameEncoder, scheme: MixedDimensionScheme) -> bytes:
    """The file of an encoder, which has to have the rows of all tables."""
    for table in scheme.tables.values():
        for name in table.feature_names:
            check_known("feature", name, encoder.num_embeddings)
            place, rows = f"encoder, feature {name!r}", encoder.num_embeddings[name]
            check(rows <= table.num_embeddings, place, f"at most {table.num_embeddings} rows", rows)
    return encoder.to_bytes()


def _bit_fields(
    model: nn.Module,
    served_modules: Mapping[str, PackedEmbeddingBagCollection | ServedEmbeddingCollection],
    scheme: MixedDimensionScheme,
    forms: Sequence[str] | None,
) -> dict[str, Tensor]:
    """The rows of a model whose tables are packed, once they are known to be those of a scheme."""
    rest = collections(model)
    remedy = "compress the model as a whole"
    check(not rest, "export", "all collections packed, or none", f"{[*rest]} in float32", remedy)
    remedy = "leave forms out; load(path, form='mixed_dimension') makes the other one"
    is_packed = forms is None or check_forms(forms) == (PACKED,)
    check(is_packed, "forms", "packed, which the tables are", forms, remedy)
    tables: dict[str, TableScheme] = {}
    rows: dict[str, Tensor] = {}
    for module in served_modules.values():
        tables |= module.schemes()
        rows |= module.bit_fields()
    own_scheme, remedy = MixedDimensionScheme(tables), "give the scheme that compress returned"
    is_own = own_scheme.to_json() == scheme.to_json() and all(
        tensor.equal(scheme.to_tensors()[name]) for name, tensor in own_scheme.to_tensors().items()
    )
    check(is_own, "scheme", "that of the model's tables", "another", remedy)
    return rows


def load_model(model: nn.Module, path: Path | str, *, form: str | None = None) -> nn.Module:
    """Fills a model from an artifact: served tables, axes and all dense weights.

    Local, no collective. Every key of the model is checked before anything of it is changed.

    Args:
        model: built as for training, with any weights; changed in place.
        path: folder that `export` or ``dnis export`` wrote.
        form: of the tables, see `load`.

    Returns:
        `model`; the served collection itself, if the model is nothing else.

    Raises:
        ValueError: for another model than the artifact's: other collections, tables or features,
            dense weights that are missing, left over or of another shape; or a damaged artifact.
    """
    folder, modules = ArtifactFolder(path), collections(model)
    scheme, dense = folder.scheme(), folder.tensors("dense_state")
    names = check_features(modules, scheme, path)
    if names == [""]:
        return load(path, form=form)
    adds_axes = has_axes(dense) and not has_axes(model.state_dict())
    if adds_axes:
        with_axes_(model)
    try:
        prefixes = tuple(f"{name}." for name in names)
        state = {k: value for k, value in model.state_dict().items() if not k.startswith(prefixes)}
        other_names = sorted(set(state) ^ set(dense))
        actual = other_names[:3] if dense else "none"
        remedy = "use the model of the run" if dense else "export again with dense_state"
        check(not other_names, str(path), "the model's own dense weights", actual, remedy)
        for key, value in state.items():
            place, shape = f"{path}, {key}", tuple(value.shape)
            fits, remedy = tuple(dense[key].shape) == shape, "use the recipe and data of the run"
            check(fits, place, f"shape {shape}", tuple(dense[key].shape), remedy)
        served_modules = {name: load(path, form=form, collection=name) for name in names}
        folder.check_unchanged()
    except BaseException:
        if adds_axes:
            without_axes_(model)
        raise
    for name, module in served_modules.items():
        if isinstance(module, ServedEmbeddingCollection):  # release 0.1.0 did not write it
            module.pass_indices_(shards.needs_indices(modules[name]))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    model.load_state_dict(dense, strict=False)
    return model


class Predictor:
    """A model in evaluation mode, and the encoder that reads raw rows for it."""

    def __init__(self, model: nn.Module, encoder: FrameEncoder) -> None:
        self.model, self.encoder = model.eval(), encoder

    @torch.inference_mode()
    def __call__(self, frame: Frame) -> Any:
        """What the model returns for the rows of a frame; one output is a tensor ``(B,)``."""
        with Gate.of(self.model):  # encoder and model are of one version
            dense, features = self.encoder(frame)
            outputs = self.model(dense_features=dense, sparse_features=features)
        return outputs.flatten() if getattr(outputs, "shape", None) == (len(dense), 1) else outputs


def load_predictor(path: Path | str, model: nn.Module | None = None) -> Predictor:
    """Loads a model that predicts from raw rows of a data frame, ids and numbers as they came.

    Local, no collective. The sha256 of what reads raw rows is always compared. An id that no
    training sample had reads the row that all of these share; where more than half of a column's
    are so, a warning names some.

    Args:
        path: folder that `export` wrote with an encoder.
        model: built as for training, with any weights, called with ``dense_features`` and
            ``sparse_features``; changed in place. None for a model of `recipe_from_frame`.

    Returns:
        An object to be called with a frame, a dict of columns or the path of a file. It returns
        what the model does, ``(B,)`` of one output: logits where the loss is a binary one.

    Raises:
        ValueError: if the artifact has no encoder, is damaged, or is one of another model.

    Example:
        >>> predict = load_predictor("artifact")  # doctest: +SKIP
        >>> predict({"user": ["ann", "bob"], "price": [9.5, 12.0]}).sigmoid()  # doctest: +SKIP
    """
    from dnis_torchrec.data.frames import FrameEncoder, model_of  # loads pandas

    folder, remedy = ArtifactFolder(path), "export with encoder=recipe.data.encoder"
    name = folder.manifest.get("encoder")
    check(name is not None, str(path), "an encoder of raw rows", "none", remedy)
    encoder = FrameEncoder.from_bytes(*read_plain_file(path, folder.manifest, str(name)))
    if model is None:
        remedy = "pass the model: load_predictor(path, model)"
        is_named = encoder.model is not None
        check(is_named, str(path), "a model of recipe_from_frame", "one of your own", remedy)
        model = model_of(encoder, "meta")  # the tables come from the artifact
    predictor = Predictor(load_model(model, path), encoder)
    folder.check_unchanged()
    return predictor


def check_features(
    modules: Mapping[str, nn.Module], scheme: MixedDimensionScheme, artifact: Path | str
) -> list[str]:
    """Refuses tables whose features, size, pooling or weighting differ from the model's. Returns
    the FQNs of collections."""
    remedy = "build the model as for training"
    check(bool(modules), "model", "an embedding collection to load into", "none", remedy)
    fqns = sorted({table.collection for table in scheme.tables.values()})
    in_task = [fqn.removeprefix("model.") for fqn in fqns]
    if in_task != fqns and set(in_task) <= set(modules):  # exported with the task around the model
        remedy = "load it into TrainTask(model, loss), and serve its .model"
        check(False, str(artifact), f"the collections {in_task}", fqns, remedy)
    for fqn in fqns:
        check_known("FQN", fqn, modules)
        configs = {
            table_name(config.name, fqn): config for config in shards.table_configs_of(modules[fqn])
        }
        tables = [table for table in scheme.tables.values() if table.collection == fqn]
        features = {table.table_name: list(table.feature_names) for table in tables}
        of_model = {name: list(config.feature_names) for name, config in configs.items()}
        for name in sorted({*of_model, *features}):
            place = f"{artifact}, table {name!r}"
            requirement = f"the features of the model's table, {of_model.get(name, [])}"
            fits, actual = of_model.get(name) == features.get(name), features.get(name, [])
            check(fits, place, requirement, actual, "use the model of the run")
        is_weighted = shards.is_weighted(modules[fqn])
        for table in tables:
            config, place = configs[table.table_name], f"{artifact}, table {table.table_name!r}"
            for name, value in {
                "num_embeddings": config.num_embeddings,
                "embedding_dim": config.embedding_dim,
                "pooling": config.pooling.value.lower(),
                "is_weighted": is_weighted,
            }.items():
                requirement, actual = f"{name} {value}, as the model's table", getattr(table, name)
                check(actual == value, place, requirement, actual, "use the model of the run")
    return fqns
