"""Gains of a model on the device, solved on held-out samples, beside an epoch of plain training."""

from unittest.mock import patch

from benchmarks import compress_time
from benchmarks.gpu.step import Run
from dnis_torchrec.training.shard import process_group
from examples import synthetic

SAMPLES, BATCH_SIZE, EPOCHS = 1 << 20, 16_384, 10


def run(run: Run) -> None:
    """Notes seconds of an epoch and of gains at each size, and the ratio."""
    samples, size, epochs = (1500, 256, 1) if run.is_stand_in else (SAMPLES, BATCH_SIZE, EPOCHS)
    with patch.multiple(synthetic, NUM_SAMPLES=samples, BATCH_SIZE=size), process_group() as device:
        (line,) = compress_time.measure("examples.synthetic:demo", None, [1], epochs, device)
    epoch, of = line["epoch_seconds"], {"samples": samples, "batch": size}
    run.figures.note("epoch", epoch, "s", **of)
    for compression, in_epochs in zip(compress_time.SIZES, line["gains_in_epochs"], strict=True):
        run.figures.note("gains", in_epochs * epoch, "s", compression=compression, **of)
        run.figures.note("gains, in epochs", in_epochs, compression=compression, **of)
    run.figures.note("compress, all sizes, in epochs", line["compress_in_epochs"], **of)
