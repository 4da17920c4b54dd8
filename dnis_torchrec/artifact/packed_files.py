"""Files of the form ``"packed"`` that several ranks fill together: byte for byte those of one
process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dnis_torchrec.artifact.forms import Rows, chunks_of, row_counts_of
from dnis_torchrec.artifact.manifest import file_header
from dnis_torchrec.artifact.writing import FileOfRows, files_of
from dnis_torchrec.blocks.codes import row_strides
from dnis_torchrec.scheme import PACKED, TableScheme
from dnis_torchrec.serving.packed_table import packed_chunks


@dataclass(frozen=True)
class SharedPackedFile:
    """A file of consecutive rows of a table in bit fields. One rank makes it, then all of them fill
    it."""

    table: TableScheme
    file: FileOfRows

    def make(self, folder: Path) -> None:
        """Makes the file, as large as it is going to be. Local, for one rank."""
        (folder / self.file.name).parent.mkdir(exist_ok=True)
        with (folder / self.file.name).open("wb") as file:
            file.write(self._header())
            file.truncate(len(self._header()) + self.file.tensors["rows"].nbytes)

    def fill(self, folder: Path, rows: Rows, span: tuple[int, int]) -> None:
        """Writes those of some consecutive rows of the table that the file holds. Local; others may
        write meanwhile."""
        first, last = max(span[0], self.file.begin), min(span[1], self.file.end)
        if first >= last:
            return
        table, strides = self.table, row_strides(self.table.codes.bits)
        sizes = row_counts_of(table, self.file.begin, self.file.end) * strides
        before = row_counts_of(table, self.file.begin, first) * strides
        at = (len(self._header()) + sizes.cumsum(0) - sizes + before).tolist()
        with (folder / self.file.name).open("r+b") as file:
            for s, packed in packed_chunks(table, chunks_of(table, rows, first, last), first=first):
                file.seek(at[s])
                file.write(packed.contiguous().numpy().data)
                at[s] += packed.nbytes

    def _header(self) -> bytes:
        return file_header("rows", self.file.tensors["rows"])


def packed_files(index: int, table: TableScheme, max_file_bytes: int) -> list[SharedPackedFile]:
    """The files of a table in bit fields, the same on every rank. Local, no collective."""
    table = table.with_float_codes()
    strides, span = row_strides(table.codes.bits), (0, table.num_embeddings)

    def described(first: int, last: int) -> Mapping[str, Tensor]:
        size = int(row_counts_of(table, first, last) @ strides)
        return {"rows": torch.empty(size, dtype=torch.uint8, device="meta")}

    return [
        SharedPackedFile(table, file)
        for file in files_of(PACKED, index, table, span, described, max_file_bytes)
    ]
