"""Counting row ids against collections.Counter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies

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
    assert all(counts.dtype == torch.int32 for counts in got.counts.values())
    assert got.max_bag_lengths == expected.max_bag_lengths
    assert got.num_samples == expected.num_samples


@given(batches, st.permutations(FEATURES), st.sampled_from([torch.int32, torch.int64]))
def test_counts_of_batches(data: list[list[Sample]], order: list[str], dtype: torch.dtype) -> None:
    got = count_frequencies((kjt(batch, order, dtype) for batch in data), TABLES)
    assert_same(got, expected_counts([sample for batch in data for sample in batch]))
    for name, counts in got.counts.items():
        assert got.never_seen(name).tolist() == [count == 0 for count in counts.tolist()]


def test_save_and_load(tmp_path: Path) -> None:
    counts = count_frequencies([kjt([{"u": [4, 4], "seen": [], "shown": [0]}])], TABLES)
    counts.save(tmp_path / "counts.safetensors")
    assert_same(FrequencyCounts.load(tmp_path / "counts.safetensors"), counts)
    assert [path.name for path in tmp_path.iterdir()] == ["counts.safetensors"]


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


@pytest.mark.parametrize(
    "batches", [[], [kjt([{"u": [99], "seen": [], "shown": []}])], [kjt([{"u": [-1], "seen": [], "shown": []}])]]
)
def test_no_sample_and_ids_outside_their_table_are_refused(batches: list[KeyedJaggedTensor]) -> None:
    with pytest.raises(ValueError):
        count_frequencies(batches, TABLES)
