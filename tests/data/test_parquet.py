"""Files become batches, resumed at any batch; they appear whole or not at all; storage is fetched and published."""

from __future__ import annotations

import dataclasses
import datetime
import gzip
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from dnis_torchrec.blocks.hashing import hash_values, spread
from dnis_torchrec.data import files, parquet, urls
from dnis_torchrec.data.over_ranks import all_samples
from dnis_torchrec.data.parquet import WHOLE, FileBatches, FileSamples, FileSchema, Part, cut, split_files
from tests.tiny import COLUMNS, SCHEMA, contents, draw, expected, labels, write_parquet, write_text

SAMPLES = draw(53)
ROWS = 10**6
FORMS = ("text", "parquet", "gzip", "header")


def write(folder: Path, form: str) -> list[Path]:
    if form == "parquet":
        write_parquet(folder / "a.parquet", SAMPLES[:30], row_group=8)
        return [folder / "a.parquet", write_parquet(folder / "b.parquet", SAMPLES[30:], row_group=100)]
    files = [write_text(folder / "a.tsv", SAMPLES[:30])]
    files.append(write_text(folder / "b.tsv", SAMPLES[30:], last_newline=False))
    if form == "gzip":
        return [pack(file) for file in files]
    if form == "header":
        for file in files:
            file.write_text("\t".join(COLUMNS) + "\n" + file.read_text())
    return files


def pack(file: Path) -> Path:
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    return packed


@pytest.fixture
def samples(tmp_path: Path) -> FileSamples:
    """In row groups of eight, and a file of one."""
    return FileSamples(write(tmp_path, "parquet"), SCHEMA)


def served(batches: FileBatches) -> list[int]:
    return [label for batch in labels(list(batches)) for label in batch]


@pytest.mark.parametrize("form", FORMS)
def test_every_sample_becomes_what_the_definitions_say(tmp_path: Path, form: str) -> None:
    schema = dataclasses.replace(SCHEMA, text_columns=()) if form == "header" else SCHEMA
    samples = FileSamples(write(tmp_path, form), schema)
    assert samples.num_samples == 53
    for window in (3, 100):
        batches = FileBatches(samples, batch_size=4, shuffle=False, drop_last=False, window_batches=window)
        all_batches = list(batches)
        assert [label for batch in labels(all_batches) for label in batch] == list(range(53))
        assert all_batches[0].sparse_features.keys() == ["b", "a", "tags"]
        assert all_batches[0].sparse_features.values().dtype == torch.int64
        found = {label: sample for batch in all_batches for label, sample in contents(batch).items()}
        for number, sample in enumerate(SAMPLES):
            wanted = expected(sample)
            assert found[number].pop("dense") == pytest.approx(wanted.pop("dense"))
            assert found[number] == wanted


def test_files_on_storage_in_folders_and_by_globs_are_read_alike(tmp_path: Path, remote: MemoryFileSystem) -> None:
    files = write(tmp_path, "parquet")
    remote.put([str(file) for file in files], "/bucket/")
    for addresses in (files, [tmp_path], [f"{tmp_path}/*.parquet"], ["memory://bucket"], ["memory://bucket/*.parquet"]):
        batches = FileBatches(FileSamples(addresses, SCHEMA), batch_size=53, shuffle=False)
        assert served(batches) == list(range(53)), addresses


def test_hashes_stay_what_they_are() -> None:
    """Models depend on these values."""
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


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "rank_of", lambda: rank)
        patch.setattr(parquet, "world_size_of", lambda: world_size)
        yield


@pytest.mark.parametrize("world_size", [1, 3])
def test_counting_sees_every_sample_and_is_no_epoch(samples: FileSamples, world_size: int) -> None:
    """An epoch leaves out a tail, the next one another."""
    seen: list[int] = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            batches = FileBatches(samples, batch_size=5)
            next(iter(batches))
            seen += [label for batch in labels(all_samples(batches)) for label in batch]
            assert batches.epoch == 1
            assert len(list(batches)) == len(batches)
    assert sorted(seen) == list(range(53))


@given(st.integers(1, 6), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 3))
def test_ranks_share_the_samples_and_have_the_same_number_of_batches(
    shared: FileSamples, batch_size: int, world_size: int, drop: bool, shuffle: bool, window: int, epoch: int
) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        how = {"window_batches": window, "seed": 1, "shuffle": shuffle, "drop_last": drop}
        with as_rank(rank, world_size):
            batches = FileBatches(shared, batch_size=batch_size, **how)
            batches.epoch = epoch
            own = labels(list(batches))
            assert len(own) == len(batches)
        sizes = [len(batch) for batch in own]
        seen += [label for batch in own for label in batch]
        if drop:
            assert sizes == [batch_size] * (53 // (world_size * batch_size))
        else:
            assert len(sizes) == -(-(53 // world_size) // batch_size)
            assert 1 <= min(sizes) <= max(sizes) <= batch_size + (world_size > 1)
    assert len(set(seen)) == len(seen)
    assert 53 - len(seen) < world_size * batch_size if drop else len(seen) == 53


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> FileSamples:
    return FileSamples(write(tmp_path_factory.mktemp("shared"), "parquet"), SCHEMA)


def test_shuffling_is_a_new_order_each_epoch_and_the_same_each_time(samples: FileSamples) -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        batches = FileBatches(samples, batch_size=5, seed=seed, window_batches=4)
        return [labels(list(batches)) for _ in range(3)]

    first = epochs(seed=0)
    assert first == epochs(seed=0)
    assert first != epochs(seed=1)
    assert len({str(epoch) for epoch in first}) == 3
    # Chunks are mixed too: what is left out as a tail differs.
    assert len({frozenset(range(53)) - {label for batch in epoch for label in batch} for epoch in first}) > 1


def test_a_stream_goes_on_with_any_epoch(samples: FileSamples) -> None:
    whole, resumed = (FileBatches(samples, batch_size=5, window_batches=3) for _ in range(2))
    epochs = [labels(list(whole)) for _ in range(3)]
    resumed.epoch = 1
    assert [labels(list(resumed)) for _ in range(2)] == epochs[1:]


def test_fractions_come_out_as_stated() -> None:
    part = cut((0.1, 0.3), seed=2)[1]
    inside = part.contains(np.arange(10**6, dtype=np.uint64))
    assert abs(inside.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 10**6)
    assert cut((0.7, 0.2, 0.1))[-1].end == 1.0
    assert Part(0.0, 1.0) == WHOLE


def test_the_four_parts_of_a_search(tmp_path: Path) -> None:
    samples = FileSamples([write_text(tmp_path / "all.tsv", draw(400))], SCHEMA)
    splits = split_files(samples, batch_size=4, seed=0)
    seen = {name: set(served(getattr(splits, name))) for name in ("train", "validation", "selection", "test")}
    assert 0.7 * 400 < len(seen["train"]) < 0.9 * 400
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))
    assert 400 - sum(map(len, seen.values())) < 8  # the tails of train and validation
    assert served(splits.test) == served(splits.test)


# Values


TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view())
LISTS = (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
WHITE = " \t\r\n\x0b\x0c"
pieces = st.text(st.sampled_from("ab7. -"), max_size=3)
cells = st.lists(st.none() | st.lists(pieces, min_size=1, max_size=3).map("|".join), min_size=1, max_size=6)


def row_of(value: object) -> int:
    text = str(value).strip(WHITE)
    return 1 + int(hash_values(pa.array([text]))[0]) % (ROWS - 1)


def bags_in(batch: object, feature: str = "f") -> list[list[int]]:
    return [part.tolist() for part in batch.sparse_features[feature].to_dense()]


def read(file: Path, **schema: object) -> list[list[int]]:
    samples = FileSamples([file], FileSchema(label="y", separator=",", **schema))
    batches = FileBatches(samples, batch_size=samples.num_samples, shuffle=False)
    return bags_in(next(iter(batches)))


def from_parquet(folder: Path, column: pa.Array, kind: str = "multi_hot") -> list[list[int]]:
    pq.write_table(pa.table({"y": [1.0] * len(column), "f": column}), folder / "f.parquet")
    return read(folder / "f.parquet", **{kind: {"f": ROWS}})


def from_text(folder: Path, fields: Sequence[str | None], kind: str = "multi_hot") -> list:
    (folder / "f.csv").write_text("".join(f"1,{field or ''},\n" for field in fields))
    return read(folder / "f.csv", **{kind: {"f": ROWS}}, text_columns=("y", "f", "end"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For hypothesis, which wants no folder of its own per example."""
    return tmp_path_factory.mktemp("values")


@given(cells, st.sampled_from(TEXTS), st.sampled_from(LISTS))
def test_text_lists_are_the_same_bags_in_every_format(folder: Path, fields: list, text: pa.DataType, lists) -> None:
    split = [None if field is None else field.split("|") for field in fields]
    wanted = [[row_of(piece) for piece in row or [] if piece.strip(WHITE)] for row in split]
    assert from_text(folder, fields) == wanted
    assert from_parquet(folder, pa.array(fields, pa.string()).cast(text)) == wanted
    assert from_parquet(folder, pa.array(split, lists(pa.string()))) == wanted


@given(st.lists(st.none() | pieces, min_size=1, max_size=6), st.sampled_from(TEXTS))
def test_single_ids_are_the_same_rows_in_every_format(folder: Path, fields: list, text: pa.DataType) -> None:
    wanted = [[row_of(field) if (field or "").strip(WHITE) else 0] for field in fields]
    assert from_text(folder, fields, "single_id") == wanted
    assert from_parquet(folder, pa.array(fields, pa.string()).cast(text), "single_id") == wanted


INTEGERS = [pa.int8(), pa.uint8(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
ENCODED = [
    *(pa.array([7, None, 12], kind) for kind in (*INTEGERS, pa.float32(), pa.float64())),
    pa.array(np.array([7, math.nan, 12], np.float16)),
    pa.array([7, None, 12], pa.int32()).dictionary_encode(),
    *(pa.array(["7", "", " 12"], pa.string()).cast(kind) for kind in TEXTS),
]


@pytest.mark.parametrize("column", ENCODED, ids=lambda column: str(column.type))
def test_one_id_is_one_row_whatever_its_type(tmp_path: Path, column: pa.Array) -> None:
    assert from_parquet(tmp_path, column, "single_id") == [[row_of(7)], [0], [row_of(12)]]
    assert from_parquet(tmp_path, column) == [[row_of(7)], [], [row_of(12)]]


def test_one_id_is_one_row_in_part_files_of_other_types_and_formats(tmp_path: Path) -> None:
    """As an export writes them that guesses types file by file."""
    users = {"p0": pa.array([7, 8]), "p1": pa.array(["7", "x"]), "p2": pa.array([7.0, None])}
    tags = {"p0": pa.array([5, 5]), "p1": pa.array(["5|x", ""]), "p2": pa.nulls(2)}
    for name in users:
        table = pa.table({"y": [1.0, 0.0], "u": users[name], "tags": tags[name]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "p3.csv").write_text("1,7,5|\n0,7.0,|5\n")
    columns = {"single_id": {"u": ROWS}, "multi_hot": {"tags": ROWS}, "text_columns": ("y", "u", "tags")}
    samples = FileSamples([tmp_path], FileSchema(label="y", separator=",", **columns))
    batch = next(iter(FileBatches(samples, batch_size=8, shuffle=False)))
    seven, eight, five, x = (row_of(value) for value in (7, 8, 5, "x"))
    wanted = [[seven], [eight], [seven], [x], [seven], [0], [seven], [seven]]
    assert bags_in(batch, "u") == wanted
    assert bags_in(batch, "tags") == [[five], [five], [five, x], [], [], [], [five], [five]]


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(3),
        *(pa.array([[], None, []], make(pa.null())) for make in LISTS),
        pa.array([None, None, None], pa.list_(pa.int64(), 2)),
        pa.array([None, "", "| |"], pa.string()),
        pa.array([None] * 3, pa.float64()),
        pa.nulls(3, pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_that_is_empty_throughout_is_one_of_empty_bags(tmp_path: Path, column: pa.Array) -> None:
    assert from_parquet(tmp_path, column) == [[], [], []]


def test_lists_of_every_kind_are_read(tmp_path: Path) -> None:
    ids = [[7, 12], None, [12, 12]]
    wanted = [[row_of(value) for value in row or []] for row in ids]
    texts = [row and [str(value) for value in row] for row in ids]
    for make in (*LISTS, lambda kind: pa.list_(kind, 2)):
        for kind in (*INTEGERS, pa.float64()):
            assert from_parquet(tmp_path, pa.array(ids, make(kind))) == wanted
        assert from_parquet(tmp_path, pa.array(texts, make(pa.string_view()))) == wanted
    encoded = pa.array(texts, pa.list_(pa.dictionary(pa.int32(), pa.string())))
    assert from_parquet(tmp_path, encoded) == wanted


def test_bytes_that_are_no_text_are_values_as_others_are(tmp_path: Path) -> None:
    rows = from_parquet(tmp_path, pa.array([b"\xff\xfe", b"\xff ", b"\xff", b"7"], pa.binary()), "single_id")
    assert rows[1:] == [rows[2], rows[2], [row_of(7)]]
    assert rows[0] not in rows[1:]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        *(
            (pa.array([value]), kind)
            for value in (True, datetime.date(2024, 1, 2), {"a": 1})
            for kind in ("single_id", "multi_hot")
        ),
        (pa.array([1, 7.5]), "single_id"),
        (pa.array([-math.inf]), "multi_hot"),
        (pa.array([[7], [8]]), "single_id"),
        (pa.array([[[7]], [[8]]]), "multi_hot"),
    ],
)
def test_what_is_no_id_is_refused_by_file_and_column(tmp_path: Path, column: pa.Array, kind: str) -> None:
    with pytest.raises(ValueError, match=r"^file .*f\.parquet, row 0 and on, column 'f': expected "):
        from_parquet(tmp_path, column, kind)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("1,7,\n1,7\n", "Row #2"),
        ("1,7,\nx,7,\n", "Row #2"),
        ("1,7,\nnan,8,\n", "line 2, column 'y'"),
        ("1,7,\ninf,8,\n", "line 2, column 'y'"),
        ("", "Empty CSV"),
    ],
)
def test_what_is_wrong_with_a_text_is_refused_by_file_and_line(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "f.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"^file .*f\.csv.*{place}"):
        read(tmp_path / "f.csv", single_id={"f": ROWS}, text_columns=("y", "f", "end"))


def test_numbers_that_are_not_finite_and_missing_labels_are_refused_by_row(tmp_path: Path) -> None:
    for y, x, place in (([1.0, None], [0.0, 0.0], "'y'"), ([1.0, 0.0], [0.0, math.inf], "'x'")):
        pq.write_table(pa.table({"y": y, "x": x, "f": [1, 2]}), tmp_path / "f.parquet")
        with pytest.raises(ValueError, match=rf"f\.parquet, row 1, column {place}: expected a finite number"):
            read(tmp_path / "f.parquet", dense=("x",), single_id={"f": 9})


@pytest.mark.parametrize(
    "settings",
    [{}, {"single_id": {"f": 1}}, {"single_id": {"f": 2**31}}, {"single_id": {"f": 9}, "multi_hot": {"f": 9}}],
)
def test_a_schema_that_fits_nothing_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^FileSchema|^feature 'f'"):
        FileSchema(label="y", **settings)


def test_files_that_are_no_data_are_refused(tmp_path: Path) -> None:
    schema = FileSchema(label="y", single_id={"f": 9})
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet")
    pq.write_table(pa.table({"y": [1.0], "g": [1]}), tmp_path / "b.parquet")
    for name, what in (("a", "file .*a.parquet"), ("b", "file .*b.parquet: column"), ("c", "address .*at least one")):
        with pytest.raises(ValueError, match=what):
            FileSamples([tmp_path / f"{name}.parquet"], schema)
    with pytest.raises(ValueError, match="stream: expected at least 2 samples for 2 ranks, got 1"):
        pq.write_table(pa.table({"y": [1.0], "f": [1]}), tmp_path / "d.parquet")
        with as_rank(0, 2):
            FileBatches(FileSamples([tmp_path / "d.parquet"], schema), batch_size=1)


KIND = files.FolderKind("box", "box.json", "test-box")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, text: str) -> None:
    files.write_json(folder / "box.json", {"format": "test-box"})
    (folder / "content").write_text(text)


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_a_file_that_breaks_off_stays_what_it_was(tmp_path: Path, error: BaseException) -> None:
    files.write_text(tmp_path / "a", "old")
    with pytest.raises(type(error)), files.write_whole(tmp_path / "a") as unfinished:
        unfinished.write_text("new, and half")
        raise error
    assert names_in(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_file_has_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    files.write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_names_the_file_itself(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        files.write_text(tmp_path / "none" / "a", "x")
    assert raised.value.filename == str(tmp_path / "none" / "a")


def test_a_folder_is_put_back_where_the_new_one_cannot_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with files.new_folder(tmp_path / "box", kind=KIND) as folder:
        fill(folder, "old")
    rename, calls = os.rename, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(files.os, "rename", second_fails)
    with pytest.raises(OSError, match="no"), files.new_folder(tmp_path / "box", overwrite=True, kind=KIND) as folder:
        fill(folder, "new")
    assert (tmp_path / "box" / "content").read_text() == "old"
    assert names_in(tmp_path) == ["box"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_reader_always_finds_a_folder_where_the_system_exchanges_two(tmp_path, monkeypatch, exchanges: bool) -> None:
    with files.new_folder(tmp_path / "box", kind=KIND) as folder:
        fill(folder, "old")
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    rename, gone = os.rename, []

    def watched(source: Path, target: Path) -> None:
        rename(source, target)
        gone.append(not (tmp_path / "box").exists())

    monkeypatch.setattr(files.os, "rename", watched)
    with files.new_folder(tmp_path / "box", overwrite=True, kind=KIND) as folder:
        fill(folder, "new")
    assert (tmp_path / "box" / "content").read_text() == "new"
    assert names_in(tmp_path) == ["box"]
    assert gone == ([] if exchanges else [True, False])


def of_another_format(path: Path) -> None:
    path.mkdir()
    files.write_json(path / "box.json", {"format": "other"})


def link(path: Path) -> None:
    with files.new_folder(path.with_name("real"), kind=KIND) as folder:
        fill(folder, "old")
    path.symlink_to(path.with_name("real"))


@pytest.mark.parametrize("make", [Path.mkdir, of_another_format, link, Path.touch])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_folder_of_its_kind_is_not_replaced(
    tmp_path: Path, make: Callable[[Path], object], overwrite: bool
) -> None:
    make(tmp_path / "box")
    before = names_in(tmp_path)
    with pytest.raises(ValueError, match="^box "), files.new_folder(tmp_path / "box", overwrite=overwrite, kind=KIND):
        pass
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("make", [lambda p: p.symlink_to("/etc"), lambda p: p.symlink_to("/etc/passwd"), os.mkfifo])
def test_links_and_special_files_of_others_are_refused_at_any_depth(tmp_path: Path, make: Callable) -> None:
    files.check_plain(tmp_path / "none", "folder")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "file").touch()
    files.check_plain(tmp_path, "folder")
    make(tmp_path / "deep" / "er" / "x")
    with pytest.raises(ValueError, match="^folder: .*'deep/er/x'"):
        files.check_plain(tmp_path, "folder")


def test_a_lock_writes_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    os.link(tmp_path / "mine", tmp_path / "second")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with files.file_lock(tmp_path / "second"):
        pass
    with pytest.raises(OSError), files.file_lock(tmp_path / "link"):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


class Head(TypedDict):
    rows: files.NotNegative
    name: NotRequired[str]


@dataclass
class Settings:
    seed: int
    rate: float = 0.1


GOOD: list[tuple[Any, Any]] = [
    ({"rows": 3, "more": [1]}, Head),
    ({"rows": 0, "name": "a"}, Head),
    ({"seed": 1}, Settings),
    ({"seed": 1, "rate": 2}, Settings),
    ([1, "a"], tuple[int, str]),
    ([], list[int]),
    ({"a": [None, 1]}, dict[str, list[int | None]]),
    (True, bool),
    (1, float),
    ({"a": {"b": [1.5]}}, Any),
]
BAD: list[tuple[Any, Any, str]] = [
    ({}, Head, "box"),
    ({"rows": -1}, Head, "box, field rows"),
    ({"rows": True}, Head, "box, field rows"),
    ({"rows": 1.0}, Head, "box, field rows"),
    ({"rows": 2**63}, Head, "box, field rows"),
    ({"rows": 1, "name": None}, Head, "box, field name"),
    ([], Head, "box"),
    ({"seed": 1, "sead": 2}, Settings, "box"),
    ({"rate": 0.5}, Settings, "box"),
    ({"seed": 1, "rate": float("inf")}, Settings, "box, field rate"),
    ([1], tuple[int, str], "box"),
    ([1, 2], tuple[int, str], "box, field [1]"),
    ({"a": [None, "1"]}, dict[str, list[int | None]], "box, field a[1]"),
    ("x", int | None, "box"),
    (1, bool, "box"),
    (10**400, float, "box"),
    ({"a": [{"rows": "x"}]}, dict[str, list[Head]], "box, field a[0].rows"),
]


@pytest.mark.parametrize(("value", "kind"), GOOD)
def test_what_conforms_is_let_through(value: Any, kind: Any) -> None:
    files.conform(value, kind, "box")


@pytest.mark.parametrize(("value", "kind", "place"), BAD)
def test_what_does_not_conform_is_named_by_its_field(value: Any, kind: Any, place: str) -> None:
    with pytest.raises(ValueError) as raised:
        files.conform(value, kind, "box", remedy="mend it")
    assert str(raised.value).startswith(f"{place}: expected ")
    assert str(raised.value).endswith("; mend it")
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"NaN", b"[Infinity]", b"1e999", b'{"a": 1, "a": 2}', b"[" * 10**5, b"1" * 5000, b"{} {}"],
)
def test_what_is_no_json_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^box: expected "):
        files.parse_json(content, Any, "box")


# Storage


def test_a_local_path_is_fetched_as_it_is(tmp_path: Path) -> None:
    assert urls.fetch(tmp_path) == urls.fetch(f"file://{tmp_path}") == tmp_path
    assert urls.address_of(tmp_path) == str(tmp_path)
    assert urls.url_of(tmp_path) is None


def test_what_is_fetched_is_fetched_once_and_anew_when_it_has_changed(remote, monkeypatch) -> None:
    remote.pipe({"/bucket/box/a": b"1", "/bucket/box/deep/b": b"2"})
    first = urls.fetch("memory://bucket/box/")
    assert (first.name, (first / "a").read_bytes(), (first / "deep" / "b").read_bytes()) == ("box", b"1", b"2")
    assert urls.address_of(first) == "memory://bucket/box"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", None)
        assert urls.fetch("memory://bucket/box") == first
    remote.pipe("/bucket/box/a", b"3")
    assert (urls.fetch("memory://bucket/box") / "a").read_bytes() == b"3"
    assert (first / "a").read_bytes() == b"1"  # who reads it goes on reading it
    assert urls.fetch("memory://bucket/box/a").read_bytes() == b"3"
    with pytest.raises(ValueError, match="^address memory://bucket/none: expected "):
        urls.fetch("memory://bucket/none")


def test_an_output_is_what_was_there_and_is_published_however_it_ends(remote: MemoryFileSystem) -> None:
    remote.pipe({"/bucket/run/run.json": b"1", "/bucket/run/old": b"2", "/bucket/run/checkpoints/x": b"3"})
    with pytest.raises(KeyboardInterrupt), urls.output("memory://bucket/run", "1", skip=["checkpoints/*"]) as folder:
        assert names_in(folder) == ["old", "run.json"]
        assert folder == urls.output_folder("memory://bucket/run", "1")
        (folder / "old").unlink()
        (folder / "run.json").write_bytes(b"4")
        (folder / "deep").mkdir()
        (folder / "deep" / "new").write_bytes(b"5")
        (folder / "link").symlink_to("/etc/passwd")
        (folder / ".x.partial").touch()
        raise KeyboardInterrupt
    stored = {name.removeprefix("/bucket/run/"): remote.cat_file(name) for name in remote.find("/bucket/run")}
    assert stored == {"run.json": b"4", "deep/new": b"5", "checkpoints/x": b"3"}
    assert not folder.exists()


def test_an_output_that_cannot_be_published_is_left_here(remote, monkeypatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionResetError("no route")

    monkeypatch.setattr(MemoryFileSystem, "put_file", away)
    with pytest.raises(OSError, match="no route") as raised, urls.output("memory://bucket/run", "1") as folder:
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_bytes(b"1")
    assert (folder / "run.json").read_bytes() == b"1"
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("folder", ["memory://bucket/x", "."])
def test_single_files_are_put_read_listed_and_removed(remote, tmp_path, monkeypatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    address = urls.path_in(folder, "a")
    assert urls.file_size(address) is None
    assert urls.put_file(address, lambda path: path.write_bytes(b"123")) == 3
    assert (urls.file_size(address), urls.read_bytes(address)) == (3, b"123")
    assert "a" in urls.file_names(folder)
    local = urls.fetch(address)
    assert local.read_bytes() == b"123"
    for _ in range(2):
        urls.remove_file(address)
    assert urls.file_size(address) is None
    assert not [name for name in urls.file_names(folder) if not name.startswith("cache")]


def test_a_protocol_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="^address nosuch://x: expected a protocol that fsspec knows"):
        urls.fetch("nosuch://x")
