"""The quantised forms of the artifact: written whole or in shards, or made from CSR, they serve the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dnis_torchrec.artifact import load, read_manifest, read_scheme, write_artifact
from dnis_torchrec.artifact.forms import Shard, codec_of
from dnis_torchrec.artifact.predictions import describe_forms
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.forms import FORMS
from dnis_torchrec.scheme import MixedDimensionScheme
from tests.serving_reference import keyed_jagged_tensor, pruned, table_scheme

NUM_ROWS, DIM = 300, 8
QUANTIZED = [
    name for name, form in FORMS.items() if form.layout != "csr" and not form.is_exact and not form.needs_codes
]


def pruned_tables() -> tuple[dict[str, Tensor], MixedDimensionScheme]:
    """Two tables whose last block retains nothing, one routed by map and pooled by MEAN."""
    torch.manual_seed(0)
    retained = torch.tensor([[1] * DIM, [0, 1, 0, 1, 1, 0, 0, 0], [0] * DIM], dtype=torch.bool)
    routings = {
        "map": RowRouting.from_map(torch.randint(0, 4, (NUM_ROWS,)), 3),
        "sorted": RowRouting(NUM_ROWS, 3, boundaries=torch.tensor([0, 40, 200, 290])),
    }
    tables = {name: pruned(torch.randn(NUM_ROWS, DIM), routing, retained) for name, routing in routings.items()}
    pooling = {"map": "mean", "sorted": "sum"}
    schemes = {
        name: table_scheme(name, routing, retained, feature_names=(f"{name}_id",), pooling=pooling[name])
        for name, routing in routings.items()
    }
    return tables, MixedDimensionScheme(schemes)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tables in all quantised forms, in shards of them, and in CSR alone."""
    tables, scheme = pruned_tables()
    folder = tmp_path_factory.mktemp("artifacts")
    return {
        "whole": write_artifact(tables, scheme, folder / "whole", forms=QUANTIZED),
        "shards": write_artifact(tables, scheme, folder / "shards", forms=QUANTIZED, max_file_bytes=2000),
        "csr_fp32": write_artifact(tables, scheme, folder / "csr_fp32", forms=["csr_fp32"]),
    }


@pytest.mark.parametrize("form", QUANTIZED)
def test_whole_in_shards_and_from_csr(paths: dict[str, Path], form: str) -> None:
    bags = {
        f"{name}_id": [[(row, 1.0), (NUM_ROWS - 1 - row, 1.0)] for row in range(NUM_ROWS)] for name in ("map", "sorted")
    }
    found = {kind: load(path, form=form)(keyed_jagged_tensor(bags)).values() for kind, path in paths.items()}
    assert found["shards"].equal(found["whole"])
    assert found["csr_fp32"].equal(found["whole"])
    exact = load(paths["csr_fp32"], form="csr_fp32")(keyed_jagged_tensor(bags)).values()
    assert not exact.equal(found["whole"])
    torch.testing.assert_close(found["whole"], exact, rtol=0, atol={"16": 0.01, "t8": 0.05, "t4": 1.0}[form[-2:]])


def test_predicted_bytes_are_those_written(paths: dict[str, Path]) -> None:
    manifest, scheme = read_manifest(paths["whole"]), read_scheme(paths["whole"])
    for form in QUANTIZED:
        for name, table in scheme.tables.items():
            (shard,) = manifest["tables"][name]["shards"][form]
            tensors = manifest["files"][shard["file"]]["tensors"].values()
            written = sum(rows * width for rows, width in (t["shape"] for t in tensors))
            assert FORMS[form].file_bytes(table) == written


def test_the_manifest_tells_what_every_form_comes_to(paths: dict[str, Path]) -> None:
    _, scheme = pruned_tables()
    assert read_manifest(paths["csr_fp32"])["serving_forms"] == describe_forms(scheme)


@pytest.mark.parametrize("form", QUANTIZED)
def test_shards_of_another_shape_are_refused(form: str) -> None:
    tables, scheme = pruned_tables()
    weight, table = tables["sorted"], scheme.tables["sorted"]
    codec = codec_of(FORMS[form])
    encoded = codec.encode(FORMS[form], table, lambda first, last: weight[first:last], 0, NUM_ROWS)
    alone = MixedDimensionScheme({"sorted": table})
    for damage in (lambda t: t[:-1], lambda t: t[:, :-1], lambda t: t.to(torch.int16)):
        tensors = encoded | {name: damage(tensor) for name, tensor in list(encoded.items())[:1]}
        shard = Shard(place="file 'x'", first_row=0, num_rows=NUM_ROWS, tensors=tensors)
        with pytest.raises(ValueError, match=r"file 'x': expected .*uint8 of shape"):
            codec.build(FORMS[form], alone, {"sorted": [shard]}, device="cpu", unknown_ids="error")
    shard = Shard(place="file 'x'", first_row=0, num_rows=NUM_ROWS, tensors={"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="file 'x': expected tensors"):
        codec.build(FORMS[form], alone, {"sorted": [shard]}, device="cpu", unknown_ids="error")


def test_dims_that_do_not_fit_leave_no_artifact(tmp_path: Path) -> None:
    routing = RowRouting(4, 1, boundaries=torch.tensor([0, 4]))
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, torch.ones(1, 6, dtype=torch.bool))})
    with pytest.raises(
        ValueError, match="table 't': expected an embedding_dim that is a multiple of 4 for int4, got 6"
    ):
        write_artifact({"t": torch.ones(4, 6)}, scheme, tmp_path / "a", forms=["csr_fp32", "dense_int4"])
    assert list(tmp_path.iterdir()) == []
