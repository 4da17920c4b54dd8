"""Streams become batches: parsed right, each sample once, the same order whoever asks, resumed at any batch."""

from __future__ import annotations

import gzip
import json
import math
import re
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dnis_torchrec.blocks.hashing import hash_values, spread
from dnis_torchrec.data.over_ranks import all_samples
from dnis_torchrec.streaming import WHOLE, ParsedStream, StreamedBatches, StreamSchema, cut, parsed, split_stream
from dnis_torchrec.streaming.chunks import index_files
from dnis_torchrec.streaming.epochs import EpochOrder
from dnis_torchrec.streaming.split import Part
from tests.streaming_data import COLUMNS, SCHEMA, contents, draw, expected, labels, write_parquet, write_text

SAMPLES = draw(53)
MANY_WORKERS = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning")
"""A machine of one core would rather have fewer."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Two text files, the second without a line end at its end."""
    write_text(tmp_path / "part_0.tsv", SAMPLES[:30])
    write_text(tmp_path / "part_1.tsv", SAMPLES[30:], last_newline=False)
    return tmp_path


def stream_of(folder: Path, **settings: object) -> ParsedStream:
    return ParsedStream([folder / "part_*.tsv"], SCHEMA, **{"chunk_rows": 8, **settings})


@pytest.mark.parametrize("world_size", [1, 3])
def test_counting_sees_every_sample_and_moves_nothing(text: Path, world_size: int) -> None:
    """An epoch leaves out a tail, the next one another."""
    stream, seen = stream_of(text), []
    for rank in range(world_size):
        batches = StreamedBatches(stream, batch_size=5, rank=rank, world_size=world_size)
        next(iter(batches))
        before = batches.state_dict()
        seen += [label for batch in labels(all_samples(batches)) for label in batch]
        assert batches.state_dict() == before
        assert len(list(batches)) == len(batches)
    assert sorted(seen) == list(range(53))


@pytest.mark.parametrize("form", ["text", "parquet", "gzip"])
@pytest.mark.parametrize("cached", [False, True])
def test_every_sample_becomes_what_the_definitions_say(tmp_path: Path, form: str, cached: bool) -> None:
    if form == "parquet":
        write_parquet(tmp_path / "a.parquet", SAMPLES[:30], row_group=8)
        write_parquet(tmp_path / "b.parquet", SAMPLES[30:], row_group=100)
    else:
        write_text(tmp_path / "a.tsv", SAMPLES, last_newline=False)
    if form == "gzip":
        (tmp_path / "a.tsv.gz").write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    pattern = {"text": "*.tsv", "parquet": "*.parquet", "gzip": "*.gz"}[form]
    cache = tmp_path / "cache" if cached or form == "gzip" else None
    for _ in range(2):  # the second time from the cache
        stream = ParsedStream([tmp_path / pattern], SCHEMA, cache=cache, chunk_rows=8)
        batches = list(StreamedBatches(stream, batch_size=4, shuffle=False, drop_last=False, window_batches=3))
        assert [label for batch in labels(batches) for label in batch] == list(range(53))
        assert batches[0].sparse_features.keys() == ["b", "a", "tags"]
        assert batches[0].sparse_features.values().dtype == torch.int64
        found = {label: sample for batch in batches for label, sample in contents(batch).items()}
        for number, sample in enumerate(SAMPLES):
            wanted = expected(sample)
            assert found[number].pop("dense") == pytest.approx(wanted.pop("dense"))
            assert found[number] == wanted


def test_text_that_was_removed_from_the_cache_is_unpacked_again(tmp_path: Path) -> None:
    """It is by far the largest file there."""
    write_text(tmp_path / "a.tsv", SAMPLES)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress((tmp_path / "a.tsv").read_bytes()))
    cache = tmp_path / "cache"
    for _ in range(2):
        index = index_files([tmp_path / "a.tsv.gz"], cache=cache, chunk_rows=8)
        (unpacked,) = index.files
        assert Path(unpacked).read_bytes() == (tmp_path / "a.tsv").read_bytes()
        Path(unpacked).unlink()


def test_hashes_stay_what_they_are() -> None:
    """Models and caches depend on these values."""
    assert hash_values(pa.array(["68fd1e64", "", "é"])).tolist() == [
        8720343639559439040,
        1760245841805064774,
        16908809132758853863,
    ]
    assert hash_values(pa.array([0, 7, -1])).tolist() == [0, 1346066267577507604, 13029008266876403067]
    assert hash_values(pa.array([7], pa.int32())).tolist() == [1346066267577507604]
    assert spread(np.arange(3, dtype=np.uint64), seed=0).tolist() == pytest.approx(
        [0.9011547837836906, 0.20047279921877115, 0.5872618601966147]
    )


def test_positions_are_spread_evenly_and_seeds_are_unrelated() -> None:
    positions = spread(np.arange(100_000, dtype=np.uint64), seed=3)
    counts = np.histogram(positions, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 10_000).max() < 5 * np.sqrt(9000)
    other = spread(np.arange(100_000, dtype=np.uint64), seed=4)
    assert abs(np.corrcoef(positions, other)[0, 1]) < 0.02


@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    window_batches=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_ranks_share_the_samples_and_have_the_same_number_of_batches(
    chunks: list[int], batch_size: int, world_size: int, drop_last: bool, shuffle: bool, window_batches: int, epoch: int
) -> None:
    num_samples = sum(chunks)
    if num_samples < world_size * (batch_size if drop_last else 1):
        return
    served: list[tuple[int, int]] = []
    for rank in range(world_size):
        order = EpochOrder(
            chunk_samples=np.array(chunks),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            shuffle=shuffle,
            window_batches=window_batches,
            seed=1,
        )
        sizes = []
        for window in range(order.num_windows):
            pieces = order.pieces(epoch, window)
            samples = [(chunk, sample) for chunk, first, last in pieces for sample in range(first, last)]
            permutation = order.permutation(epoch, window).tolist()
            assert sorted(permutation) == list(range(len(samples)))
            bounds = order.window_bounds(window).tolist()
            sizes += [end - begin for begin, end in pairwise(bounds)]
            assert bounds[-1] == len(samples)
            served += samples
        if drop_last:
            assert sizes == [batch_size] * (num_samples // (world_size * batch_size))
        else:
            assert len(sizes) == -(-(num_samples // world_size) // batch_size)
            assert 1 <= min(sizes) <= max(sizes) <= batch_size + 1
            assert max(sizes) <= batch_size or world_size > 1
    assert len(set(served)) == len(served)
    assert all(sample < chunks[chunk] for chunk, sample in served)
    lost = num_samples - len(served)
    assert lost < world_size * batch_size if drop_last else lost == 0


def test_shuffling_is_a_new_order_each_epoch_and_the_same_each_time(text: Path) -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        batches = StreamedBatches(stream_of(text), batch_size=5, seed=seed, window_batches=4)
        return [labels(list(batches)) for _ in range(3)]

    first = epochs(seed=0)
    assert first == epochs(seed=0)
    assert first != epochs(seed=1)
    assert len({str(epoch) for epoch in first}) == 3
    assert all(len(epoch) == 10 and all(len(batch) == 5 for batch in epoch) for epoch in first)
    # Chunks are mixed too: what is left out as a tail differs, and no batch keeps to one chunk of eight.
    assert len({frozenset(range(53)) - {label for batch in epoch for label in batch} for epoch in first}) > 1


@MANY_WORKERS
@pytest.mark.parametrize("world_size", [1, 2])
def test_workers_change_nothing(text: Path, world_size: int) -> None:
    def served(rank: int, num_workers: int) -> list[list[int]]:
        batches = StreamedBatches(
            stream_of(text), batch_size=2, window_batches=3, num_workers=num_workers, rank=rank, world_size=world_size
        )
        batches.load_state_dict(batches.state_dict() | {"epoch": 2, "batch": 4})
        return labels(list(batches))

    assert served(world_size - 1, num_workers=2) == served(world_size - 1, num_workers=0)


@MANY_WORKERS
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_stream_goes_on_with_the_next_batch(text: Path, num_workers: int) -> None:
    def new() -> StreamedBatches:
        return StreamedBatches(stream_of(text), batch_size=5, window_batches=3, num_workers=num_workers)

    whole = new()
    wanted = [labels(list(whole)) for _ in range(2)]
    for handed_out in (0, 1, 7, 10):
        interrupted = new()
        list(islice(interrupted, handed_out))
        state = interrupted.state_dict()
        assert (state["epoch"], state["batch"]) == divmod(handed_out, 10)
        resumed = new()
        resumed.load_state_dict(state)
        rest = labels(list(resumed)) if handed_out < 10 else []
        assert rest == wanted[0][handed_out:]
        assert labels(list(resumed)) == wanted[1]


def test_setting_the_epoch_goes_to_its_beginning(text: Path) -> None:
    batches = StreamedBatches(stream_of(text), batch_size=5)
    third = [labels(list(batches)) for _ in range(3)][2]
    assert batches.epoch == 3
    list(islice(batches, 4))
    batches.epoch = 2
    assert (batches.state_dict()["epoch"], batches.state_dict()["batch"]) == (2, 0)
    assert labels(list(batches)) == third


def test_a_position_in_something_else_is_refused(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = StreamedBatches(stream_of(text), batch_size=5, rank=0, world_size=1).state_dict() | {"batch": 6}
    with pytest.raises(ValueError, match="stream's batch_size: expected 4, got 5"):
        StreamedBatches(stream_of(text), batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="stream's layout"):
        StreamedBatches(stream_of(text, chunk_rows=9), batch_size=5).load_state_dict(state)
    with pytest.raises(ValueError, match=r"stream's batch: expected 0..9, got 10"):
        StreamedBatches(stream_of(text), batch_size=5).load_state_dict(state | {"batch": 10})
    half = StreamedBatches(stream_of(text), batch_size=5, rank=1, world_size=2)
    half.load_state_dict(state)
    assert "going on at batch 3 of 5" in caplog.text
    assert len(list(half)) == 2


def test_a_changed_file_is_parsed_anew_and_another_schema_keeps_its_own_cache(text: Path) -> None:
    cache = text / "cache"
    first = stream_of(text, cache=cache)
    before = first.chunk(0).ids.clone()
    other_schema = StreamSchema(label="y", single_id={"a": 5}, text_columns=COLUMNS)
    assert ParsedStream([text / "part_*.tsv"], other_schema, cache=cache, chunk_rows=8).chunk(0).ids.shape == (1, 8)
    assert torch.equal(stream_of(text, cache=cache).chunk(0).ids, before)
    write_text(text / "part_0.tsv", draw(31, seed=5))
    assert stream_of(text, cache=cache).num_samples == 54
    assert not list(cache.rglob("*.partial"))


def test_what_is_cached_is_not_parsed_again_and_damage_is_mended(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = text / "cache"
    stream = stream_of(text, cache=cache)
    wanted = [stream.chunk(number).labels.clone() for number in range(len(stream.index.chunks))]
    files = sorted(cache.glob("parsed_*/*"))
    assert len(files) == len(wanted) == 7
    files[2].write_bytes(files[2].read_bytes()[:20])
    parsed_chunks = []
    real = parsed.parse_chunk
    monkeypatch.setattr(
        parsed,
        "parse_chunk",
        lambda address, chunk, schema: parsed_chunks.append(chunk) or real(address, chunk, schema),
    )
    again = stream_of(text, cache=cache)
    for number, labels_of_chunk in enumerate(wanted):
        assert torch.equal(again.chunk(number).labels, labels_of_chunk)
    assert parsed_chunks == [stream.index.chunks[2]]


def test_parts_are_disjoint_whole_and_the_same_in_every_epoch(text: Path) -> None:
    stream = stream_of(text)
    parts = cut((0.5, 0.2, 0.1, 0.2), seed=7)
    served = []
    for part in parts:
        batches = StreamedBatches(stream, part=part, batch_size=3, shuffle=False, drop_last=False)
        epochs = [[label for batch in labels(list(batches)) for label in batch] for _ in range(2)]
        assert epochs[0] == epochs[1]
        assert len(epochs[0]) == batches.num_samples
        served += epochs[0]
    assert sorted(served) == list(range(53))
    assert served != list(range(53))


def test_a_column_that_splits_keeps_its_values_together(text: Path) -> None:
    schema = StreamSchema(
        label="y", single_id={"a": 7}, text_columns=COLUMNS, separator="\t", split_by="b", multi_hot={}
    )
    written = [sample for sample in SAMPLES if sample.b is not None]
    write_text(text / "users.tsv", written)
    for cache in (None, text / "cache"):
        stream = ParsedStream([text / "users.tsv"], schema, cache=cache, chunk_rows=8)
        users = []
        for part in cut((0.5, 0.5), seed=1):
            batches = StreamedBatches(stream, part=part, batch_size=2, shuffle=False, drop_last=False)
            served = [label for batch in labels(list(batches)) for label in batch]
            users.append({SAMPLES[label].b for label in served})
            assert len(served) == sum(sample.b in users[-1] for sample in written)
        assert users[0] | users[1] == set("ABCDE")
        assert not users[0] & users[1]


def test_fractions_come_out_as_stated() -> None:
    part = cut((0.1, 0.3), seed=2)[1]
    inside = part.contains(spread(np.arange(10**6, dtype=np.uint64), part.seed))
    assert abs(inside.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 10**6)
    assert cut((0.7, 0.2, 0.1))[-1].end == 1.0
    assert Part(0.0, 1.0) == WHOLE
    with pytest.raises(ValueError, match=r"expected a sum of at most 1, got 1.2"):
        cut((0.6, 0.6))


def test_the_four_parts_of_a_search(tmp_path: Path) -> None:
    write_text(tmp_path / "all.tsv", draw(400))
    splits = split_stream(ParsedStream([tmp_path / "all.tsv"], SCHEMA), batch_size=4, seed=0)
    served = {
        name: {label for batch in labels(list(getattr(splits, name))) for label in batch}
        for name in ("train", "validation", "selection", "test")
    }
    assert 0.7 * 400 < len(served["train"]) < 0.9 * 400
    assert sum(map(len, served.values())) == len(set().union(*served.values()))
    assert 400 - sum(map(len, served.values())) < 8  # the tails of train and validation
    epochs = [labels(list(splits.test)) for _ in range(2)]
    assert epochs[0] == epochs[1]


def test_files_on_storage_are_streamed_in_place(tmp_path: Path) -> None:
    write_text(tmp_path / "a.tsv", SAMPLES)
    write_parquet(tmp_path / "a.parquet", SAMPLES, row_group=20)
    storage = MemoryFileSystem()
    storage.pipe("/streamed/a.tsv", (tmp_path / "a.tsv").read_bytes())
    storage.pipe("/streamed/b/a.parquet", (tmp_path / "a.parquet").read_bytes())
    for pattern in ("memory://streamed/*.tsv", "memory://streamed/b"):
        stream = ParsedStream([pattern], SCHEMA, chunk_rows=8, cache=tmp_path / "cache")
        assert stream.index.files[0].startswith("memory://")
        batches = StreamedBatches(stream, batch_size=8, shuffle=False, drop_last=False)
        assert [label for batch in labels(list(batches)) for label in batch] == list(range(53))
    storage.rm("/streamed", recursive=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\tz\tp\tA", r"line 4: .*fields.*got 5: '1"),
        ("x\t2\tz\tp\tA\t1\tk", r"line 4: .*got 'x"),
        ("1\ty\tz\tp\tA\t1\tk", r"line 4: .*got '1"),
        ("\t2\tz\tp\tA\t1\tk", r"line 4, column 'y': expected a finite label, got nan"),
        ("inf\t2\tz\tp\tA\t1\tk", r"line 4, column 'y': expected a finite label, got inf"),
        ("", r"line 4, column 'y': expected a finite label, got nan"),
        ("1\tinf\tz\tp\tA\t1\tk", r"bad\.tsv, line 4, column 'x0': expected a finite number, got inf; clean the data"),
        ("1\t2\tz\tp\tA\t-Infinity\tk", r"line 4, column 'x1': expected a finite number, got -inf"),
        ("1\t2\tz\tp\tA\t1e39\tk", r"line 4, column 'x1': expected a finite number, got inf"),
        ("1\tNaN\tz\tp\tA\t1\tk", r"line 4, column 'x0': expected a finite number, got nan"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_text(tmp_path / "bad.tsv", SAMPLES[:6])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    stream = ParsedStream([path], SCHEMA, chunk_rows=2)
    with pytest.raises(ValueError, match=message):
        list(StreamedBatches(stream, batch_size=2))


def test_numbers_of_parquet_are_finite_or_missing(tmp_path: Path) -> None:
    """NaN is how arrays say that a number is missing."""
    path = tmp_path / "dense.parquet"
    schema = StreamSchema(label="y", dense=("x",), single_id={"a": 7})

    def served(x: list[float | None]) -> list[float]:
        pq.write_table(pa.table({"y": [0, 1, 0], "x": pa.array(x, pa.float64()), "a": ["p", "q", "r"]}), path)
        (batch,) = StreamedBatches(ParsedStream([path], schema), batch_size=3, shuffle=False)
        return batch.dense_features.flatten().tolist()

    assert served([math.nan, 2.5, None]) == [0, 2.5, 0]
    with pytest.raises(ValueError, match=r"dense\.parquet, row 2, column 'x': expected a finite number, got -inf"):
        served([1, 2, -math.inf])


def test_ids_that_are_rows_already(tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text("1,4,0|2\n0,3,\n")
    schema = StreamSchema(
        label="y", single_id={"a": 5}, multi_hot={"m": 3}, hashed=False, separator=",", text_columns=("y", "a", "m")
    )
    (batch,) = StreamedBatches(ParsedStream([tmp_path / "ids.csv"], schema), batch_size=2, shuffle=False)
    assert batch.sparse_features.values().tolist() == [4, 3, 0, 2]
    assert batch.sparse_features.lengths().tolist() == [1, 1, 2, 0]
    for text, bad in (("1,4,0|x", "'x'"), ("1,4,0|2.0", "'2.0'"), ("1,4,9223372036854775808", "'9223372036854775808'")):
        (tmp_path / "ids.csv").write_text(f"{text}\n")
        with pytest.raises(ValueError, match=rf"ids\.csv.*column 'm': expected integers, got {re.escape(bad)}; clean"):
            list(StreamedBatches(ParsedStream([tmp_path / "ids.csv"], schema), batch_size=1))
    (tmp_path / "ids.csv").write_text("1,5,0|2\n")
    with pytest.raises(ValueError, match=r"column 'a': expected ids in 0..4, got 5"):
        list(StreamedBatches(ParsedStream([tmp_path / "ids.csv"], schema), batch_size=1))


@pytest.mark.parametrize("hashed", [True, False])
def test_large_strings_of_parquet_are_text_as_others_are(tmp_path: Path, hashed: bool) -> None:
    """Polars, and pandas with Arrow types, write nothing else."""
    schema = StreamSchema(label="y", multi_hot={"m": 30}, hashed=hashed)

    def served(column: pa.Array) -> list[list[int]]:
        pq.write_table(pa.table({"y": [0, 1, 0, 1], "m": column}), tmp_path / "bags.parquet")
        stream = ParsedStream([tmp_path / "bags.parquet"], schema)
        (batch,) = StreamedBatches(stream, batch_size=4, shuffle=False)
        return [bag.tolist() for bag in batch.sparse_features["m"].to_dense()]

    text, lists = ["0|2", "7", "1", None], [["0", "2"], ["7"], [], None]
    expected = served(pa.array(text, pa.string()))
    assert list(map(len, expected)) == [2, 1, 1, 0]
    assert served(pa.array(text, pa.large_string())) == expected
    if hashed:
        assert served(pa.array(lists, pa.large_list(pa.large_string()))) == served(
            pa.array(lists, pa.list_(pa.string()))
        )


def test_streams_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least one file, got none"):
        ParsedStream([tmp_path / "*.tsv"], SCHEMA)
    (tmp_path / "empty.tsv").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty.tsv: expected at least one sample"):
        ParsedStream([tmp_path / "empty.tsv"], SCHEMA)
    (tmp_path / "no.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"no.parquet: expected a Parquet file"):
        ParsedStream([tmp_path / "no.parquet"], SCHEMA)
    (tmp_path / "packed.tsv.gz").write_bytes(gzip.compress(b"1\n")[:-6])
    with pytest.raises(ValueError, match="compressed text; unpack it"):
        ParsedStream([tmp_path / "packed.tsv.gz"], SCHEMA)
    with pytest.raises(ValueError, match="expected a whole compressed file"):
        ParsedStream([tmp_path / "packed.tsv.gz"], SCHEMA, cache=tmp_path / "cache")
    write_text(tmp_path / "few.tsv", SAMPLES[:7])
    stream = ParsedStream([tmp_path / "few.tsv"], SCHEMA)
    with pytest.raises(ValueError, match="expected at least 8 samples for 2 ranks, got 7"):
        StreamedBatches(stream, batch_size=4, rank=0, world_size=2)
    with pytest.raises(ValueError, match="column 'c'"):
        StreamSchema(label="y", single_id={"c": 5}, text_columns=COLUMNS)
    with pytest.raises(ValueError, match="feature 'a': expected num_embeddings"):
        StreamSchema(label="y", single_id={"a": 1})
    with pytest.raises(ValueError, match="text_columns"):
        ParsedStream([tmp_path / "few.tsv"], StreamSchema(label="y", single_id={"a": 5})).chunk(0)


def test_a_cache_is_read_and_written_through_no_link(text: Path, tmp_path: Path) -> None:
    cache, outside = text / "cache", tmp_path / "outside"
    stream = stream_of(text, cache=cache)
    wanted = stream.chunk(0).ids.clone()
    (folder,) = cache.glob("parsed_*")
    (chunk,) = folder.iterdir()
    (index,) = cache.glob("index_*")
    content = {path: path.read_bytes() for path in (chunk, index)}
    other = {name: tensor + 1 for name, tensor in load_file(chunk).items()}
    outside.mkdir()
    save_file(other, outside / chunk.name)
    for planted, target in ((chunk, outside / chunk.name), (index, outside / "index")):
        planted.unlink()
        planted.symlink_to(target)
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    assert torch.equal(stream_of(text, cache=cache).chunk(0).ids, wanted)
    assert {path: path.read_bytes() for path in content if not path.is_symlink()} == content
    chunk.unlink()
    folder.rmdir()
    folder.symlink_to(outside)
    with pytest.raises(ValueError, match="expected a plain folder, got a link; remove it"):
        stream_of(text, cache=cache).chunk(0)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before


def test_an_index_may_name_no_text_outside_the_cache(text: Path, tmp_path: Path) -> None:
    cache = text / "cache"
    stream_of(text, cache=cache)
    (index,) = cache.glob("index_*")
    (tmp_path / "other.tsv").write_bytes((text / "part_0.tsv").read_bytes())
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"files": [str(tmp_path / "other.tsv"), *content["files"][1:]]}))
    assert list(stream_of(text, cache=cache).index.files) == content["files"]
