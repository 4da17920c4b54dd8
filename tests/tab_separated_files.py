"""Small files of the tab-separated data sets in examples/."""

from __future__ import annotations

from pathlib import Path

from tests.test_examples_datasets import write

REVIEWS_HEADER = "user\titem\ttimestamp\tbrand\tcat1\tcat2\tcat3\tleaf\tattrs"
REVIEWED = [(i % 20, 5 * i % 23) for i in range(230)]
"""User and item of every review."""


def write_tab_separated(folder: Path) -> None:
    """Files of examples.anime, examples.lastfm_tags and examples.amazon_sports."""
    ratings = [f"{1 + i % 10}\t{i % 20}\t{i % 7}\t{i % 3 - 1}\t{i % 2}\t{i % 5}\t{i % 9}" for i in range(400)]
    write(folder / "anime.tsv.gz", ["rating\tuser\titem\tgenre_set\tgenre1\ttype\tepisodes", *ratings])
    clicks = [f"{i % 2}\t{i % 20}\t{i % 11}\t{i % 7}\t{978300000 + i}" for i in range(400)]
    write(folder / "lastfm_tag_ctr.tsv", ["label\tuser\tartist\ttag\ttimestamp", *clicks])
    reviews = [review_line(user, item) for user, item in REVIEWED]
    write(folder / "amazon_sports_seq.tsv.gz", [REVIEWS_HEADER, *reviews])


def review_line(user: int, item: int) -> str:
    """Ids of users and items have gaps; an item's fields follow from it, and every fourth has no attributes."""
    attributes = " ".join(str(30 + item + j) for j in range(item % 4))
    fields = [10 * user, 3 * item, 1015459200, item % 5, item % 2, item % 3, 7 * (item % 4), item % 6]
    return "\t".join([*map(str, fields), attributes])
