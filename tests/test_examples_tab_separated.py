"""The loader of tab-separated files: distinct values become rows, what is missing or no number is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.datasets.in_memory import Samples
from examples.datasets.tab_separated import load_tab_separated
from tests.tab_separated_files import write_tab_separated
from tests.test_examples_datasets import write


class TestTabSeparated:
    def load(self, folder: Path, **changes: object) -> Samples:
        given = {
            "label": "rating",
            "fields": {"user": "user", "genres": "genre_set"},
            "publisher": "them",
            "seed": 0,
        } | changes
        return load_tab_separated(folder, "anime.tsv", **given)

    def test_distinct_values_become_rows_whatever_they_are(self, tmp_path: Path):
        write_tab_separated(tmp_path)
        samples = self.load(tmp_path)
        assert dict(samples.num_embeddings) == {"user": 20, "genres": 3}
        assert samples.labels[:3].tolist() == [1, 2, 3]
        assert [samples.ids[:, column].unique().numel() for column in range(2)] == [20, 3]

    @pytest.mark.parametrize("changes", [{"label": "stars"}, {"fields": {"user": "colour"}}])
    def test_a_missing_column_is_named(self, tmp_path: Path, changes: dict[str, object]):
        write_tab_separated(tmp_path)
        with pytest.raises(ValueError, match=r"anime.tsv.gz: expected columns.*'(stars|colour)'"):
            self.load(tmp_path, **changes)

    def test_other_text_is_refused(self, tmp_path: Path):
        write(tmp_path / "anime.tsv", ["rating\tuser\tgenre_set", "5\tx\t1"])
        with pytest.raises(ValueError, match=r"anime.tsv: expected numbers"):
            self.load(tmp_path)
