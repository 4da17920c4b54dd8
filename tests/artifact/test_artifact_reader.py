"""A reader made of docs/artifact.md alone: standard library and numpy, nothing of this package.

It is what somebody would write in C++: map the files, go to the offsets that the manifest states, add up rows.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact import load, write_artifact, writing
from dnis_torchrec.artifact.writing import write_packed
from dnis_torchrec.blocks.codes import WIDTHS
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.scheme import FORMS, MixedDimensionScheme
from tests.coded_tables import rounded, with_codes
from tests.serving_reference import table_scheme

DOCUMENT = Path(__file__).parents[2] / "docs" / "artifact.md"
NUMPY_DTYPES = {
    "bool": "|b1",
    "int8": "|i1",
    "int16": "<i2",
    "uint8": "|u1",
    "uint16": "<u2",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "bfloat16": "<u2",  # the upper half of a float32
    "float32": "<f4",
    "float64": "<f8",
}


def fields_of(bits: np.ndarray) -> list[tuple[int, int, int]]:
    """(column, first bit, width) of the fields of a row."""
    fields, end = [], 0
    for column, width in enumerate(bits.tolist()):
        if width:
            offset = (end + 7) // 8 * 8 if width == 32 else end
            fields.append((column, offset, width))
            end = offset + width
    return fields


def packed_values(
    rows: np.ndarray, blocks: np.ndarray, bits: np.ndarray, scale: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """The rows of a shard of bit fields."""
    out, begin = np.zeros((len(blocks), bits.shape[1]), np.float32), 0
    for block, of_block in enumerate(bits):
        fields = fields_of(of_block)
        stride = (fields[-1][1] + fields[-1][2] + 7) // 8 if fields else 0
        for row in np.nonzero(blocks == block)[0]:
            number = int.from_bytes(rows[begin : begin + stride].tobytes(), "little")
            begin += stride
            for column, offset, width in fields:
                code = number >> offset & (1 << width) - 1
                if width == 32:
                    out[row, column] = np.uint32(code).view("<f4")
                else:
                    half_steps = np.float32(2 * code + int(shift[block, column]))
                    out[row, column] = scale[block, column] * half_steps / np.float32(2)
    assert begin == len(rows)
    return out


class Reader:
    """Reads an artifact of format 1.x."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        content = (folder / "manifest.json").read_bytes()
        self.manifest: dict[str, Any] = json.loads(content)
        if self.manifest["format"] != "dnis-torchrec-artifact":
            raise ValueError("another format")
        if int(self.manifest["format_version"].split(".")[0]) != 1:
            raise ValueError("another version")
        digits = self.manifest["sha256"].encode()
        before, _, after = content.rpartition(digits)
        if hashlib.sha256(before + 64 * b"0" + after).hexdigest().encode() != digits:
            raise ValueError("a damaged manifest")

    def verify(self) -> None:
        """Compares size and hash of every file."""
        for name, entry in self.manifest["files"].items():
            content = (self.folder / name).read_bytes()
            if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise ValueError(f"{name} is damaged")

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """The tensors of one file, mapped."""
        with (self.folder / name).open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        found = {}
        for key, fields in self.manifest["files"][name]["tensors"].items():
            dtype, count = np.dtype(NUMPY_DTYPES[fields["dtype"]]), int(np.prod(fields["shape"], dtype=np.int64))
            assert fields["offset"] % dtype.itemsize == 0
            array = np.frombuffer(mapped, dtype, count, fields["offset"]).reshape(fields["shape"])
            if fields["dtype"] == "bfloat16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            found[key] = array
        return found

    def scheme(self) -> dict[str, np.ndarray]:
        """The tensors of the scheme."""
        tensors: dict[str, np.ndarray] = {}
        for name in self.manifest["scheme"]:
            tensors |= self.tensors(name)
        return tensors

    def blocks(self, table: str) -> tuple[np.ndarray, np.ndarray]:
        """Block of every row (S: none), and retained columns of every block."""
        tensors = self.scheme()
        retained = tensors[f"{table}/retained"]
        if f"{table}/block_of_row" in tensors:
            return tensors[f"{table}/block_of_row"], retained
        num_embeddings = self.manifest["tables"][table]["num_embeddings"]
        return np.searchsorted(tensors[f"{table}/boundaries"][1:], np.arange(num_embeddings), "right"), retained

    def dense(self, table: str, form: str) -> np.ndarray:
        """All rows of a table, with their zeros."""
        fields = self.manifest["tables"][table]
        out = np.zeros((fields["num_embeddings"], fields["embedding_dim"]), np.float32)
        blocks, retained = self.blocks(table)
        bits, scale, shift = (self.scheme().get(f"{table}/{part}") for part in ("bits", "scale", "shift"))
        next_row = 0
        for shard in fields["shards"][form]:
            first, num_rows, tensors = shard["first_row"], shard["num_rows"], self.tensors(shard["file"])
            assert (first, num_rows > 0) == (next_row, True)
            next_row += num_rows
            if form == "packed":
                values = packed_values(tensors["rows"], blocks[first : first + num_rows], bits, scale, shift)
                out[first : first + num_rows] = values
                continue
            used = dict.fromkeys(tensors, 0)
            for row in range(first, first + num_rows):
                if blocks[row] < len(retained) and retained[blocks[row]].any():
                    key = f"b{blocks[row]}"
                    out[row, retained[blocks[row]]] = tensors[key][used[key]]
                    used[key] += 1
            assert used == {key: len(rows) for key, rows in tensors.items()}
        assert next_row == fields["num_embeddings"]
        return out


def large_tables(widest: int = 300) -> tuple[dict[str, torch.Tensor], MixedDimensionScheme]:
    """Uint8 and uint16 columns, routing by boundaries and by map, rows of no block, single values pruned."""
    torch.manual_seed(0)
    routings = {
        "narrow/table": RowRouting(90, 2, boundaries=torch.tensor([0, 20, 80])),
        "wide": RowRouting.from_map(torch.randint(0, 4, (60,)), 3),
    }
    tables, schemes = {}, {}
    for (name, routing), dim in zip(routings.items(), (16, widest), strict=True):
        retained = torch.rand(routing.num_blocks, dim) < 0.3
        rows = torch.cat([retained, torch.zeros(1, dim, dtype=torch.bool)])[routing.all_blocks()]
        tables[name] = torch.randn(len(rows), dim) * rows * (torch.rand(len(rows), dim) < 0.8)
        schemes[name] = table_scheme(name, routing, retained, feature_names=(name,))
    return tables, MixedDimensionScheme(schemes)


@pytest.mark.parametrize("max_file_bytes", [2_000_000_000, 6000])
def test_the_document_is_enough_to_read_an_artifact(tmp_path: Path, max_file_bytes: int) -> None:
    tables, scheme = large_tables()
    state = {"layer": torch.arange(3.0).double()}
    path = write_artifact(tables, scheme, tmp_path / "a", forms=FORMS, dense_state=state, max_file_bytes=max_file_bytes)
    reader = Reader(path)
    reader.verify()
    assert list(reader.manifest["tables"]) == list(tables)
    for name, table in tables.items():
        assert (reader.dense(name, "mixed_dimension") == table.numpy()).all()
    shards = [len(of_form) for fields in reader.manifest["tables"].values() for of_form in fields["shards"].values()]
    assert (max(shards) > 1) == (max_file_bytes == 6000)
    sizes = [entry["bytes"] for entry in reader.manifest["files"].values()]
    assert max(sizes) <= max_file_bytes
    (name,) = reader.manifest["dense_state"]
    assert reader.tensors(name)["layer"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("max_file_bytes", [2_000_000_000, 1000])
def test_the_document_is_enough_to_read_bit_fields(tmp_path: Path, max_file_bytes: int) -> None:
    torch.manual_seed(0)
    _, scheme = large_tables(40)
    coded = {name: with_codes(table, widths=WIDTHS) for name, table in scheme.tables.items()}
    weights = {name: torch.randn(table.num_embeddings, table.embedding_dim) for name, table in coded.items()}
    state = MixedDimensionScheme(coded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "write_packed", lambda folder, stem, tensors, *_: write_packed(folder, stem, tensors))
        path = write_artifact(weights, state, tmp_path / "a", max_file_bytes=max_file_bytes)
    reader, served = Reader(path), load(path)
    reader.verify()
    assert {int(width) for table in coded.values() for width in table.codes.bits.unique()} == set(WIDTHS)
    for name, table in coded.items():
        found = torch.from_numpy(reader.dense(name, "packed"))
        torch.testing.assert_close(found, rounded(table, weights[name]), rtol=1e-6, atol=1e-6)
        ids = torch.arange(table.num_embeddings)
        bags = KeyedJaggedTensor(
            keys=list(coded), values=ids.repeat(len(coded)) % 60, lengths=torch.ones(len(coded) * len(ids)).int()
        )
        torch.testing.assert_close(served(bags).to_dict()[name], found[ids % 60], rtol=1e-5, atol=1e-5)
        shards = reader.manifest["tables"][name]["shards"]["packed"]
        assert (len(shards) > 1) == (max_file_bytes == 1000)


def test_the_document_names_every_field(tmp_path: Path) -> None:
    tables, scheme = large_tables()
    manifest = Reader(write_artifact(tables, scheme, tmp_path / "a", dense_state={"x": torch.ones(1)})).manifest
    text = DOCUMENT.read_text(encoding="utf-8")
    table = next(iter(manifest["tables"].values()))
    file = manifest["files"]["dense_state.safetensors"]
    shard, tensor = table["shards"]["mixed_dimension"][0], file["tensors"]["x"]
    forms = [*table["shards"], *FORMS]
    for field in [*manifest, *table, *file, *shard, *tensor, *table["blocks"][0], *forms, *NUMPY_DTYPES]:
        assert f"`{field}`" in text or f'"{field}"' in text, field
