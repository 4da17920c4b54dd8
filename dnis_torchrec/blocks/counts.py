"""Frequency: how often each row of each table occurs in the TRAINING data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME
from dnis_torchrec.blocks.sketch import EstimatedCounts
from dnis_torchrec.checks import check, check_known, describe
from dnis_torchrec.data.files import NotNegative, read_tensors, write_tensors

RowCounts = Tensor | EstimatedCounts
"""Occurrences of a table's rows: ``(N,)`` int64, or in bounded memory, to be read a slice at a
time."""


class _Head(TypedDict):
    max_bag_lengths: dict[str, int]
    num_samples: NotNegative
    tables: list[str]
    estimated: list[str]


def count_chunks(counts: RowCounts) -> Iterator[Tensor]:
    """Counts of all rows, `ROWS_AT_A_TIME` at a time."""
    for first in range(0, counts.numel(), ROWS_AT_A_TIME):
        yield counts[first : first + ROWS_AT_A_TIME]


@dataclass(frozen=True, eq=False)
class FrequencyCounts:
    """Occurrences of every row in the training data."""

    counts: Mapping[str, RowCounts]
    max_bag_lengths: Mapping[str, int]
    num_samples: int

    def never_seen(self, table: str) -> Tensor:
        """``(N,)`` bool: rows of `table` that training never looked up."""
        check_known("table", table, self.counts)
        return torch.cat([chunk == 0 for chunk in count_chunks(self.counts[table])])

    def error_bounds(self) -> dict[str, float]:
        """Table -> largest excess of a row's count over the true one, with probability 1 - delta
        each; 0 if exact."""
        return {name: counts.error_bound for name, counts in self._estimated().items()} | {
            name: 0.0 for name, counts in self.counts.items() if isinstance(counts, Tensor)
        }

    def notes(self) -> list[str]:
        """Says for people which counts are not exact, in a sentence per table."""
        return [
            f"Table {name!r}: frequencies are estimates in bounded memory, none too low, {counts.confidence:.0%} of "
            f"them at most {counts.error_bound:,.1f} too high; a row that never occurred may pass for one that did."
            for name, counts in self._estimated().items()
            if counts.error_bound
        ]

    def exact(self) -> dict[str, Tensor]:
        """Table -> ``(N,)`` int64 occurrences."""
        for name in self._estimated():
            supported = "supported are counts of every row"
            raise NotImplementedError(
                describe(f"table {name!r}", supported, "estimated ones", "raise exact_rows")
            )
        return {name: counts for name, counts in self.counts.items() if isinstance(counts, Tensor)}

    def _estimated(self) -> dict[str, EstimatedCounts]:
        return {
            name: counts
            for name, counts in self.counts.items()
            if isinstance(counts, EstimatedCounts)
        }

    def save(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all; what is estimated stays as small as it
        is."""
        estimated = self._estimated()
        head = {"max_bag_lengths": dict(self.max_bag_lengths), "num_samples": self.num_samples}
        head |= {"tables": list(self.counts), "estimated": list(estimated)}
        tensors = {
            name: counts for name, counts in self.counts.items() if isinstance(counts, Tensor)
        }
        for name, counts in estimated.items():
            tensors |= {f"{name}/{part}": value for part, value in counts.to_tensors().items()}
        write_tensors(path, tensors, "frequency_counts", head)

    @staticmethod
    def load(path: Path) -> FrequencyCounts:
        """Reads a file that `save` wrote."""
        tensors, head = read_tensors(path, "frequency_counts", _Head)
        counts: dict[str, RowCounts] = {
            name: tensors[name] for name in head["tables"] if name in tensors
        }
        for name in head["estimated"]:
            own = {
                key.removeprefix(f"{name}/"): value
                for key, value in tensors.items()
                if key.startswith(f"{name}/")
            }
            check("size" in own, str(path), f"a tensor '{name}/size'", "none", "use another one")
            counts[name] = EstimatedCounts.from_tensors(own)
        ordered = {
            name: counts[name] if name in counts else tensors[name] for name in head["tables"]
        }
        return FrequencyCounts(ordered, head["max_bag_lengths"], head["num_samples"])


def count_frequencies(
    batches: Iterable[KeyedJaggedTensor], tables: Sequence[EmbeddingBagConfig]
) -> FrequencyCounts:
    """Counts how often each row of each table is looked up.

    Memory is one int64 per row; time is linear in the number of ids, whatever the number of rows.
    Local: each rank counts the batches that it is given; `merge_counts` adds up the counts of
    several. `streaming.count_stream` counts over ranks and in bounded memory.

    Args:
        batches: KeyedJaggedTensors of the training data, keys in any order, keys that no table
            reads allowed.
        tables: the tables, as ``embedding_bag_configs()`` gives them.

    Returns:
        The counts, the longest bag of every feature and the number of samples.

    Raises:
        ValueError: if there is no batch, a batch lacks a feature, or an id lies outside its table.

    Example:
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([2, 2, 0]), lengths=torch.tensor([2, 1]))
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"])
        >>> count_frequencies([kjt], [table]).counts["t"].tolist()
        [1, 0, 2, 0]
    """
    counts = {table.name: torch.zeros(table.num_embeddings, dtype=torch.int64) for table in tables}
    max_bag_lengths = {feature: 0 for table in tables for feature in table.feature_names}
    num_samples = 0
    for index, features in enumerate(batches):
        jagged = copy.copy(
            features
        ).to_dict()  # the batch itself is left as it was: see jagged_by_key
        for table in tables:
            for feature, (ids, longest) in bags_of(table, jagged, f"batch {index}").items():
                counts[table.name].scatter_add_(0, ids, torch.ones_like(ids))
                max_bag_lengths[feature] = max(max_bag_lengths[feature], longest)
        num_samples += features.stride()
    if num_samples == 0:
        raise ValueError(
            describe("training stream", "at least one sample", "none", "check the data folder")
        )
    return FrequencyCounts(counts, max_bag_lengths, num_samples)


def longest_bags(
    features: KeyedJaggedTensor, tables: Sequence[EmbeddingBagConfig], place: str
) -> dict[str, int]:
    """The longest bag of every feature of a batch that is not counted, after a check of its ids.
    Local."""
    jagged = copy.copy(features).to_dict()  # the batch itself is left as it was: see jagged_by_key
    return {
        feature: length
        for table in tables
        for feature, (_, length) in bags_of(table, jagged, place).items()
    }


def bags_of(
    table: EmbeddingBagConfig, jagged: Mapping[str, JaggedTensor], place: str
) -> dict[str, tuple[Tensor, int]]:
    """Feature -> its ids and its longest bag, for every feature that a table reads."""
    bags = {}
    for feature in table.feature_names:
        check_known(f"feature of table {table.name!r} in {place}", feature, jagged)
        ids, lengths = jagged[feature].values(), jagged[feature].lengths()
        check_ids_are_integers(ids, f"table {table.name!r}, feature {feature!r}, {place}")
        ids = ids.cpu().long()
        _check_ids(ids, table, feature, place)
        bags[feature] = ids, int(lengths.max()) if lengths.numel() else 0
    return bags


def count_frequencies_in_frame(
    frame: pd.DataFrame, tables: Sequence[EmbeddingBagConfig]
) -> FrequencyCounts:
    """Counts row ids in the columns of a pandas frame, one column per feature, named like it."""
    check(len(frame) > 0, "training frame", "at least one row", 0)
    counts, max_bag_lengths = {}, {}
    for table in tables:
        total = torch.zeros(table.num_embeddings, dtype=torch.int64)
        for feature in table.feature_names:
            check_known(
                f"column for feature of table {table.name!r}", feature, map(str, frame.columns)
            )
            ids, max_bag_lengths[feature] = _ids_of_column(frame[feature])
            _check_ids(ids, table, feature, "frame")
            total += torch.bincount(ids, minlength=table.num_embeddings)
        counts[table.name] = total
    return FrequencyCounts(counts, max_bag_lengths, len(frame))


def _ids_of_column(column: pd.Series) -> tuple[Tensor, int]:
    """(ids of all bags, longest bag)."""
    place, requirement = f"column {column.name!r}", "integer ids or lists of them"
    remedy = "fill what is missing and hash what is no integer"
    if isinstance(column.dtype, pd.ArrowDtype) and pa.types.is_nested(column.dtype.pyarrow_dtype):
        return _ids_of_arrow_lists(column, place, requirement, remedy)
    is_list = (
        [isinstance(bag, list | tuple | np.ndarray) for bag in column]
        if column.dtype == object
        else []
    )
    if not any(is_list):
        check(pd.api.types.is_integer_dtype(column.dtype), place, requirement, column.dtype, remedy)
        check(not column.isna().any(), place, requirement, f"{column.isna().sum()} missing", remedy)
        return torch.from_numpy(np.array(column, dtype=np.int64)), 1
    neither = [
        bag for bag, known in zip(column, is_list, strict=True) if not known and pd.notna(bag)
    ]
    check(not neither, place, requirement, repr(neither[:1]), remedy)
    bags = [np.asarray(bag) for bag, known in zip(column, is_list, strict=True) if known]
    for bag in bags:  # an empty one is of no dtype that means anything
        is_ids = bag.ndim == 1 and (bag.size == 0 or bag.dtype.kind in "iu")
        check(is_ids, place, requirement, bag, remedy)
    flat = np.concatenate([bag.astype(np.int64, copy=False) for bag in bags])
    return torch.from_numpy(flat), max(map(len, bags))


def _ids_of_arrow_lists(
    column: pd.Series, place: str, requirement: str, remedy: str
) -> tuple[Tensor, int]:
    lists = pa.Table.from_pandas(column.to_frame("ids"), preserve_index=False)["ids"]
    try:
        ids, lengths = pc.list_flatten(lists), pc.list_value_length(lists)
    except pa.ArrowNotImplementedError as error:
        raise ValueError(describe(place, requirement, lists.type, remedy)) from error
    is_ids = pa.types.is_integer(ids.type) or len(ids) == ids.null_count == 0
    check(is_ids, place, requirement, lists.type, remedy)
    check(ids.null_count == 0, place, requirement, f"{ids.null_count} missing in lists", remedy)
    return torch.from_numpy(ids.to_numpy().astype(np.int64)), pc.max(lengths).as_py() or 0


def merge_counts(counts_of_ranks: Sequence[FrequencyCounts]) -> FrequencyCounts:
    """Adds up counts of disjoint parts of the training data, as several ranks or days make them."""
    check(len(counts_of_ranks) > 0, "merge_counts", "at least one part", 0)
    first = counts_of_ranks[0]
    for of_rank in counts_of_ranks[1:]:
        same = _tables_and_features(of_rank) == _tables_and_features(first)
        check(
            same,
            "merge_counts",
            "the same tables and features in every part",
            _tables_and_features(of_rank),
        )
    counts = [of_rank.exact() for of_rank in counts_of_ranks]
    return FrequencyCounts(
        {name: torch.stack([of_rank[name] for of_rank in counts]).sum(0) for name in first.counts},
        {
            name: max(of_rank.max_bag_lengths[name] for of_rank in counts_of_ranks)
            for name in first.max_bag_lengths
        },
        sum(of_rank.num_samples for of_rank in counts_of_ranks),
    )


def _tables_and_features(part: FrequencyCounts) -> tuple[dict[str, int], list[str]]:
    """(num_embeddings of every table, features)."""
    return {name: part.counts[name].numel() for name in sorted(part.counts)}, sorted(
        part.max_bag_lengths
    )


def _check_ids(ids: Tensor, table: EmbeddingBagConfig, feature: str, place: str) -> None:
    if ids.numel() == 0:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= table.num_embeddings:
        raise ValueError(
            describe(
                f"table {table.name!r}, feature {feature!r}, {place}",
                f"ids in 0..{table.num_embeddings - 1}",
                lowest if lowest < 0 else highest,
                "hash the ids into the table, or raise its num_embeddings",
            )
        )


def check_ids_are_integers(ids: Tensor, place: str) -> None:
    """Checks that ids are integers of any width and sign: a float that was cut to one would read
    another row."""
    is_integer = not ids.numel() or not (
        ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    )
    check(is_integer, place, "integer ids", ids.dtype, "hash or number what is no integer")
