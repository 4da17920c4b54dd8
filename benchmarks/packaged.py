"""Is a packaged model with pruned tables faster than the plain one? AOTInductor DLRM against the eager dense fp32 DLRM.

    python -m benchmarks.packaged [--quick] [--artifact ARTIFACT --data DIR] --json FILE

Model shapes of `examples.criteo:dlrm`: 26 tables, D = 64, layers 512-256. Without --artifact the tables are made up:
about as many rows as those of the Criteo sample, fewer columns the rarer the rows. All models take turns in one
process, so a ratio hardly depends on what else the machine does; times are of the process's own CPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.files import output_file
from dnis_torchrec.artifact.load import exact_rows, load, read_scheme
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.artifact.package import FlatModel, Signature, load_package, write_package
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.files import write_json
from dnis_torchrec.data.recipe import build_recipe_again
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

COLLECTION = "sparse_arch.embedding_bag_collection"
NUM_EMBEDDINGS = (
    *(1_000, 540, 33_000, 29_000, 210, 14, 9_300, 430, 3, 18_000, 4_000, 32_000, 3_000),
    *(26, 7_600, 31_000, 10, 3_200, 1_400, 4, 32_000, 13, 15, 14_000, 60, 11_000),
)
"""Rows of the 26 tables, roughly the categories of each field in a sample of 137,139 lines."""
EMBEDDING_DIM, NUM_DENSE = 64, 13
DIMS_OF_BLOCKS = (20, 10, 6, 4, 3, 2)
BATCH_SIZES = (1, 64, 1024, 4096)
FORMS = ("packed",)

Models = dict[str, Callable[..., Tensor]]
"""Name -> model of flat inputs."""


def made_up(num_embeddings: Sequence[int] = NUM_EMBEDDINGS, embedding_dim: int = EMBEDDING_DIM) -> DLRM:
    """A dense DLRM whose tables are pruned; `scheme_of` says how."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=embedding_dim, feature_names=[f"cat_{i}"])
        for i, rows in enumerate(num_embeddings)
    ]
    collection = EmbeddingBagCollection(tables=tables)
    model = DLRM(collection, NUM_DENSE, [512, 256, embedding_dim], [512, 256, 1])
    for name, table in scheme_of(collection).tables.items():
        kept = torch.cat([table.retained, torch.zeros(1, embedding_dim, dtype=torch.bool)])
        with torch.no_grad():
            collection.embedding_bags[name].weight.mul_(kept[table.routing.all_blocks()])
    return model.eval()


def scheme_of(collection: EmbeddingBagCollection) -> MixedDimensionScheme:
    """Six blocks of equal row counts per table, with `DIMS_OF_BLOCKS` columns that more frequent blocks have too."""
    schemes = {}
    for config in collection.embedding_bag_configs():
        rows, dim = config.num_embeddings, config.embedding_dim
        cuts = torch.linspace(0, rows, len(DIMS_OF_BLOCKS) + 1).round().long()
        order = torch.randperm(dim, generator=torch.Generator().manual_seed(rows))
        retained = torch.zeros(len(DIMS_OF_BLOCKS), dim, dtype=torch.bool)
        for block, number in enumerate(DIMS_OF_BLOCKS):
            retained[block, order[:number]] = True
        schemes[config.name] = TableScheme(
            name=config.name,
            collection=COLLECTION,
            num_embeddings=rows,
            embedding_dim=dim,
            pooling="sum",
            feature_names=tuple(config.feature_names),
            is_weighted=False,
            routing=RowRouting(rows, len(DIMS_OF_BLOCKS), boundaries=cuts),
            retained=retained,
            num_retained=int((cuts.diff() * retained.sum(dim=1)).sum()),
        )
    return MixedDimensionScheme(schemes)


def make_batch(scheme: MixedDimensionScheme, batch_size: int) -> Batch:
    """One id a bag; a row's chance falls as one over its number."""
    generator = torch.Generator().manual_seed(batch_size)
    rows = {feature: table.num_embeddings for table in scheme.tables.values() for feature in table.feature_names}
    powers = torch.rand(len(rows), batch_size, generator=generator)
    draws = [(n**power).long().clamp(max=n - 1) for n, power in zip(rows.values(), powers, strict=True)]
    features = KeyedJaggedTensor(
        keys=list(rows), values=torch.cat(draws), lengths=torch.ones(batch_size * len(rows), dtype=torch.int32)
    )
    dense = torch.randn(batch_size, NUM_DENSE, generator=generator)
    return Batch(dense_features=dense, sparse_features=features, labels=torch.zeros(batch_size))


def serving(dense: nn.Module, artifact: Path, form: str) -> nn.Module:
    """The model with its collection replaced; dense weights are shared."""
    collection = dense.get_submodule(COLLECTION)
    model = copy.deepcopy(dense, {id(collection): load(artifact, form=form, collection=COLLECTION)})
    return model.eval()


@torch.inference_mode()
def measure(models: Models, inputs: tuple[Tensor, ...], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every model in every round."""
    expected = models["eager_dense_fp32"](*inputs)
    for name, model in models.items():
        tolerance = 5e-2 if "int8" in name else 1e-4
        torch.testing.assert_close(model(*inputs), expected, rtol=tolerance, atol=tolerance)
    times: dict[str, list[float]] = {name: [] for name in models}
    for round_number in range(rounds + 3):
        for name, model in models.items():
            started = time.process_time()
            model(*inputs)
            if round_number >= 3:
                times[name].append(time.process_time() - started)
    return times


def rows_of(models: Models, scheme: MixedDimensionScheme, rounds: int) -> list[dict[str, Any]]:
    """A row per model and batch size."""
    rows = []
    for batch_size in BATCH_SIZES:
        batch = make_batch(scheme, batch_size)
        times = measure(models, Signature.of_batch(batch).flatten(batch), max(9, rounds // (1 + batch_size // 1024)))
        dense = times["eager_dense_fp32"]
        for name, seconds in times.items():
            ratios = [a / b for a, b in zip(seconds, dense, strict=True)]
            row = {
                "model": name,
                "batch": batch_size,
                "latency_ratio": round(statistics.median(ratios), 3),
                "times_faster": round(1 / statistics.median(ratios), 2),
                "cpu_ms": round(1000 * statistics.median(seconds), 3),
                "rounds": len(seconds),
            }
            print(f"{name:>24} {batch_size:>5} {row['cpu_ms']:>9.3f} ms {row['latency_ratio']:>6.3f}", flush=True)
            rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Packages, measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="form csr_fp32 alone, 30 rounds, not 200")
    parser.add_argument("--artifact", type=Path, help="an artifact of examples.criteo:dlrm instead of made-up tables")
    parser.add_argument("--data", type=Path, help="folder of its data")
    parser.add_argument("--json", type=output_file, help="file to write")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    forms, rounds = (FORMS[:1], 30) if arguments.quick else (FORMS, 200)
    with tempfile.TemporaryDirectory() as folder:
        dense, artifact = prepare(arguments.artifact, arguments.data, Path(folder), forms)
        scheme = read_scheme(artifact)
        signature = Signature.of_batch(make_batch(scheme, 2))
        models: Models = {"eager_dense_fp32": FlatModel(dense, signature)}
        for form in forms:
            model = serving(dense, artifact, form)
            out = write_package(model, make_batch(scheme, 64), Path(folder) / form)
            models |= {f"eager_{form}": FlatModel(model, signature), f"aoti_{form}": load_package(out)}
        rows = rows_of(models, scheme, rounds)
    if arguments.json:
        fields = {"torch": str(torch.__version__), "tables": len(scheme.tables), "rows": rows}
        write_json(arguments.json, fields)


def prepare(artifact: Path | None, data: Path | None, folder: Path, forms: Sequence[str]) -> tuple[nn.Module, Path]:
    """The dense model with pruned tables in it, and their artifact."""
    if artifact is None:
        model = made_up()
        collection = model.get_submodule(COLLECTION)
        tables = {name: bag.weight.detach() for name, bag in collection.embedding_bags.items()}
        return model, write_artifact(tables, scheme_of(collection), folder / "artifact", forms=forms)
    run = read_manifest(artifact)["run"]
    model = build_recipe_again(run["recipe"], data, run).model
    collection = model.get_submodule(COLLECTION)
    rows = exact_rows(artifact)
    for name, bag in collection.embedding_bags.items():
        with torch.no_grad():
            bag.weight.copy_(rows[name](0, len(bag.weight)))
    return model.eval(), artifact


if __name__ == "__main__":
    main()
