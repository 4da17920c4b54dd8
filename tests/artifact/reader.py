"""A reader made of docs/artifact.md alone: standard library and numpy, nothing of this package.

It is what somebody would write in C++: map the files, go to the offsets that the manifest states, add up rows.
"""

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENT = Path(__file__).parents[2] / "docs" / "artifact.md"
DTYPES = {
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
        for name, entry in self.manifest["files"].items():
            content = (self.folder / name).read_bytes()
            if len(content) != entry["bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise ValueError(f"{name} is damaged")

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        with (self.folder / name).open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        found = {}
        for key, fields in self.manifest["files"][name]["tensors"].items():
            dtype, count = np.dtype(DTYPES[fields["dtype"]]), int(np.prod(fields["shape"], dtype=np.int64))
            assert fields["offset"] % dtype.itemsize == 0
            array = np.frombuffer(mapped, dtype, count, fields["offset"]).reshape(fields["shape"])
            if fields["dtype"] == "bfloat16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            found[key] = array
        return found

    def scheme(self) -> dict[str, np.ndarray]:
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
        tensors = self.scheme()
        bits, scale, shift = (tensors.get(f"{table}/{part}") for part in ("bits", "scale", "shift"))
        if bits is None:  # float32, all that is retained
            bits, scale, shift = retained * 32, np.ones(retained.shape, np.float32), np.zeros(retained.shape)
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
