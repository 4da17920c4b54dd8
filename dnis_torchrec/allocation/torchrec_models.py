r"""TorchRec's own models, known by type, and the layers that turn with their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.models import deepfm, dlrm
from torchrec.modules.deepfm import DeepFM, FactorizationMachine
from torchrec.modules.mlp import MLP, Perceptron

from dnis_torchrec.allocation.axes import LinearReader, Rotatable, RotationGroup
from dnis_torchrec.selection.table_shards import collections, table_configs_of

KnownModel: TypeAlias = dlrm.DLRM | deepfm.SimpleDeepFMNN

AXES = "axes"
"""Name of the buffers that `with_axes_` adds."""
TURN = "turn"
"""Name of the module behind a dense arch."""


class Turn(nn.Module):
    """Turns a vector: ``x @ axes``."""

    def __init__(self, dim: int, like: Tensor) -> None:
        super().__init__()
        self.axes: Tensor
        self.register_buffer(AXES, torch.eye(dim, dtype=like.dtype, device=like.device))

    def forward(self, values: Tensor) -> Tensor:
        """Turns each row."""
        return values @ self.axes


class DirectedFactorizationMachine(nn.Module):
    r"""TorchRec's FactorizationMachine that adds columns up in any direction: :math:`((w^\top x)^2
    - x^\top x) / 2`."""

    def __init__(self, in_features: int, like: Tensor) -> None:
        super().__init__()
        self.axes: Tensor
        self.register_buffer(AXES, torch.ones(1, in_features, dtype=like.dtype, device=like.device))

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Interactions of all columns."""
        columns = torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)
        return ((columns @ self.axes.T).square() - columns.square().sum(1, keepdim=True)) * 0.5


def with_axes_(model: nn.Module) -> nn.Module:
    """Adds buffers to TorchRec's DLRM and SimpleDeepFMNN, so that their tables can be turned.
    Local, no collective.

    Predictions stay as they are, and so do the names of all weights; a buffer called ``axes`` comes
    to the state_dict. A model that has it already, or needs none, is left as it is: so a fresh
    model takes the dense weights of a turned one.

    Args:
        model: sharded or not, changed in place; any module inside it may be one of TorchRec's
            models.

    Returns:
        `model`.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=8, feature_names=["f"])
        >>> model = with_axes_(dlrm.DLRM(EmbeddingBagCollection(tables=[table]), 3, [4, 8], [4, 1]))
        >>> [name for name in model.state_dict() if name.endswith("axes")]
        ['dense_arch.model._mlp.turn.axes']
    """
    for known in _known_models(get_unwrapped_module(model)):
        interaction = known.inter_arch
        if isinstance(interaction, deepfm.FMInteractionArch) and not _has_axes(interaction.fm):
            weight = _first_linear_of_deep_part(interaction).weight
            interaction._modules["fm"] = DirectedFactorizationMachine(weight.shape[1], weight)
        elif isinstance(interaction, dlrm.InteractionArch) and not _has_axes(_turn_of(known)):
            weight = _first_linear(_layers_of_over_arch(known)).weight
            _layers_of(known.dense_arch).add_module(TURN, Turn(known.sparse_arch.D, weight))
    return model


def has_axes(names: Iterable[str]) -> bool:
    """Returns whether a state_dict is that of a model `with_axes_`."""
    return any(name.rpartition(".")[2] == AXES for name in names)


def known_groups(model: nn.Module) -> list[RotationGroup]:
    """Finds the groups of TorchRec's own models inside a model, see the table at the top. Local, no
    collective."""
    trained = {id(collection) for collection in collections(model).values()}
    known = [
        found
        for found in _known_models(get_unwrapped_module(model))
        if id(_collection_of(found)) in trained
    ]
    return [group for found in known for group in _groups_of(found)]


def _groups_of(known: KnownModel) -> list[RotationGroup]:
    interaction = known.inter_arch
    if isinstance(interaction, deepfm.FMInteractionArch):
        if not _has_axes(interaction.fm):
            return []
        layers = [_first_linear_of_deep_part(interaction).weight, cast(Tensor, interaction.fm.axes)]
        return _groups_of_tables(known, interaction.sparse_feature_names, layers)
    if isinstance(interaction, dlrm.InteractionProjectionArch):
        layers = [_first_linear(_layers_of(branch)).weight for branch in _branches_of(interaction)]
        return _groups_of_tables(known, known.sparse_arch.sparse_feature_names, layers)
    turn = _turn_of(known)
    if not isinstance(turn, Turn):
        return []
    reader = _first_linear(_layers_of_over_arch(known))
    along = (LinearReader(weight=turn.axes), LinearReader(weight=reader.weight))
    return [
        RotationGroup(
            tables=tuple(table.name for table in table_configs_of(_collection_of(known))),
            along=along,
        )
    ]


def _groups_of_tables(
    known: KnownModel, features: Sequence[str], layers: Sequence[Tensor]
) -> list[RotationGroup]:
    """A group for each table, read by layers whose inputs are the dense output and then the
    features."""
    groups = []
    for table in table_configs_of(_collection_of(known)):
        columns = [table.embedding_dim * (1 + features.index(name)) for name in table.feature_names]
        readers = tuple(
            LinearReader(weight=layer, first_column=first) for first in columns for layer in layers
        )
        groups.append(RotationGroup(tables=(table.name,), readers={table.name: readers}))
    return groups


def _known_models(root: nn.Module) -> Iterator[KnownModel]:
    """TorchRec's models inside a model that compute as TorchRec wrote them, from parts that nobody
    else has."""
    shared = _shared(root)
    for module in list(root.modules()):
        if isinstance(module, Rotatable) or not isinstance(
            module, dlrm.DLRM | deepfm.SimpleDeepFMNN
        ):
            continue
        parts = (
            _parts_of_dlrm(module) if isinstance(module, dlrm.DLRM) else _parts_of_deepfm(module)
        )
        if all(_computes_as(part, kinds) for part, kinds in parts) and not shared & _own_parts(
            module
        ):
            yield module


def _parts_of_dlrm(model: dlrm.DLRM) -> Iterator[tuple[nn.Module, tuple[type[nn.Module], ...]]]:
    """Yields every module of a DLRM that is read or changed, from outside to inside, and the types
    that it may have."""
    yield model, (dlrm.DLRM,)
    yield model.sparse_arch, (dlrm.SparseArch,)
    yield model.inter_arch, (dlrm.InteractionArch, dlrm.InteractionProjectionArch)
    yield model.dense_arch, (dlrm.DenseArch,)
    yield from _parts_of_mlp(model.dense_arch.model)
    yield model.over_arch, (dlrm.OverArch,)
    yield model.over_arch.model, (nn.Sequential,)
    yield from _parts_of_mlp(model.over_arch.model[0])
    if isinstance(model.inter_arch, dlrm.InteractionProjectionArch):
        for branch in _branches_of(model.inter_arch):
            yield branch, (dlrm.DenseArch,)
            yield from _parts_of_mlp(branch.model)


def _parts_of_mlp(mlp: Any) -> Iterator[tuple[nn.Module, tuple[type[nn.Module], ...]]]:
    yield mlp, (MLP,)
    yield mlp._mlp, (nn.Sequential,)
    yield mlp._mlp[0], (Perceptron,)
    yield mlp._mlp[0]._linear, (nn.Linear,)


def _parts_of_deepfm(
    model: deepfm.SimpleDeepFMNN,
) -> Iterator[tuple[nn.Module, tuple[type[nn.Module], ...]]]:
    """The same of a SimpleDeepFMNN, whose dense output stays as it is."""
    yield model, (deepfm.SimpleDeepFMNN,)
    yield model.sparse_arch, (deepfm.SparseArch,)
    yield model.inter_arch, (deepfm.FMInteractionArch,)
    yield model.inter_arch.fm, (FactorizationMachine, DirectedFactorizationMachine)
    yield model.inter_arch.deep_fm, (DeepFM,)
    yield model.inter_arch.deep_fm.dense_module, (nn.Sequential,)
    yield _first_linear_of_deep_part(model.inter_arch), (nn.Linear,)


def _computes_as(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Returns whether a module computes as one of TorchRec's or torch's own classes, and not as a
    subclass does."""
    is_one = isinstance(module, kinds) and any(
        type(module).forward is kind.forward for kind in kinds
    )
    is_patched = "forward" in vars(module) or bool(
        module._forward_hooks or module._forward_pre_hooks
    )
    return is_one and not is_patched and not is_parametrized(module)


def _shared(root: nn.Module) -> set[int]:
    """Modules and weights, by identity, that have several names in a model."""
    held = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    held.update(id(weight) for _, weight in root.named_parameters(remove_duplicate=False))
    return {part for part, times in held.items() if times > 1}


def _own_parts(known: KnownModel) -> set[int]:
    parts: list[object] = [known, known.sparse_arch, _collection_of(known)]
    for arch in (known.dense_arch, known.inter_arch, known.over_arch):
        parts += [*arch.modules(), *arch.parameters()]
    return {id(part) for part in parts}


def _collection_of(known: KnownModel) -> nn.Module:
    return known.sparse_arch.embedding_bag_collection


def _branches_of(interaction: dlrm.InteractionProjectionArch) -> tuple[Any, Any]:
    return interaction.interaction_branch1, interaction.interaction_branch2


def _layers_of(arch: Any) -> nn.Sequential:
    """The perceptrons of a dense arch."""
    return cast(nn.Sequential, arch.model._mlp)


def _layers_of_over_arch(known: KnownModel) -> nn.Sequential:
    return cast(nn.Sequential, cast(Any, known.over_arch.model)[0]._mlp)


def _first_linear(layers: nn.Sequential) -> nn.Linear:
    return cast(nn.Linear, cast(Any, layers[0])._linear)


def _first_linear_of_deep_part(interaction: deepfm.FMInteractionArch) -> nn.Linear:
    return cast(nn.Linear, cast(nn.Sequential, interaction.deep_fm.dense_module)[0])


def _turn_of(known: KnownModel) -> nn.Module | None:
    return _layers_of(known.dense_arch)._modules.get(TURN)


def _has_axes(module: nn.Module | None) -> bool:
    return isinstance(module, Turn | DirectedFactorizationMachine)
