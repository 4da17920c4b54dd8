"""ParsedStream: the samples of a stream, parsed once and then read from memory-mapped files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dnis_torchrec.blocks.hashing import HASH_VERSION, spread
from dnis_torchrec.data.files import written_whole
from dnis_torchrec.streaming.access import is_plain_file, make_folder
from dnis_torchrec.streaming.chunks import CACHE_FORMAT_VERSION, CHUNK_ROWS, ChunkIndex, index_files
from dnis_torchrec.streaming.parsing import ParsedChunk, parse_chunk
from dnis_torchrec.streaming.schema import StreamSchema


class ParsedStream:
    """All samples of some files, by chunk."""

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        schema: StreamSchema,
        *,
        cache: Path | None = None,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        self.schema = schema
        self.index: ChunkIndex = index_files(files, cache=cache, chunk_rows=chunk_rows)
        hashing = [HASH_VERSION] if schema.hashed or schema.split_by is not None else []
        self.layout = _digest(
            schema.to_json(), [chunk.num_rows for chunk in self.index.chunks], *hashing
        )
        key = _digest(CACHE_FORMAT_VERSION, HASH_VERSION, self.index.fingerprint, schema.to_json())
        self._folder = cache / f"parsed_{key[:16]}" if cache is not None else None
        self._last: tuple[int, ParsedChunk] | None = None

    @property
    def num_samples(self) -> int:
        """Samples of all files."""
        return self.index.num_samples

    def chunk(self, number: int) -> ParsedChunk:
        """The samples of one chunk, memory-mapped if they are in the cache; they are put there if
        they are not."""
        # Neighbouring windows share a chunk.
        if self._last is None or self._last[0] != number:
            self._last = (number, self._read(number))
        return self._last[1]

    def _read(self, number: int) -> ParsedChunk:
        file = None
        if self._folder is not None:
            file = (
                make_folder(self._folder, within=self._folder.parent)
                / f"chunk_{number:06d}.safetensors"
            )
        if file is not None and is_plain_file(file):
            try:
                return ParsedChunk.from_tensors(load_file(file), self.schema)
            except (SafetensorError, KeyError):  # damaged from outside: made anew below
                file.unlink(missing_ok=True)
        chunk = self.index.chunks[number]
        parsed = parse_chunk(self.index.files[chunk.file], chunk, self.schema)
        if file is not None:
            with written_whole(file) as unfinished:
                save_file(
                    {name: tensor.contiguous() for name, tensor in parsed.to_tensors().items()},
                    unfinished,
                )
        return parsed

    def split_position(self, number: int, seed: int) -> np.ndarray:
        """Returns the positions of a chunk's samples in [0, 1), by which the stream is split, see
        `streaming.split`."""
        if self.schema.split_by is None:
            first, last = self.index.offsets[number : number + 2]
            return spread(np.arange(first, last, dtype=np.uint64), seed)
        keys = self.chunk(number).split_keys
        assert keys is not None  # the schema has a column that splits
        return spread(keys.numpy().view(np.uint64), seed)


def _digest(*content: object) -> str:
    """Returns the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
