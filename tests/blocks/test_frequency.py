"""Counting row ids against collections.Counter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies, count_frequencies_in_frame, merge_counts
from dnis_torchrec.blocks.sketch import BoundedCounter, EstimatedCounts

READS = {"user": ["u"], "movie": ["seen", "shown"], "other": ["shown"]}
FEATURES = ("u", "seen", "shown")
TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=READS[name])
    for name, rows in (("user", 5), ("movie", 7), ("other", 9))
]
Sample = dict[str, list[int]]

samples = st.fixed_dictionaries({feature: st.lists(st.integers(0, 4), max_size=3) for feature in FEATURES})
batches = st.lists(st.lists(samples, min_size=1, max_size=4), min_size=1, max_size=4)


def kjt(batch: list[Sample], order=FEATURES, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """One batch as TorchRec takes it, with one more key that no table reads."""
    bags = {feature: [sample[feature] for sample in batch] for feature in order} | {"unread": [[99] for _ in batch]}
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([row for of_key in bags.values() for bag in of_key for row in bag], dtype=dtype),
        lengths=torch.tensor([len(bag) for of_key in bags.values() for bag in of_key]),
    )


def expected_counts(data: list[Sample]) -> FrequencyCounts:
    counts = {}
    for table in TABLES:
        occurrences = Counter(row for sample in data for f in table.feature_names for row in sample[f])
        counts[table.name] = torch.tensor([occurrences[row] for row in range(table.num_embeddings)])
    longest = {feature: max((len(sample[feature]) for sample in data), default=0) for feature in FEATURES}
    return FrequencyCounts(counts, longest, len(data))


def assert_same(got: FrequencyCounts, expected: FrequencyCounts) -> None:
    assert {name: counts.tolist() for name, counts in got.counts.items()} == {
        name: counts.tolist() for name, counts in expected.counts.items()
    }
    assert all(counts.dtype == torch.int64 for counts in got.counts.values())
    assert got.max_bag_lengths == expected.max_bag_lengths
    assert got.num_samples == expected.num_samples


@given(batches, st.permutations(FEATURES), st.sampled_from([torch.int32, torch.int64]))
def test_counts_of_batches(data: list[list[Sample]], order: list[str], dtype: torch.dtype) -> None:
    got = count_frequencies((kjt(batch, order, dtype) for batch in data), TABLES)
    assert_same(got, expected_counts([sample for batch in data for sample in batch]))
    for name, counts in got.counts.items():
        assert got.never_seen(name).tolist() == [count == 0 for count in counts.tolist()]


@given(batches)
def test_counts_of_parts_add_up(data: list[list[Sample]]) -> None:
    parts = [count_frequencies([kjt(batch)], TABLES) for batch in data]
    assert_same(merge_counts(parts), expected_counts([sample for batch in data for sample in batch]))


@given(st.lists(samples, min_size=1, max_size=6))
def test_counts_of_a_frame_of_lists(data: list[Sample]) -> None:
    assert_same(count_frequencies_in_frame(pd.DataFrame(data), TABLES), expected_counts(data))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.sampled_from(["int64", "int32", "uint8", "Int64"]))
def test_counts_of_a_frame_of_single_ids(ids: list[int], dtype: str) -> None:
    index = range(7, 7 + len(ids))  # as after a filter
    frame = pd.DataFrame({feature: pd.Series(ids, index, dtype=dtype) for feature in FEATURES})
    expected = expected_counts([{feature: [row] for feature in FEATURES} for row in ids])
    assert_same(count_frequencies_in_frame(frame, TABLES), expected)


@pytest.mark.parametrize(
    "kind",
    [
        *(make(pa.int32()) for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)),
        pa.list_(pa.uint64(), 2),
        object,
    ],
    ids=str,
)
def test_missing_lists_of_a_frame_are_empty_whatever_holds_them(kind: pa.DataType | type) -> None:
    """Parquet brings them, and pandas with Arrow types keeps them as they are."""
    bags = [[4, 0], None, [0, 0], None]
    dtype = kind if kind is object else pd.ArrowDtype(kind)
    frame = pd.DataFrame({feature: pd.Series(bags, dtype=dtype) for feature in FEATURES})
    expected = expected_counts([{feature: bag or [] for feature in FEATURES} for bag in bags])
    assert_same(count_frequencies_in_frame(frame, TABLES), expected)


def test_a_column_of_empty_lists_counts_nothing() -> None:
    kinds = [pd.ArrowDtype(pa.list_(kind)) for kind in (pa.null(), pa.int64(), pa.float64())]
    for column in (pd.Series([[], []]), *(pd.Series([[], None], dtype=kind) for kind in kinds)):
        frame = pd.DataFrame(dict.fromkeys(FEATURES, column))
        assert_same(count_frequencies_in_frame(frame, TABLES), expected_counts([{key: [] for key in FEATURES}] * 2))


def test_save_and_load(tmp_path: Path) -> None:
    counts = count_frequencies([kjt([{"u": [4, 4], "seen": [], "shown": [0]}])], TABLES)
    counts.save(tmp_path / "counts.safetensors")
    assert_same(FrequencyCounts.load(tmp_path / "counts.safetensors"), counts)
    assert [path.name for path in tmp_path.iterdir()] == ["counts.safetensors"]


@pytest.mark.parametrize("exact_ids", [2, 100])
def test_estimated_counts_are_saved_as_small_as_they_are(tmp_path: Path, exact_ids: int) -> None:
    counter = BoundedCounter(exact_ids=exact_ids, epsilon=0.1, delta=0.05)
    counter.add(np.array([7, 7, 7, 10**9, 5, 3]))
    estimated = EstimatedCounts(counter, 10**10)
    counts = FrequencyCounts({"large": estimated, "small": torch.tensor([1, 0])}, {"f": 2}, 6)
    counts.save(tmp_path / "counts.safetensors")
    assert (tmp_path / "counts.safetensors").stat().st_size < 4000
    again = FrequencyCounts.load(tmp_path / "counts.safetensors")
    assert list(again.counts) == ["large", "small"]
    assert again.counts["large"].numel() == 10**10
    for rows in (slice(0, 12), slice(10**9 - 1, 10**9 + 1)):
        assert again.counts["large"][rows].equal(estimated[rows])
    assert again.error_bounds() == counts.error_bounds() == {"large": estimated.error_bound, "small": 0.0}
    assert again.notes() == counts.notes()


def test_what_is_estimated_is_said() -> None:
    counter = BoundedCounter(exact_ids=2, epsilon=0.5, delta=0.05)
    counts = FrequencyCounts({"t": EstimatedCounts(counter, 9)}, {"f": 1}, 6)
    assert counts.notes() == []
    counter.add(np.array([1, 1, 2, 3, 4]))
    assert counts.error_bounds() == {"t": 1.5}
    (note,) = counts.notes()
    assert note.startswith(
        "Table 't': frequencies are estimates in bounded memory, none too low, 95% of them at most 1.5 "
    )
    with pytest.raises(NotImplementedError, match="table 't': supported are counts of every row, got estimated ones"):
        merge_counts([counts, counts])


def test_a_save_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "counts.safetensors"
    counts = expected_counts([{"u": [4], "seen": [], "shown": [0]}])
    counts.save(path)

    def break_off(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("dnis_torchrec.data.files.save_file", break_off)
    with pytest.raises(OSError, match="disk full"):
        expected_counts([]).save(path)
    assert_same(FrequencyCounts.load(path), counts)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"other\.safetensors: expected a file of frequency counts, got another file"):
        FrequencyCounts.load(path)
    path.write_bytes(b"\x00" * 3)
    with pytest.raises(ValueError, match=r"other\.safetensors: expected a whole safetensors file"):
        FrequencyCounts.load(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        FrequencyCounts.load(tmp_path / "absent.safetensors")


def test_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"table 'moive': expected a known table.*did you mean 'movie'"):
        expected_counts([]).never_seen("moive")


@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    good = {"u": [4], "seen": [0], "shown": [0]}
    message = rf"table 'user', feature 'u', batch 1: expected ids in 0\.\.4, got {bad}; hash the ids"
    with pytest.raises(ValueError, match=message):
        count_frequencies([kjt([good]), kjt([good, good | {"u": [2, bad]}])], TABLES)
    with pytest.raises(ValueError, match=rf"table 'user', feature 'u', frame: expected ids in 0\.\.4, got {bad}"):
        count_frequencies_in_frame(pd.DataFrame([good, good | {"u": [bad]}]), TABLES)


def test_missing_features_are_refused() -> None:
    batch = KeyedJaggedTensor(keys=["u", "sene"], values=torch.tensor([1, 1]), lengths=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"feature of table 'movie' in batch 0 'seen'.*did you mean 'sene'"):
        count_frequencies([batch], TABLES)
    with pytest.raises(ValueError, match=r"column for feature of table 'movie' 'seen'.*known names: 'u'"):
        count_frequencies_in_frame(pd.DataFrame({"u": [1]}), TABLES)


def test_empty_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training stream: expected at least one sample, got none; check the data"):
        count_frequencies([], TABLES)
    with pytest.raises(ValueError, match=r"training frame: expected at least one row, got 0"):
        count_frequencies_in_frame(pd.DataFrame({"u": []}), TABLES)


@pytest.mark.parametrize(
    "column",
    [
        [0.5],
        [1.0],
        ["1"],
        [None],
        [[1.9, 2.2], [0.5]],
        [[1], [np.nan]],
        [[1], ["1"]],
        [[1, None]],
        [[True]],
        [np.array([1.5]), np.array([], dtype=np.int64)],
        [[[1, 2]]],
        [[1], 1],
        [[1], "1"],
        pd.array([1, None], "Int64"),
        pd.array([1, None], "int64[pyarrow]"),
        *(pd.Series([[1]], dtype=pd.ArrowDtype(pa.list_(kind))) for kind in (pa.float64(), pa.bool_())),
        pd.Series([["1"]], dtype=pd.ArrowDtype(pa.list_(pa.string()))),
        pd.Series([[1, None]], dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
        pd.Series([[None]], dtype=pd.ArrowDtype(pa.list_(pa.null()))),
        pd.Series([[[1]]], dtype=pd.ArrowDtype(pa.list_(pa.list_(pa.int64())))),
        pd.Series([{"a": 1}], dtype=pd.ArrowDtype(pa.struct({"a": pa.int64()}))),
    ],
    ids=str,
)
def test_columns_that_hold_no_ids_are_refused(column: list) -> None:
    with pytest.raises(ValueError, match=r"^column 'u': expected integer ids or lists of them"):
        count_frequencies_in_frame(pd.DataFrame({"u": column}), TABLES[:1])


def test_parts_that_do_not_fit_are_refused() -> None:
    one = expected_counts([])
    with pytest.raises(ValueError, match="merge_counts: expected at least one part, got 0"):
        merge_counts([])
    fewer = FrequencyCounts({"user": one.counts["user"]}, {"u": 1}, 1)
    shorter = FrequencyCounts(one.counts | {"user": torch.zeros(2, dtype=torch.int64)}, one.max_bag_lengths, 1)
    renamed = FrequencyCounts(one.counts, {"u": 1, "seen": 1, "shwon": 1}, 1)
    for part in (fewer, shorter, renamed):
        with pytest.raises(ValueError, match="merge_counts: expected the same tables and features in every part"):
            merge_counts([one, part])
