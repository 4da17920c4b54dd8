"""The bags of every key of a batch, wherever the batch has been before."""

from __future__ import annotations

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


def jagged_by_key(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """The bags of every key: what `KeyedJaggedTensor.to_dict` gives, on the device where the batch
    is."""
    if not features.lengths().numel():
        nothing = JaggedTensor(
            values=features.values(), lengths=features.lengths(), weights=features.weights_or_none()
        )
        return dict.fromkeys(features.keys(), nothing)
    jagged = features.to_dict()
    if any(bags.values().device != features.device() for bags in jagged.values()):
        features._jt_dict = None
        jagged = features.to_dict()
    return jagged
