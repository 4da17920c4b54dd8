"""The recipe on streamed Criteo data, and the benchmark that reads the same."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from benchmarks import data_loading
from dnis_torchrec.data.parquet import FileBatches
from examples import criteo_stream

ROWS = 600


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a generated train.txt, small tables, small batches and a cache of its own."""
    monkeypatch.setenv("DNIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(criteo_stream.HASH_ROWS_VARIABLE, "50")
    monkeypatch.setattr(criteo_stream, "BATCH_SIZE", 16)
    monkeypatch.setattr(data_loading, "MAX_VOCABULARY", 1000)
    folder = tmp_path / "data"
    folder.mkdir()
    data_loading.write_criteo_like(folder / "train.txt", ROWS)
    return folder


def test_generated_text_is_in_criteos_format(data: Path) -> None:
    lines = (data / "train.txt").read_text().splitlines()
    assert len(lines) == ROWS
    fields = [line.split("\t") for line in lines]
    assert {len(line) for line in fields} == {40}
    assert {line[0] for line in fields} == {"0", "1"}
    assert any(line[1] == "" for line in fields)
    assert all(len(category) in (0, 8) and set(category) <= set("0123456789abcdef") for category in fields[0][14:])


def test_the_recipe_trains_on_all_of_the_stream(data: Path) -> None:
    recipe = criteo_stream.dlrm(data, seed=0, embedding_dim=4)
    splits = [recipe.data.train, recipe.data.validation, recipe.data.selection, recipe.data.test]
    assert sum(split.num_samples for split in splits) == ROWS
    batch = next(iter(recipe.data.train))
    assert batch.dense_features.shape == (16, 13)
    assert len(batch.sparse_features.keys()) == 26
    logits = recipe.model(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
    assert recipe.loss(logits.squeeze(-1), batch.labels).isfinite()
    tables = recipe.model.sparse_arch.embedding_bag_collection.embedding_bag_configs()
    rows = {table.feature_names[0]: table.num_embeddings for table in tables}
    assert max(rows.values()) == 50
    assert rows["cat_8"] == 48


def test_files_are_found_packed_by_day_and_by_address(data: Path) -> None:
    text = (data / "train.txt").read_bytes()
    lines = text.splitlines(keepends=True)
    whole = data.parent / "whole"
    whole.mkdir()
    (whole / "day_7").write_bytes(text)
    days = data.parent / "days"
    days.mkdir()
    for day, part in (("day_0", lines[:100]), ("day_10", lines[300:]), ("day_2", lines[100:300])):
        (days / f"{day}.gz").write_bytes(gzip.compress(b"".join(part)))
    (data / "listed").mkdir()
    (data / "listed" / "urls.txt").write_text(f"file://{data}/train.txt\n\n")
    for folder, same in ((days, whole), (data / "listed", data)):
        wanted = criteo_stream.open_stream(same)
        found = criteo_stream.open_stream(folder)
        rows = [
            torch.cat([batch.sparse_features.values() for batch in FileBatches(samples, batch_size=600)])
            for samples in (found, wanted)
        ]
        assert torch.equal(*(part.sort().values for part in rows))
    with pytest.raises(ValueError, match=r"expected urls.txt, \*.parquet, train.txt"):
        criteo_stream.open_stream(data.parent)
    with pytest.raises(ValueError, match="nowhere: expected a folder, got none; get it from"):
        criteo_stream.open_stream(data / "nowhere")


def test_tables_are_as_large_as_the_fields_of_the_log_that_is_read(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kaggle's first field has 1,460 categories, that of the 1 TB logs 45.8 million."""
    monkeypatch.setenv(criteo_stream.HASH_ROWS_VARIABLE, "1000000")
    (data / "days").mkdir()
    (data / "days" / "day_0").write_bytes((data / "train.txt").read_bytes())
    (data / "days" / "day_1.gz").write_bytes(gzip.compress((data / "train.txt").read_bytes()))
    (data / "mixed").mkdir()
    (data / "mixed" / "urls.txt").write_text(f"{data}/train.txt\n{data}/days/day_0\n")
    rows = [criteo_stream.open_stream(folder).schema.num_embeddings for folder in (data, data / "days", data / "mixed")]
    assert [own["cat_0"] for own in rows] == [16 * 1460, 1_000_000, 1_000_000]
    assert [own["cat_12"] for own in rows] == [16 * 3194, 16 * 10, 16 * 3194]
    assert [own["cat_19"] for own in rows] == [16 * 4, 1_000_000, 1_000_000]
    assert [own["cat_2"] for own in rows] == [1_000_000, 16 * 17245, 1_000_000]


def test_a_file_both_plain_and_packed_is_read_once_and_others_not_at_all(tmp_path: Path) -> None:
    for name in ("day_10.gz", "day_2", "day_2.gz", "day_1.gz", "day_2.md5", "day_2_labels.npy", "day_1.gz.part"):
        (tmp_path / name).touch()
    assert [Path(file).name for file in criteo_stream.find_files(tmp_path)] == ["day_1.gz", "day_2", "day_10.gz"]


def test_a_list_of_no_addresses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("\n  \n")
    with pytest.raises(ValueError, match=r"urls\.txt: expected at least one address, got none; write one per line"):
        criteo_stream.find_files(tmp_path)


def test_a_wrong_number_of_rows_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(criteo_stream.HASH_ROWS_VARIABLE, "many")
    with pytest.raises(ValueError, match="DNIS_HASH_ROWS: expected an integer >= 2, got 'many'"):
        criteo_stream.dlrm(data)


def test_the_benchmark_writes_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data_loading, "MAX_VOCABULARY", 1000)
    path = tmp_path / "loading.json"
    data_loading.main(["--rows", "200", "--batch-size", "8,32", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["format"], row["batch_size"], row["shuffle"], row["part"]) for row in rows] == [
        (kind, size, shuffle, part)
        for kind in ("txt", "parquet")
        for size in (8, 32)
        for shuffle, part in ((True, "whole"), (True, "train"), (False, "whole"))
    ]
    assert all(row["samples_per_second"] > 0 for row in rows)
    assert capsys.readouterr().out.count("times what is wanted") == 12
    with pytest.raises(SystemExit):
        data_loading.parse(["--rows", "10"])
