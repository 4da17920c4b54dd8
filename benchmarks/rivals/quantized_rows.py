"""Rows as FBGEMM's inference kernels hold them: float32, float16, int8 or int4, and how far off
they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from benchmarks.rivals.forms import PRECISIONS, SCALE_BYTES, Precision
from dnis_torchrec.checks import check, check_known


def data_type_of(precision: Precision) -> DataType:
    """TorchRec's name for a precision."""
    return DataType[precision.name.upper()]


def quantized_rows(weight: Tensor, precision: Precision, *, place: str) -> Tensor:
    """Stores rows in some precision."""
    weight = weight.detach().float().contiguous()
    check(bool(weight.isfinite().all()), place, "finite values", "NaN or infinity", "export the last good state")
    if precision.bits < 32 and weight.numel():
        largest = float(weight.abs().max())
        check(largest <= 65504, place, f"at most 65504 for {precision.name}", largest, "take fp32")
    missing = -weight.shape[1] % precision.dim_multiple
    if missing:
        weight = torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1)
    if precision.bits == 32:
        return weight.view(torch.uint8)
    if precision.bits == 16:
        return weight.half().view(torch.uint8)
    rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, precision.bits)
    _mend_cut_rows_(rows, weight, precision)
    return rows


def values_of_rows(rows: Tensor, precision: Precision) -> Tensor:
    """The values that stored rows stand for."""
    if precision.bits >= 16:
        return rows.view(torch.float32 if precision.bits == 32 else torch.float16).float()
    return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(rows.contiguous(), precision.bits)


def _mend_cut_rows_(rows: Tensor, weight: Tensor, precision: Precision) -> None:
    """Quantises again, in place, the rows that FBGEMM's rounding of scale and bias cuts off further
    than need be."""
    levels = 2**precision.bits - 1
    smallest, largest = weight.amin(dim=1), weight.amax(dim=1)
    scale, bias = rows[:, -SCALE_BYTES:].view(torch.float16).unbind(1)
    error, mended = (_largest_error(smallest, largest, scale, bias, levels), torch.zeros(len(rows), dtype=torch.bool))
    below = torch.where(bias > smallest, bias.nextafter(bias.new_tensor(-torch.inf)), bias)
    for candidate in (bias, below):
        wider = _rounded_up((largest - candidate) / levels)
        found = _largest_error(smallest, largest, wider, candidate, levels)
        better = found < error
        error, scale = torch.where(better, found, error), torch.where(better, wider, scale)
        bias, mended = torch.where(better, candidate, bias), mended | better
    again = mended.nonzero().squeeze(1)
    steps = weight[again].sub_(bias[again].unsqueeze(1)).div_(scale[again].unsqueeze(1))
    quantised = steps.round_().clamp_(0, levels).to(torch.uint8)
    if precision.bits == 4:
        quantised = quantised[:, ::2] | quantised[:, 1::2] << 4
    rows[again] = torch.cat([quantised, torch.stack([scale, bias], dim=1)[again].view(torch.uint8)], dim=1)


def _largest_error(smallest: Tensor, largest: Tensor, scale: Tensor, bias: Tensor, levels: int) -> Tensor:
    """Returns each row's largest distance of a value, from its smallest to its largest, to ``scale
    * q + bias``."""
    # no further than half a step or from q = 0, except where q would have to be below 0 or above
    # levels
    within = torch.minimum(scale.float() / 2, largest - bias)
    return within.maximum(bias - smallest).maximum(largest - (bias + levels * scale.float()))


def _rounded_up(scale: Tensor) -> Tensor:
    """The least float16 above 0 that is no less."""
    nearest = scale.half()
    up = torch.where(nearest < scale, nearest.nextafter(nearest.new_tensor(torch.inf)), nearest)
    return up.clamp(min=2**-24)


def error_bound(weight: Tensor, precision: Precision) -> Tensor:
    """Returns each row's bound on the error of a stored value."""
    if precision.bits == 32:
        return torch.zeros(len(weight))
    if precision.bits == 16:
        return _half_rounding(weight).amax(dim=1)
    smallest = weight.amin(dim=1)
    scale = (weight.amax(dim=1) - smallest + 2 * _half_rounding(smallest)) / (2**precision.bits - 1)
    return 1.01 * (scale / 2 + _half_rounding(scale)) + 2**-23 * weight.abs().amax(dim=1)


def _half_rounding(value: Tensor) -> Tensor:
    return (value.abs() * 2**-11).clamp(min=2**-25)


def stored_rows(collection: QuantEmbeddingBagCollection) -> list[Tensor]:
    """The bytes of every table of a quantised collection, where FBGEMM keeps them: ``(rows,
    bytes)`` uint8 each."""
    (kernel,) = collection._emb_modules
    return [rows for rows, _, _ in kernel.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)]


def quantized_collection(
    configs: Sequence[EmbeddingBagConfig], rows: Mapping[str, Tensor], *, is_weighted: bool, device: torch.device | str
) -> QuantEmbeddingBagCollection:
    """TorchRec's quantised collection of rows that were quantised before; they are copied into
    FBGEMM's memory."""
    weights = {}
    for config in configs:
        check_known("table", config.name, rows)
        precision = PRECISIONS[config.data_type.name.lower()]
        count = getattr(config, "num_embeddings_post_pruning", None) or config.num_embeddings
        shape, received = (count, precision.row_bytes(config.embedding_dim)), rows[config.name]
        fits = tuple(received.shape) == shape and received.dtype == torch.uint8
        found = f"{received.dtype} {tuple(received.shape)}"
        check(fits, f"table {config.name!r}", f"{precision.name} rows: uint8 of shape {shape}", found)
        has_scales = precision.bits < 16
        values = received[:, :-SCALE_BYTES] if has_scales else received
        weights[config.name] = (values, received[:, -SCALE_BYTES:] if has_scales else None)
    return QuantEmbeddingBagCollection(
        list(configs),
        is_weighted,
        torch.device(device),
        table_name_to_quantized_weights=weights,
        register_tbes=True,
        row_alignment=1 if torch.device(device).type == "cpu" else 16,
    )
