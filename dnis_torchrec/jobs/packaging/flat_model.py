"""Flat models: a model that takes a KeyedJaggedTensor, turned into one that takes plain tensors,
and into its graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check, describe
from dnis_torchrec.jobs.packaging.in_torch import without_fbgemm
from dnis_torchrec.jobs.packaging.transposed_linear import TransposedLinear
from dnis_torchrec.ops.bag_offsets import bag_offsets, names_tensor
from dnis_torchrec.ops.csr_operator import load_operator

INPUTS = ("dense", "values", "lengths", "weights")
"""Inputs of a packaged model, in order; weights only where bags are weighted."""
OPERATORS_OF_TORCH = ("aten", "prim", "prims")
OWN_OPERATORS = "dnis_torchrec"

_EXAMPLE_BATCH = 3
"""Samples of the batch that is traced: neither 0 nor 1, which torch.export would take for
constants."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs of a packaged model."""

    feature_names: tuple[str, ...]
    num_dense: int
    is_weighted: bool

    @staticmethod
    def of_batch(batch: Batch) -> Signature:
        """The signature of a model that takes batches like this one."""
        features = batch.sparse_features
        return Signature(
            feature_names=tuple(features.keys()),
            num_dense=batch.dense_features.shape[1],
            is_weighted=features.weights_or_none() is not None,
        )

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of `INPUTS` that the model takes."""
        return INPUTS if self.is_weighted else INPUTS[:-1]

    def flatten(self, batch: Batch) -> tuple[Tensor, ...]:
        """A batch as the packaged model takes it."""
        features = batch.sparse_features
        check(
            features.keys() == list(self.feature_names),
            "batch",
            f"features {list(self.feature_names)}",
            features.keys(),
        )
        lengths = features.lengths().int().view(len(self.feature_names), -1)
        inputs = batch.dense_features.float(), features.values().long(), lengths
        if not self.is_weighted:
            return inputs
        weights = features.weights_or_none()
        check(
            weights is not None,
            "batch",
            "a weight for every id",
            "none",
            "the model's bags are weighted",
        )
        return *inputs, features.weights()

    def example(self, batch_size: int) -> tuple[Tensor, ...]:
        """Zeros of the right kind: every bag holds id 0 once."""
        num_ids = len(self.feature_names) * batch_size
        weights = (torch.ones(num_ids),) if self.is_weighted else ()
        return (
            torch.zeros(batch_size, self.num_dense),
            torch.zeros(num_ids, dtype=torch.int64),
            torch.ones(len(self.feature_names), batch_size, dtype=torch.int32),
            *weights,
        )

    def check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Checks the inputs of a packaged model, which does not: it would read wrong ones as
        something else."""
        names = self.input_names
        check(len(inputs) == len(names), "inputs", f"{names}", f"{len(inputs)} of them")
        batch_size, num_ids = inputs[0].shape[0], inputs[1].numel()
        expected = {
            "dense": (torch.float32, (batch_size, self.num_dense)),
            "values": (torch.int64, (num_ids,)),
            "lengths": (torch.int32, (len(self.feature_names), batch_size)),
            "weights": (torch.float32, (num_ids,)),
        }
        for name, tensor in zip(names, inputs, strict=True):
            dtype, shape = expected[name]
            if tensor.dtype != dtype:
                raise TypeError(describe(f"input {name!r}", f"{dtype}", tensor.dtype, "convert it"))
            check(
                tuple(tensor.shape) == shape,
                f"input {name!r}",
                f"shape {shape}",
                tuple(tensor.shape),
            )
        bag_offsets(inputs[2], inputs[1], names_tensor(self.feature_names))


class FlatModel(nn.Module):
    """A model called with plain tensors."""

    feature_names: Tensor

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model = model
        self._keys = list(signature.feature_names)
        self.register_buffer("feature_names", names_tensor(self._keys))
        load_operator()

    def forward(
        self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Predicts."""
        # given along, so that TorchRec does not reach for FBGEMM to sum lengths up; lengths are
        # read from them, so that nothing in a graph reads any that have not been checked
        offsets = bag_offsets(lengths, values, self.feature_names)
        features = KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=offsets.diff(),
            offsets=offsets,
            stride=dense.shape[0],
        )
        return self.model(dense_features=dense, sparse_features=features)


def export_graph(model: nn.Module, signature: Signature) -> ExportedProgram:
    """Traces a model whose collections torch.export takes; batch and number of ids stay free."""
    place = f"model {type(model).__name__}"
    ids_and_batch = [{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}]
    inputs = signature.example(_EXAMPLE_BATCH)
    # torch.export swaps the parameters of what it traces, which modules that remember theirs do not
    # survive: it gets a copy, of everything but the tensors, with linear layers as small batches
    # want them
    memo: dict[int, Any] = {
        id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]
    }
    memo |= {
        id(module): TransposedLinear(module)
        for module in model.modules()
        if type(module) is nn.Linear
    }
    traced = FlatModel(copy.deepcopy(model, memo), signature)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            for about_torch in (".*isinstance.treespec, LeafSpec.*", ".*guard_size_oblivious"):
                warnings.filterwarnings("ignore", message=about_torch, category=FutureWarning)
            program = without_fbgemm(
                torch.export.export(
                    traced, inputs, dynamic_shapes=tuple(ids_and_batch[: len(inputs)]), strict=False
                )
            )
    except Exception as error:  # torch.export has no class of its own for what it cannot trace
        first_line = (
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        )
        requirement = (
            "supported are tables in compressed sparse rows or of mixed dimension with their compiled lookups, and "
            "models whose forward depends on shapes alone, not on ids or lengths"
        )
        raise NotImplementedError(
            describe(place, requirement, f"{type(error).__name__}: {first_line}")
        ) from error
    for spec in program.graph_signature.input_specs:
        if (
            spec.kind == InputKind.CONSTANT_TENSOR
        ):  # a tensor that no module registered: AOTInductor would rename it
            spec.kind, spec.persistent = InputKind.BUFFER, False
    foreign = sorted(operator_libraries(program) - {*OPERATORS_OF_TORCH, OWN_OPERATORS})
    if foreign:
        requirement = "supported are the operators of torch and of dnis_torchrec"
        remedy = "write what calls them in operators of torch"
        received = f"some of {foreign}, which a server may not have"
        raise NotImplementedError(describe(place, requirement, received, remedy))
    return program


def operator_libraries(program: ExportedProgram) -> set[str]:
    """Namespaces of the operators that a program calls."""
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return {target.namespace for target in targets if isinstance(target, torch._ops.OpOverload)}
