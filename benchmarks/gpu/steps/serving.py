"""Lookups of compressed tables beside FBGEMM's dense ones (TBE) in FP32, FP16, INT8 and INT4."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import serving
from benchmarks.gpu.step import Run
from benchmarks.gpu.timing import in_turns
from dnis_torchrec.artifact.load import serve

DENSE = {"dense_fp32": 32, "dense_fp16": 16, "dense_int8": 8, "dense_int4": 4}
"""Name -> bits of a value of TorchRec's own inference tables."""
BASELINE = "dense_fp32"
NUM_TABLES, ROWS = 26, 100_000
SMALL_TABLES, SMALL_ROWS = 2, 400
CASES = [(4096, 20), (4096, 1), (16384, 20), (1024, 20), (64, 1), (1, 1), (65536, 20)]
CASES += [(batch_size, pooling) for batch_size in (1, 64, 1024, 16384, 65536) for pooling in (1, 20)]
CASES = list(dict.fromkeys(CASES))
"""Batch size and ids of a bag: first those that say most."""
SMALL_CASES = [(4, 1), (4, 3)]
TURNS, ROUNDS, LARGE_IDS, ROUNDS_OF_LARGE = 5, 20, 4_000_000, 4
"""Turns of all forms and calls in a turn; fewer of batches with many ids."""


def run(run: Run) -> None:
    """Makes the tables once, checks that all forms agree, then notes every batch size and pooling."""
    sizes = (SMALL_TABLES, SMALL_ROWS) if run.is_stand_in else (NUM_TABLES, ROWS)
    case = serving.compressed("tables", [sizes[1]] * sizes[0], is_sorted=False)
    collection = serving.SumOfSquares([sizes[1]] * sizes[0]).tables
    tables = {name: bag.weight.detach() for name, bag in collection.embedding_bags.items()}
    forms: dict[str, nn.Module] = {
        "mixed_dimension": serve(case.scheme, tables, "mixed_dimension", device=run.device),
        **{name: dense_tables(collection, bits, run.device) for name, bits in DENSE.items()},
    }
    batch = batch_of(case, 16, 3, run.device)
    expected = look_up(case.packed, batch.to(torch.device("cpu")))
    forms["packed"] = case.packed.to(run.device)
    torch.testing.assert_close(look_up(forms["packed"], batch).cpu(), expected, rtol=1e-5, atol=1e-5)
    dense_bytes = serving.resident_bytes(forms[BASELINE])
    of = {"tables": sizes[0], "rows": sizes[1], "columns": serving.EMBEDDING_DIM}
    for form, module in forms.items():
        num_bytes = serving.resident_bytes(module)
        run.figures.note("bytes", num_bytes / 1e6, "MB", form=form, **of)
        run.figures.note("bytes of dense_fp32 over these", dense_bytes / num_bytes, form=form, **of)
    for batch_size, pooling in SMALL_CASES if run.is_stand_in else CASES:
        measure(run, case, forms, batch_size, pooling)


def dense_tables(collection: EmbeddingBagCollection, bits: int, device: torch.device) -> QuantEmbeddingBagCollection:
    """All rows, all columns, as FBGEMM's inference kernels hold them."""
    kind = {32: "FP32", 16: "FP16", 8: "INT8", 4: "INT4"}[bits]
    configs = collection.embedding_bag_configs()
    weights = {}
    for name, bag in collection.embedding_bags.items():
        values = bag.weight.detach()
        rows = {32: values, 16: values.half()}.get(bits)
        if rows is None:
            rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(values, bits)
        stored, scales = rows.view(torch.uint8), None
        if bits < 16:
            stored, scales = stored[:, :-4], stored[:, -4:]  # scale and bias, a float16 each
        weights[name] = (stored, scales)
    return QuantEmbeddingBagCollection(
        [replace(config, data_type=DataType[kind]) for config in configs],
        is_weighted=False,
        device=device,
        table_name_to_quantized_weights=weights,
        register_tbes=True,
        row_alignment=1 if device.type == "cpu" else 16,
    )


@torch.inference_mode()
def measure(run: Run, case: serving.Case, forms: Mapping[str, nn.Module], batch_size: int, pooling: int) -> None:
    """Notes the time of a lookup in every form, and beside the dense one in FP32."""
    batch = batch_of(case, batch_size, pooling, run.device)
    rounds = ROUNDS_OF_LARGE if batch.values().numel() > LARGE_IDS else ROUNDS
    turns, rounds = (1, 2) if run.is_stand_in else (TURNS, rounds)
    calls = {form: partial(look_up, module, batch) for form, module in forms.items()}
    medians = in_turns(calls, run.device, turns, rounds)
    for form, median in medians.items():
        of = {"form": form, "batch": batch_size, "pooling": pooling}
        run.figures.note("lookup", 1e3 * median, "us", **of)
        if form != BASELINE:
            run.figures.note("lookup, times dense_fp32", median / medians[BASELINE], **of)
    of = {"batch": batch_size, "pooling": pooling}
    run.figures.note("packed, times dense_int4", medians["packed"] / medians["dense_int4"], **of)


def batch_of(case: serving.Case, batch_size: int, pooling: int, device: torch.device) -> KeyedJaggedTensor:
    """Bags of ids after Zipf's law, drawn where they are looked up."""
    ids: list[Tensor] = []
    for rows in case.rows_by_frequency.values():
        uniform = torch.rand(batch_size * pooling, dtype=torch.float64, device=device)
        ids.append(rows.to(device)[(len(rows) ** uniform).long().sub(1).clamp(0, len(rows) - 1)])
    lengths = torch.full((len(case.keys) * batch_size,), pooling, device=device)
    return KeyedJaggedTensor(keys=case.keys, values=torch.cat(ids), lengths=lengths, stride=batch_size)


def look_up(module: nn.Module, batch: KeyedJaggedTensor) -> Tensor:
    """One lookup of bags that nobody has used before: what a batch remembers of itself is made anew."""
    fresh = KeyedJaggedTensor(batch.keys(), batch.values(), lengths=batch.lengths(), stride=batch.stride())
    return module(fresh).values()
