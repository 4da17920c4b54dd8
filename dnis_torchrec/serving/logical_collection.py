"""LogicalCollection: what all modules that serve logical tables have in common, whatever form the tables have.

Shapes: B batch, F features, I ids of a batch, N rows of a table, D embedding_dim.
"""

from __future__ import annotations

from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.checks import check
from dnis_torchrec.ops.bag_splitting import check_one_batch_size
from dnis_torchrec.ops.batch_checks import readable_bags
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving.logical_tables import UNKNOWN_IDS, LogicalTables, check_num_bags, name_unknown_id


class LogicalCollection(EmbeddingBagCollectionInterface):
    """A collection that a model sees as it was before pruning.

    Args:
        scheme: the tables of ONE collection of a model.
        unknown_ids: ids below 0 or from N on raise (``"error"``) or contribute zero (``"zero"``; they count in L).

    Raises:
        ValueError: if the scheme holds no table, or tables of several collections; for other `unknown_ids`.
    """

    def __init__(self, scheme: MixedDimensionScheme, *, unknown_ids: str) -> None:
        super().__init__()
        check(unknown_ids in UNKNOWN_IDS, "unknown_ids", f"expected one of {UNKNOWN_IDS}", repr(unknown_ids))
        self._logical, self._zero_unknown = LogicalTables.of(scheme), unknown_ids == "zero"

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The logical tables: N rows of D, as before pruning; what DLRM and its like read."""
        return self._logical.configs

    def is_weighted(self) -> bool:
        """Whether bags carry per-sample weights."""
        return self._logical.is_weighted


class OperatorCollection(LogicalCollection):
    """A collection whose lookups one compiled operator does, which checks ids and offsets on its way.

    What is wrong is put into words only once the operator has stumbled over it: a lookup of one bag has no time to look
    before.
    """

    def _of_batch(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled embeddings of a batch whose keys may stand in any order, ``(B, sum of D over features)``."""
        logical = self._logical
        names = features.keys()
        keys = None if names == logical.features else logical.positions(features)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            check_one_batch_size(features)  # says why this is refused
        weights, offsets, batch_size = logical.weights_of(features), features.offsets(), features.stride()
        if keys is not None:  # else the operator sees that there are as many as features
            check_num_bags(names, offsets, batch_size)
        return self._pooled(features.values(), offsets, weights, keys, batch_size, names)

    def _pooled(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        keys: list[int] | None,
        batch_size: int,
        names: list[str],
    ) -> Tensor:
        """Pooled embeddings; bags that the operator does not read as they came are made readable, or refused."""
        try:
            return self._by_operator(ids, offsets, weights, keys, batch_size)
        except ValueError:
            check_num_bags(names, offsets, batch_size)
            taken = readable_bags(names, ids, offsets, weights)
            if taken[0] is not ids or taken[1] is not weights:
                return self._pooled(taken[0], offsets, taken[1], keys, batch_size, names)
            if not self._zero_unknown:
                positions = range(len(self._logical.features)) if keys is None else keys
                bounds = [(int(offsets[key * batch_size]), int(offsets[(key + 1) * batch_size])) for key in positions]
                name_unknown_id(self._logical, [ids[first:last] for first, last in bounds])
            raise

    def _by_operator(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, keys: list[int] | None, batch_size: int
    ) -> Tensor:
        raise NotImplementedError
