"""The loader of reviews as clicks: negatives are new to their user, carry their item's fields, and stay with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dnis_torchrec.data.batches import split_rows
from examples import amazon_sports
from examples.datasets.amazon_sports import ATTRIBUTES, OF_ITEM, load_amazon_sports, read_reviews
from examples.datasets.in_memory import Samples
from tests.tab_separated_files import REVIEWED, REVIEWS_HEADER, review_line, write_tab_separated
from tests.test_examples_datasets import write


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tab_separated(tmp_path)
    return tmp_path


def columns_of(samples: Samples) -> dict[str, torch.Tensor]:
    """Feature -> ids ``(n / 3, 3)``, a review and its negatives beside each other."""
    return {name: samples.ids[:, i].view(-1, 3) for i, name in enumerate(samples.feature_names)}


def test_every_review_has_two_items_that_its_user_never_reviewed(data: Path) -> None:
    samples = load_amazon_sports(data, seed=0)
    columns = columns_of(samples)
    assert samples.labels.view(-1, 3).tolist() == [[1, 0, 0]] * len(REVIEWED)
    assert (columns["user"] == columns["user"][:, :1]).all()
    positives = set(zip(columns["user"][:, 0].tolist(), columns["item"][:, 0].tolist(), strict=True))
    assert len(positives) == len(set(REVIEWED))
    drawn = set(zip(columns["user"][:, 1:].flatten().tolist(), columns["item"][:, 1:].flatten().tolist(), strict=True))
    assert not positives & drawn
    assert len({item for _, item in drawn}) == 23


def item_numbers(samples: Samples) -> list[int]:
    """What the file has for the item of every sample, read off the reviews: rows are numbered by frequency."""
    rows = samples.ids[:, 1].tolist()
    number_of = dict(zip(rows[::3], (item for _, item in REVIEWED), strict=True))
    assert sorted(number_of.values()) == list(range(23))
    return [number_of[row] for row in rows]


def test_fields_come_with_the_item_drawn_or_not(data: Path) -> None:
    samples = load_amazon_sports(data, seed=0)
    sizes = {"user": 20, "item": 23, "brand": 5, "cat1": 2, "cat2": 3, "cat3": 4, "leaf": 6, ATTRIBUTES: 23}
    assert dict(samples.num_embeddings) == sizes
    numbers = item_numbers(samples)
    for place, name in enumerate(OF_ITEM, start=2):
        field = [number % sizes[name] for number in numbers]
        assert len(set(zip(field, samples.ids[:, place].tolist(), strict=True))) == sizes[name]
    bags = samples.multi_hot[ATTRIBUTES]
    assert bags.offsets.diff().tolist() == [number % 4 for number in numbers]
    attributes = [number + j for number in numbers for j in range(number % 4)]
    assert len(set(zip(attributes, bags.values.tolist(), strict=True))) == sizes[ATTRIBUTES]


def test_negatives_follow_from_the_seed(data: Path) -> None:
    first, again, other = (item_numbers(load_amazon_sports(data, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first[::3] == other[::3]
    assert first != other
    assert read_reviews(data / "amazon_sports_seq.tsv.gz") is read_reviews(data / "amazon_sports_seq.tsv.gz")


def test_negatives_are_in_the_split_of_their_review(data: Path) -> None:
    samples, recipe = load_amazon_sports(data, seed=3), amazon_sports.fm(data, seed=3, embedding_dim=2)
    splits = [recipe.data.train, recipe.data.validation, recipe.data.selection, recipe.data.test]
    parts = split_rows(690, seed=3, group_size=3)
    assert [split.rows.tolist() for split in splits] == [part.tolist() for part in parts]
    for part in parts:
        assert (part.view(-1, 3) == part.view(-1, 3)[:, :1] + torch.arange(3)).all()
    batch = next(iter(recipe.data.test))
    assert torch.equal(batch.labels, samples.labels[parts[3]])
    assert (
        batch.sparse_features[ATTRIBUTES].lengths().tolist()
        == samples.multi_hot[ATTRIBUTES].offsets.diff()[parts[3]].tolist()
    )


@pytest.mark.parametrize(
    ("attributes", "message"),
    [("3 x", "expected integers with blanks between them in 'attrs'"), ("1.5", "integers"), ("9" * 30, "integers")],
)
def test_attributes_that_are_no_ids_are_refused(tmp_path: Path, attributes: str, message: str) -> None:
    lines = [review_line(user, item) for user, item in REVIEWED]
    lines[5] = lines[5].rpartition("\t")[0] + "\t" + attributes
    write(tmp_path / "amazon_sports_seq.tsv", [REVIEWS_HEADER, *lines])
    with pytest.raises(ValueError, match=rf"amazon_sports_seq.tsv: .*{message}"):
        load_amazon_sports(tmp_path, seed=0)


def test_a_user_who_has_reviewed_everything_is_named(tmp_path: Path) -> None:
    lines = [review_line(user, item) for user, item in REVIEWED if item < 20 or user == 0]
    write(tmp_path / "amazon_sports_seq.tsv", [REVIEWS_HEADER, *lines, *(review_line(0, item) for item in range(23))])
    with pytest.raises(ValueError, match="user 0: expected an item of 23 left to be a negative"):
        load_amazon_sports(tmp_path, seed=0)
