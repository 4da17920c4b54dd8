"""MovieLens-1M (``.dat``) and MovieLens-20M (``.csv``) in GroupLens' own formats."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dnis_torchrec.checks import describe
from dnis_torchrec.data.batches import Bags, split_rows
from examples.datasets.in_memory import Samples
from examples.datasets.text_files import find_file, number_rows, read_table

PUBLISHER = "GroupLens' MovieLens page (ml-1m.zip or ml-20m.zip), unpacked"

_RATINGS = {"userId": np.int64, "movieId": np.int64, "rating": np.float64, "timestamp": np.int64}
_MOVIES = {"movieId": np.int64, "title": str, "genres": str}
_USERS = {"userId": np.int64, "gender": str, "age": np.int64, "occupation": np.int64, "zip": str}
_COLUMNS = {"ratings": _RATINGS, "movies": _MOVIES, "users": _USERS}

_RATINGS_FILES = ("ratings.dat", "ratings.csv")
NO_GENRES = "(no genres listed)"


def load_ratings(folder: Path, *, seed: int) -> Samples:
    """Loads the ratings alone: features user and movie, the rating as label, no dense feature."""
    return _sorted(_parse_ratings(folder), seed)


def load_clicks(folder: Path, *, seed: int) -> Samples:
    """Loads MovieLens as a click-through task: label 1 for a rating of 4 or more."""
    samples = load_clicks_and_ratings(folder, seed=seed)
    return replace(samples, labels=samples.labels[:, 0])


def load_clicks_and_ratings(folder: Path, *, seed: int) -> Samples:
    """Loads MovieLens with two labels for each sample: the click of `load_clicks`, and the rating itself."""
    return _sorted(_parse_clicks(folder), seed)


def _sorted(samples: Samples, seed: int) -> Samples:
    return samples.sorted_by_frequency(split_rows(len(samples.labels), seed=seed)[0])


@lru_cache(maxsize=2)
def _parse_ratings(folder: Path) -> Samples:
    ratings = _read(folder, *_RATINGS_FILES)
    codes = {"user": number_rows(ratings["userId"]), "movie": number_rows(ratings["movieId"])}
    labels = torch.from_numpy(ratings["rating"].to_numpy(np.float32))
    return _assemble(torch.zeros(labels.numel(), 0), codes, labels)


@lru_cache(maxsize=2)
def _parse_clicks(folder: Path) -> Samples:
    ratings = _read(folder, *_RATINGS_FILES)
    codes = {"user": number_rows(ratings["userId"]), "movie": number_rows(ratings["movieId"])}
    if find_file(folder, _RATINGS_FILES, PUBLISHER).name.startswith("ratings.dat"):
        users = _read(folder, "users.dat").drop_duplicates("userId").set_index("userId")
        attributes = users.reindex(ratings["userId"])
        unknown = attributes["gender"].isna().to_numpy()
        if unknown.any():
            place = f"user {ratings['userId'].to_numpy()[unknown][0]}"
            raise ValueError(describe(place, "a line in users.dat", "none", "download both files again"))
        codes |= {name: number_rows(attributes[name]) for name in ("gender", "age", "occupation", "zip")}
    bags, num_genres = _genre_bags(_read(folder, "movies.dat", "movies.csv"), ratings["movieId"].to_numpy())
    rating = torch.from_numpy(ratings["rating"].to_numpy(np.float32))
    labels = torch.stack([(rating >= 4).float(), rating], dim=1)
    return _assemble(torch.ones(len(labels), 1), codes, labels, genres=(bags, num_genres))


def _read(folder: Path, *names: str) -> pd.DataFrame:
    path = find_file(folder, names, PUBLISHER)
    name, kind, *_ = path.name.split(".")
    if kind == "dat":
        return read_table(path, _COLUMNS[name], "::", encoding="latin-1")
    return read_table(path, _COLUMNS[name], ",", has_header=True)


def _genre_bags(movies: pd.DataFrame, rated: np.ndarray) -> tuple[Bags, int]:
    """Genres of the movie of every rating, and the number of distinct genres."""
    listed = movies.drop_duplicates("movieId").set_index("movieId")["genres"]
    split = [[genre for genre in text.split("|") if genre and genre != NO_GENRES] for text in listed]
    names = sorted({genre for genres in split for genre in genres})
    number = {name: index for index, name in enumerate(names)}
    # A last, empty bag stands for movies that are rated but not listed.
    lengths = torch.tensor([len(genres) for genres in split] + [0])
    per_movie = Bags.of_lengths(torch.tensor([number[genre] for genres in split for genre in genres]), lengths)
    position = listed.index.get_indexer(rated)
    rows = torch.from_numpy(np.where(position < 0, len(split), position))
    return per_movie.select(rows), len(names)


def _assemble(
    dense: Tensor, codes: dict[str, tuple[Tensor, int]], labels: Tensor, **multi_hot: tuple[Bags, int]
) -> Samples:
    return Samples(
        dense=dense,
        ids=torch.stack([column for column, _ in codes.values()], dim=1),
        labels=labels,
        feature_names=tuple(codes),
        multi_hot={name: bags for name, (bags, _) in multi_hot.items()},
        num_embeddings={name: rows for name, (_, rows) in (codes | multi_hot).items()},
    )
