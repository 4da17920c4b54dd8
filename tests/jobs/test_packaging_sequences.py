"""Models of sequences and of feature processors in packages: no operator of FBGEMM is left in their graphs."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.jobs.packaging import Signature, export_graph, load_package, write_package
from dnis_torchrec.jobs.packaging.flat_model import FlatModel, operator_libraries
from dnis_torchrec.jobs.packaging.in_torch import complete_cumsum, offsets_range, padded_dense
from dnis_torchrec.jobs.packaging.package import first_sample
from dnis_torchrec.jobs.packaging.torchscript import to_torchscript
from dnis_torchrec.serving import load_operator
from tests.known_models import NUM_DENSE, SUPPORTED, make_batch

MODELS = ("DIN", "Feature processors")
needs_operator = pytest.mark.skipif(not load_operator(), reason="the lookups are not compiled here")
lengths_of_bags = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@functools.cache
def served(name: str) -> nn.Module:
    """A model of the page, compressed."""
    torch.manual_seed(0)
    model = SUPPORTED[name].build()
    batches = [make_batch(seed, is_weighted=SUPPORTED[name].is_weighted) for seed in range(3)]
    dnis.compress(model, batches, loss=nn.BCEWithLogitsLoss(), compression=3)
    return model.eval()


def inputs_of(name: str) -> tuple[Signature, list[tuple[Tensor, ...]]]:
    """A usual batch, one sample, and bags without a single id."""
    batch = make_batch(9, is_weighted=SUPPORTED[name].is_weighted)
    signature = Signature.of_batch(batch)
    usual = signature.flatten(batch)
    lengths = torch.zeros(len(signature.feature_names), 3, dtype=torch.int32)
    nothing = (torch.rand(3, NUM_DENSE), torch.zeros(0, dtype=torch.int64), lengths, *(own[:0] for own in usual[3:]))
    return signature, [usual, first_sample(usual), nothing]


@needs_operator
@pytest.mark.parametrize("name", MODELS)
def test_graph_and_torchscript_predict_what_the_model_predicts(name: str) -> None:
    signature, batches = inputs_of(name)
    program, flat = export_graph(served(name), signature), FlatModel(served(name), signature)
    assert operator_libraries(program) == {"aten", "dnis_torchrec"}
    graph, script = program.module(), to_torchscript(program)
    with torch.inference_mode():
        for inputs in batches:
            expected = flat(*inputs)
            torch.testing.assert_close(graph(*inputs), expected)
            torch.testing.assert_close(script(*inputs), expected)
        dense, values, lengths, *weights = batches[0]
        for packaged in (graph, script):
            with pytest.raises((ValueError, RuntimeError), match="expected no more ids than there are"):
                packaged(dense, values, lengths + 2**20, *weights)


@needs_operator
def test_a_package_of_feature_processors_is_written_and_loaded(tmp_path: Path) -> None:
    name = "Feature processors"
    signature, batches = inputs_of(name)
    batch = make_batch(9, is_weighted=SUPPORTED[name].is_weighted)
    packaged = load_package(write_package(served(name), batch, tmp_path / "package", kind="torchscript", name="m"))
    for inputs in batches:
        torch.testing.assert_close(packaged(*inputs), FlatModel(served(name), signature)(*inputs))


@settings(max_examples=30, deadline=None)
@given(lengths_of_bags, st.integers(1, 5), st.sampled_from([(), (3,)]), st.floats(-1, 1, width=32))
def test_operators_of_torch_do_what_fbgemms_do(
    lengths: list[int], longest: int, of_id: tuple[int, ...], padding: float
) -> None:
    of_bags, values = torch.tensor(lengths), torch.randn(sum(lengths), *of_id)
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(of_bags)
    assert torch.equal(complete_cumsum(of_bags), offsets)
    assert complete_cumsum(of_bags.int()).dtype == torch.int32
    places = torch.ops.fbgemm.offsets_range(offsets, sum(lengths))
    assert torch.equal(offsets_range(offsets, sum(lengths)), places)
    assert places.tolist() == [place for length in lengths for place in range(length)]
    expected = JaggedTensor(values, lengths=of_bags).to_padded_dense(longest, padding)
    assert torch.equal(padded_dense(values, [offsets], [longest], padding), expected)


class Pads(nn.Module):
    """Bags of bags, padded in two dimensions: one operator of FBGEMM that stays."""

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        offsets = torch.arange(sparse_features.stride() + 1)
        values = dense_features[:, :1]
        padded = torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets, offsets], [2, 2], 0.0)
        return padded.flatten(1).sum(1)


def test_what_stays_of_fbgemm_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"got some of \['fbgemm'\], which a server may not have"):
        export_graph(Pads(), inputs_of("DIN")[0])
