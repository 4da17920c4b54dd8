"""Frequency: how often each row of each table occurs in the TRAINING data."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dnis_torchrec.blocks.routing import ROWS_AT_A_TIME
from dnis_torchrec.checks import check, check_known, describe


def count_chunks(counts: Tensor) -> Iterator[Tensor]:
    """Counts of all rows as int64, `ROWS_AT_A_TIME` at a time."""
    return (chunk.long() for chunk in counts.split(ROWS_AT_A_TIME))


@dataclass(frozen=True, eq=False)
class FrequencyCounts:
    """Occurrences of every row in the training data."""

    counts: Mapping[str, Tensor]
    max_bag_lengths: Mapping[str, int]
    num_samples: int

    def never_seen(self, table: str) -> Tensor:
        """``(N,)`` bool: rows of `table` that training never looked up."""
        check_known("table", table, self.counts)
        return self.counts[table] == 0


def count_frequencies(
    batches: Iterable[KeyedJaggedTensor], tables: Sequence[EmbeddingBagConfig]
) -> FrequencyCounts:
    """Counts how often each row of each table is looked up.

    Memory is one int32 per row; time is linear in the number of ids, whatever the number of rows.
    Local: each rank counts the batches that it is given.

    Args:
        batches: KeyedJaggedTensors of the training data, keys in any order, keys that no table
            reads allowed.
        tables: the tables, as ``embedding_bag_configs()`` gives them.

    Returns:
        The counts, the longest bag of every feature and the number of samples.

    Raises:
        ValueError: if there is no batch, a batch lacks a feature, or an id lies outside its table.

    Example:
        >>> ids, lengths = torch.tensor([2, 2, 0]), torch.tensor([2, 1])
        >>> kjt = KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths)
        >>> table = EmbeddingBagConfig(
        ...     name="t", num_embeddings=4, embedding_dim=8, feature_names=["f"]
        ... )
        >>> count_frequencies([kjt], [table]).counts["t"].tolist()
        [1, 0, 2, 0]
    """
    counts = count_batches(batches, tables)
    check_counts(counts)
    return counts


def count_batches(
    batches: Iterable[KeyedJaggedTensor], tables: Sequence[EmbeddingBagConfig]
) -> FrequencyCounts:
    """Counts without a look at whether there is something to count."""
    counts = {table.name: torch.zeros(table.num_embeddings, dtype=torch.int32) for table in tables}
    max_bag_lengths = {feature: 0 for table in tables for feature in table.feature_names}
    num_samples = 0
    for index, features in enumerate(batches):
        if features.variable_stride_per_key():
            limit, remedy = "supported are batches of one size for all keys", "expand them first"
            value = f"sizes {features.stride_per_key()}"
            raise NotImplementedError(describe(f"batch {index}", limit, value, remedy))
        bags_by_key = copy.copy(features).to_dict()  # the batch itself is left as it was
        for table in tables:
            for feature, (ids, longest) in bags_of(table, bags_by_key, f"batch {index}").items():
                counts[table.name].scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
                max_bag_lengths[feature] = max(max_bag_lengths[feature], longest)
        num_samples += features.stride()
    return FrequencyCounts(counts, max_bag_lengths, num_samples)


def check_counts(counts: FrequencyCounts) -> None:
    """Checks that there are samples, and that no count has wrapped around."""
    remedy = "check the data folder"
    check(counts.num_samples > 0, "training stream", "at least one sample", "none", remedy)
    for name, of_rows in counts.counts.items():
        fits = bool((of_rows >= 0).all())
        check(fits, f"table {name!r}", "at most 2^31 - 1 lookups of a row", "more")


def longest_bags(
    features: KeyedJaggedTensor, tables: Sequence[EmbeddingBagConfig], place: str
) -> dict[str, int]:
    """The longest bag of every feature of a batch that is not counted, after a check of its ids.
    Local."""
    # the batch itself is left as it was: see jagged_by_key
    bags_by_key = copy.copy(features).to_dict()
    return {
        feature: length
        for table in tables
        for feature, (_, length) in bags_of(table, bags_by_key, place).items()
    }


def bags_of(
    table: EmbeddingBagConfig, bags_by_key: Mapping[str, JaggedTensor], place: str
) -> dict[str, tuple[Tensor, int]]:
    """Feature -> its ids and its longest bag, for every feature that a table reads."""
    bags = {}
    for feature in table.feature_names:
        check_known(f"feature of table {table.name!r} in {place}", feature, bags_by_key)
        ids, lengths = bags_by_key[feature].values(), bags_by_key[feature].lengths()
        check_ids_are_integers(ids, f"table {table.name!r}, feature {feature!r}, {place}")
        ids = ids.cpu().long()
        _check_ids(ids, table, feature, place)
        bags[feature] = ids, int(lengths.max()) if lengths.numel() else 0
    return bags


def _check_ids(ids: Tensor, table: EmbeddingBagConfig, feature: str, place: str) -> None:
    if ids.numel() == 0:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    fits, value = lowest >= 0 and highest < table.num_embeddings, lowest if lowest < 0 else highest
    where = f"table {table.name!r}, feature {feature!r}, {place}"
    remedy = "hash the ids into the table, or raise its num_embeddings"
    check(fits, where, f"ids in 0..{table.num_embeddings - 1}", value, remedy)


def check_ids_are_integers(ids: Tensor, place: str) -> None:
    """Checks that ids are integers of any width and sign: a float that was cut to one would read
    another row."""
    is_other = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    check(
        not is_other or not ids.numel(),
        place,
        "integer ids",
        ids.dtype,
        "hash or number what is no integer",
    )


def table_key(name: str, fqn: str) -> str:
    """The name of a table among those of all collections, where others have the same name."""
    return f"{name}@{fqn.replace('.', '_')}"


def table_name(key: str, fqn: str) -> str:
    """The name of a table in its collection: the inverse of `table_key`."""
    return key.removesuffix(f"@{fqn.replace('.', '_')}")
