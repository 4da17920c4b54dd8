"""Tables of which few rows are read, their ids shuffled: bytes a row of the directory, and what each size costs.

    python -m benchmarks.cold_rows [--seed N]

A planted factorization machine: a tenth of 100,000 rows is read, as often as 1 / rank; the columns of trained tables
fall off as some of these do. Where all are worth the same, error grows by 4 for each bit less, whatever is done. The
lines "before" are of a build in which cold rows kept columns, and the directory held every row.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.blocks.routing import directory_bytes

ROWS, SHARE_READ, SAMPLES, BATCH = 100_000, 0.1, 1 << 17, 8192
SIZES, SPREADS = (40, 60, 100, 150, 200), (1.0, 1e-2, 1e-3)
BEFORE = {16: "nothing above 51 times", 64: "3e-08 at 100, .067 at 157, 2.0 at 204"}


class Planted(nn.Module):
    """Dot products of two features of one table."""

    def __init__(self, dim: int, spread: float, generator: torch.Generator) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=dim, feature_names=["f", "g"])
        self.tables = EmbeddingBagCollection(tables=[config])
        weight = torch.randn(ROWS, dim, generator=generator) * spread ** (torch.arange(dim) / dim)
        self.tables.embedding_bags["t"].weight.data = weight

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """A prediction for each sample."""
        del dense_features
        values = self.tables(sparse_features).to_dict()
        return (values["f"] * values["g"]).sum(1)


def batches(model: Planted, generator: torch.Generator) -> list[Batch]:
    """Rows by 1 / rank, those read anywhere in the table."""
    num_read = int(ROWS * SHARE_READ)
    read = torch.randperm(ROWS, generator=generator)[:num_read]
    often = 1 / torch.arange(1, num_read + 1).double()
    drawn = torch.multinomial(often, 2 * SAMPLES - num_read, replacement=True, generator=generator)
    ids = read[torch.cat([torch.arange(num_read), drawn])[torch.randperm(2 * SAMPLES, generator=generator)]]
    result = []
    for part in ids.split(2 * BATCH):
        features = KeyedJaggedTensor(["f", "g"], part, lengths=torch.ones(2 * BATCH, dtype=torch.int64))
        with torch.no_grad():
            truth = model(torch.empty(0), features)
        labels = truth + torch.randn(BATCH, generator=generator) / 10
        result.append(Batch(torch.zeros(BATCH, 1), features, labels))
    return result


def main() -> None:
    """Prints a line for each size of each width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    for dim in (16, 64):
        for spread in SPREADS:
            generator = torch.Generator().manual_seed(seed)
            model = Planted(dim, spread, generator)
            measured = measure_(model, batches(model, generator), loss=nn.MSELoss())
            routing = measured.blocks.routings["t"]
            print(f"D = {dim}, last column {spread:g} of the first; before: {BEFORE[dim]}")
            every = directory_bytes(routing, torch.ones(routing.num_blocks, dtype=torch.bool)) / ROWS
            print("  size  directory (of all rows)  bits a value   loss +  times the last  by bits alone  starved")
            last: tuple[float, float] | None = None
            for size in SIZES:
                found = measured.allocate(compression=size)
                per_row = directory_bytes(routing, found.scheme.tables["t"].retained.any(1)) / ROWS
                loss, bits = found.predicted_loss_increase, 8 * found.num_bytes / (ROWS * SHARE_READ * dim)
                jumps = 16 * " " + 15 * " " if last is None else f"{loss / last[0]:16.1f}{4 ** (last[1] - bits):15.1f}"
                print(
                    f"{found.compression:6.1f}{per_row:11.3f}     ({every:.3f}){bits:14.2f} {loss:8.2e}{jumps}"
                    f"{found.starved_share:9.1%}"
                )
                last = loss, bits


if __name__ == "__main__":
    main()
