"""ChunkIndex: the files of a stream in chunks of known length, so that any sample is found without
reading others."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypedDict

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.files import read_json, write_text, written_whole
from dnis_torchrec.streaming.access import (
    expand,
    filesystem,
    is_plain_file,
    read_bytes,
    retrying,
    version_of,
)

CHUNK_ROWS = 1 << 16
CACHE_FORMAT_VERSION = 2
READ_BYTES = 1 << 26
_NEWLINE = ord("\n")


@dataclass(frozen=True)
class FileChunk:
    """A piece of one file."""

    file: int
    start: int
    end: int
    first_row: int
    num_rows: int


class _Kept(TypedDict):
    """An index in a file."""

    files: list[str]
    chunks: list[tuple[int, int, int, int, int]]


@dataclass(frozen=True)
class ChunkIndex:
    """All chunks of a stream, in the order of the files."""

    files: tuple[str, ...]
    fingerprint: str
    chunks: tuple[FileChunk, ...]

    @property
    def offsets(self) -> np.ndarray:
        """``(num_chunks + 1,)`` int64: chunk c holds the samples ``offsets[c]..offsets[c + 1] - 1``
        of the stream."""
        return np.cumsum([0, *(chunk.num_rows for chunk in self.chunks)], dtype=np.int64)

    @property
    def num_samples(self) -> int:
        """Samples of the whole stream."""
        return sum(chunk.num_rows for chunk in self.chunks)


def is_parquet(address: str) -> bool:
    """Returns whether a file is read as Parquet; every other one is text."""
    return address.endswith((".parquet", ".pq"))


def index_files(
    files: Sequence[str | os.PathLike[str]],
    *,
    cache: Path | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> ChunkIndex:
    """Finds the chunks of Parquet and text files."""
    check(chunk_rows >= 1, "chunk_rows", "an integer >= 1", chunk_rows)
    addresses = expand(files)
    versions = [_version(address) for address in addresses]
    described = json.dumps([CACHE_FORMAT_VERSION, chunk_rows, addresses, versions])
    fingerprint = hashlib.sha256(described.encode()).hexdigest()
    kept = cache / f"index_{fingerprint[:16]}.json" if cache else None
    if kept is not None and is_plain_file(kept):
        content = read_json(kept, _Kept, remedy="remove it")
        unpacked = set(content["files"]) - set(
            addresses
        )  # may have been removed alone, being large
        if all(Path(name).parent == cache and is_plain_file(Path(name)) for name in unpacked):
            return ChunkIndex(
                tuple(content["files"]),
                fingerprint,
                tuple(FileChunk(*chunk) for chunk in content["chunks"]),
            )
    plain = tuple(
        _plain(address, version, cache)
        for address, version in zip(addresses, versions, strict=True)
    )
    chunks = [
        chunk
        for number, address in enumerate(plain)
        for chunk in _chunks_of(address, number, chunk_rows)
    ]
    index = ChunkIndex(plain, fingerprint, tuple(chunks))
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        described = json.dumps(
            {"files": index.files, "chunks": [astuple(chunk) for chunk in index.chunks]}
        )
        write_text(kept, described + "\n")
    return index


def _version(address: str) -> str:
    files, path = filesystem(address)
    return version_of(retrying(lambda: files.info(path), f"address {address}"))


def _plain(address: str, version: str, cache: Path | None) -> str:
    """The address of a file's plain text: a compressed one cannot be entered in the middle, so it
    is unpacked once."""
    if is_parquet(address) or fsspec.utils.infer_compression(address) is None:
        return address
    place, remedy = (
        f"address {address}",
        "unpack it, convert it to Parquet, or give a cache folder to unpack it to",
    )
    if cache is None:
        raise ValueError(describe(place, "plain text or Parquet", "compressed text", remedy))
    unpacked = (
        cache / f"unpacked_{hashlib.sha256(f'{address} {version}'.encode()).hexdigest()[:16]}.txt"
    )
    if is_plain_file(unpacked):
        return str(unpacked)
    cache.mkdir(parents=True, exist_ok=True)

    def unpack(unfinished: Path) -> None:
        with (
            fsspec.open(address, "rb", compression="infer") as source,
            unfinished.open("wb") as target,
        ):
            try:
                shutil.copyfileobj(source, target, READ_BYTES)
            except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
                raise ValueError(
                    describe(place, "a whole compressed file", error, "download it again")
                ) from error

    with written_whole(unpacked) as unfinished:
        retrying(lambda: unpack(unfinished), place)
    return str(unpacked)


def _chunks_of(address: str, number: int, chunk_rows: int) -> list[FileChunk]:
    chunks = (
        _row_groups(address, number)
        if is_parquet(address)
        else _line_chunks(address, number, chunk_rows)
    )
    check(bool(chunks), f"address {address}", "at least one sample", "an empty file")
    return chunks


def _row_groups(address: str, number: int) -> list[FileChunk]:
    files, path = filesystem(address)

    def read_footer() -> pq.FileMetaData:
        with files.open(path, "rb") as file:
            return pq.read_metadata(file)

    try:
        footer = retrying(read_footer, f"address {address}")
    except pa.ArrowInvalid as error:
        raise ValueError(describe(f"address {address}", "a Parquet file", str(error))) from error
    chunks, first_row = [], 0
    for group in range(footer.num_row_groups):
        num_rows = footer.row_group(group).num_rows
        if num_rows:
            chunks.append(FileChunk(number, group, group + 1, first_row, num_rows))
        first_row += num_rows
    return chunks


def _line_chunks(address: str, number: int, chunk_rows: int) -> list[FileChunk]:
    """Every `chunk_rows`-th line begins a chunk; the rest of the file is the last one."""
    size = _size(address)
    starts, first_rows, num_lines, last_byte = [0], [0], 0, _NEWLINE
    for begin in range(0, size, READ_BYTES):
        block = np.frombuffer(
            read_bytes(address, begin, min(begin + READ_BYTES, size)), dtype=np.uint8
        )
        ends = np.flatnonzero(block == _NEWLINE)
        # The line after the k-th line end of the file is line k, counted from 0.
        for line in range(
            (num_lines // chunk_rows + 1) * chunk_rows, num_lines + len(ends) + 1, chunk_rows
        ):
            starts.append(begin + int(ends[line - num_lines - 1]) + 1)
            first_rows.append(line)
        num_lines += len(ends)
        last_byte = int(block[-1])
    num_lines += int(last_byte != _NEWLINE)
    bounds = zip(starts, [*starts[1:], size], first_rows, [*first_rows[1:], num_lines], strict=True)
    return [
        FileChunk(number, start, end, row, next_row - row)
        for start, end, row, next_row in bounds
        if next_row > row
    ]


def _size(address: str) -> int:
    files, path = filesystem(address)
    return int(retrying(lambda: files.size(path), f"address {address}"))
