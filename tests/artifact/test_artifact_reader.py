"""A reader made of docs/artifact.md alone: standard library and numpy, nothing of this package.

It is what somebody would write in C++: map the files, go to the offsets that the manifest states, add up rows.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from itertools import pairwise
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
from dnis_torchrec.forms import FORMS
from dnis_torchrec.scheme import MixedDimensionScheme
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
PACKED = {"dense_fp16": 2000, "dense_int8": 500, "dense_int4": 28, "row_pruned_int8": 500, "row_pruned_int4": 28}
"""Forms of packed rows, and into how many half steps they cut a row's range, at least."""


def unpacked(row: np.ndarray, form: str, count: int) -> np.ndarray:
    """The values of a packed row."""
    if row.dtype == np.float32:
        return row
    if form.endswith("fp32"):
        return row.view("<f4")
    if form.endswith("fp16"):
        return row.view("<f2").astype(np.float32)
    scale, bias = row[-4:].copy().view("<f2").astype(np.float32)
    quantised = row[:-4]
    if form.endswith("int4"):
        quantised = np.stack([quantised & 15, quantised >> 4], axis=1).ravel()
    return (scale * quantised.astype(np.float32) + bias)[:count]


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
            if not form.startswith("csr"):
                used = dict.fromkeys(tensors, 0)
                every_column = np.ones(fields["embedding_dim"], bool)
                for row in range(first, first + num_rows):
                    retains = blocks[row] < len(retained) and retained[blocks[row]].any()
                    if form.startswith("mixed_dimension"):
                        key, columns = f"b{blocks[row]}", retained[blocks[row]] if retains else None
                    else:
                        key, columns = "rows", every_column
                        retains = retains or form.startswith("dense")
                    if retains:
                        out[row, columns] = unpacked(tensors[key][used[key]], form, columns.sum())
                        used[key] += 1
                assert used == {key: len(rows) for key, rows in tensors.items()}
                continue
            compact = tensors.get("compact_row_pointers")
            assert (compact is None) == (fields["embedding_dim"] > 255)
            check_interleaved(tensors)
            for i in range(num_rows):
                if compact is not None:  # the other way to find a row
                    record = compact[i // 56 * 64 :][:64]
                    begin = int(record[:8].copy().view("<i8")[0]) + int(record[8 : 8 + i % 56].sum())
                    assert begin == tensors["row_pointers"][i]
                    assert begin + int(record[8 + i % 56]) == tensors["row_pointers"][i + 1]
                for p in range(tensors["row_pointers"][i], tensors["row_pointers"][i + 1]):
                    value = np.float32(tensors["values"][p])
                    out[first + i, tensors["columns"][p]] = (
                        value * tensors["scales"][i] if "scales" in tensors else value
                    )
        assert next_row == fields["num_embeddings"]
        return out


def check_interleaved(tensors: dict[str, np.ndarray]) -> None:
    """The other way to read rows: scale, values and columns of each, one after the other."""
    wanted = bytearray()
    for i, (begin, end) in enumerate(pairwise(tensors["row_pointers"])):
        if "scales" in tensors:
            wanted += (tensors["scales"][i : i + 1].view("<u4") >> 16).astype("<u2").tobytes()
        wanted += tensors["values"][begin:end].tobytes() + tensors["columns"][begin:end].tobytes()
    assert tensors["interleaved_rows"].tobytes() == wanted


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
    forms, state = [n for n, form in FORMS.items() if not form.needs_codes], {"layer": torch.arange(3.0).double()}
    path = write_artifact(tables, scheme, tmp_path / "a", forms=forms, dense_state=state, max_file_bytes=max_file_bytes)
    reader = Reader(path)
    reader.verify()
    assert list(reader.manifest["tables"]) == list(tables)
    for name, table in tables.items():
        weight = table.numpy()
        bound = np.abs(weight).max(axis=1, keepdims=True)
        for form in ("csr_fp32", "mixed_dimension_fp32", "dense_fp32"):
            assert (reader.dense(name, form) == weight).all()
        assert (np.abs(reader.dense(name, "csr_fp16") - weight) <= np.abs(weight) * 2**-11 + 2**-25).all()
        assert (np.abs(reader.dense(name, "csr_int8") - weight) <= 0.004 * bound).all()
        for form, steps in PACKED.items():
            spread = weight.max(axis=1, keepdims=True) - weight.min(axis=1, keepdims=True)
            assert (np.abs(reader.dense(name, form) - weight) <= spread / steps + 0.002 * bound + 1e-6).all(), form
    assert set(FORMS) == {"csr_fp32", "csr_fp16", "csr_int8", "mixed_dimension_fp32", "dense_fp32", *PACKED, "packed"}
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
    shard, tensor = table["shards"]["csr_fp32"][0], file["tensors"]["x"]
    forms = [*table["shards"], *FORMS]
    for field in [*manifest, *table, *file, *shard, *tensor, *table["blocks"][0], *forms, *NUMPY_DTYPES]:
        assert f"`{field}`" in text or f'"{field}"' in text, field
