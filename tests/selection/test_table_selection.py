"""Whole tables multiplied by alpha: the same numbers as bags split by block, and only where it pays and may be done."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.blocks.blocking import blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts, count_frequencies
from dnis_torchrec.blocks.routing import RowRouter, RowRouting
from dnis_torchrec.data.task import TrainTask
from dnis_torchrec.ops.select import are_compiled
from dnis_torchrec.search.pipeline import BilevelTrainPipeline
from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
from dnis_torchrec.selection.on_shards import (
    ShardSelection,
    _features_of,
    _MultiplyRows,
    _table_selection,
    select_on_shards_,
)
from dnis_torchrec.selection.shards import table_configs
from dnis_torchrec.selection.swap import prepare_
from dnis_torchrec.selection.wrapper import SoftSelectionEmbeddingBagCollection
from dnis_torchrec.training.shard import shard
from tests.distributed.shard_selection_scenarios import MULTIPLIED_TABLES, make_features, make_model
from tests.distributed.shard_selection_scenarios import shard as shard_scenario
from tests.small_models import kernels_of
from tests.tiny import make_recipe

pytestmark = pytest.mark.skipif(not are_compiled(), reason="no C++ compiler, or DNIS_NO_COMPILE")

CPU = torch.device("cpu")


def multiply_tables(model: nn.Module) -> list[bool]:
    """Of every kernel whether it multiplies its tables."""
    forwards = [kernel.forward for kernel in kernels_of(model)]
    return [isinstance(own, ShardSelection) and own._tables is not None for own in forwards]


@given(
    st.lists(st.integers(-1, 2), min_size=1, max_size=40),
    st.sampled_from([1, 3, 8, 37]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
    st.booleans(),
)
def test_every_row_is_multiplied_by_its_alpha(
    rows: list[int], columns: int, dtype: torch.dtype, weights_learn: bool, alpha_learns: bool
) -> None:
    generator = torch.Generator().manual_seed(columns)
    weights, alpha, output_gradient = (
        torch.randn(count, columns, generator=generator, dtype=dtype) for count in (len(rows), 3, len(rows))
    )
    weights.requires_grad_(weights_learn)
    alpha.requires_grad_(alpha_learns)
    learning = [own for own in (weights, alpha) if own.requires_grad]

    def gradients(multiplied: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(multiplied, learning, output_gradient) if learning else ()

    zero_last = torch.cat([alpha, torch.zeros(1, columns, dtype=dtype)])
    expected = weights * zero_last[rows]
    got = _MultiplyRows.apply(weights, alpha, torch.tensor(rows, dtype=torch.int32).unsqueeze(1))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(got), gradients(expected))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("multiplied tables, rows, kernel_per_table", [True, True, True]),
        ("multiplied tables, data_parallel, kernel_per_table", [True, True, True]),
        ("multiplied tables of two dims", [False]),
        ("whole features, kernel_per_table", None),
    ],
)
def test_kernels_that_may_multiply_do(gloo: dist.ProcessGroup, kind: str, expected: list[bool] | None) -> None:
    """All tables of a kernel want the same columns, and no optimizer that is fused."""
    found = multiply_tables(select_on_shards_(shard_scenario(make_model(False), kind, gloo)))
    assert found == (expected if expected is not None else [False] * len(found))


def test_shards_are_multiplied_by_their_own_rows_and_columns() -> None:
    """The last columns, and rows from the fourth on, of two tables, each with rows of alpha of its own."""
    columns, shards = slice(8, 16), {"x": slice(3, 8), "y": slice(3, 10)}
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows.stop, embedding_dim=16, feature_names=[f"f_{name}"])
        for name, rows in shards.items()
    ]
    generator = torch.Generator().manual_seed(0)
    counts = {table.name: torch.randint(0, 4, (table.num_embeddings,), generator=generator) for table in configs}
    lengths = {f"f_{name}": 3 for name in shards}
    blocks = blocks_from_counts(FrequencyCounts(counts, lengths, 30), configs, num_blocks=2)
    wrapper = SoftSelectionEmbeddingBagCollection(EmbeddingBagCollection(tables=configs), blocks)
    alpha = wrapper.alpha.of(16).uniform_(generator=generator)
    kernel = dense_kernel(configs, shards, columns)
    routings = dict(blocks.routings) | {"x": RowRouting.from_map(torch.tensor([0, 1, 0, 1, 0, 1, 0, 2]), 2)}
    routers = {name: RowRouter(routing) for name, routing in routings.items()}
    features = _features_of(
        kernel.config.embedding_tables, {output.table: [output] for output in wrapper.outputs}, routers
    )
    bags = KeyedJaggedTensor(
        keys=list(lengths), values=torch.tensor([0, 4, 2, 6, 6, 1, 3]), lengths=torch.tensor([1, 0, 2, 3, 1, 0])
    )

    pooled = ShardSelection(kernel.forward, features, wrapper.alpha, 1, _table_selection(kernel, features))
    expected, expected_hits = torch.zeros(3, 2, 8), torch.zeros(len(alpha), dtype=torch.bool)
    seen: set[int] = set()  # block 2 is none
    for place, (name, rows) in enumerate(shards.items()):
        for sample, bag in enumerate(bags[f"f_{name}"].to_dense()):
            for row in (bag + rows.start).tolist():
                block = int(routings[name].block_of(torch.tensor(row)))
                seen.add(block)
                if block < 2:
                    own = blocks.first_alpha_row(name) + block
                    weight = kernel.split_embedding_weights()[place][row - rows.start]
                    expected[sample, place] += alpha[own, columns] * weight
                    expected_hits[own] = True
    torch.testing.assert_close(pooled(bags), expected.view(3, 16))
    with wrapper.alpha.upper_level() as hits:
        pooled(bags)
    assert torch.equal(hits[16], expected_hits)
    assert seen == {0, 1, 2}


def dense_kernel(configs: list[EmbeddingBagConfig], rows: dict[str, slice], columns: slice) -> BatchedDenseEmbeddingBag:
    """A kernel as TorchRec makes it of shards."""
    tables = []
    for table in configs:
        own = rows[table.name]
        sizes = [own.stop - own.start, columns.stop - columns.start]
        metadata = ShardMetadata(shard_offsets=[own.start, columns.start], shard_sizes=sizes, placement="rank:0/cpu")
        tables.append(
            ShardedEmbeddingTable(
                **vars(table),
                embedding_names=table.feature_names,
                local_rows=sizes[0],
                local_cols=sizes[1],
                compute_kernel=EmbeddingComputeKernel.DENSE,
                local_metadata=metadata,
            )
        )
    config = GroupedEmbeddingConfig(
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        is_weighted=False,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.DENSE,
        embedding_tables=tables,
    )
    return BatchedDenseEmbeddingBag(config, device=CPU)


@pytest.mark.parametrize("kind", MULTIPLIED_TABLES)
def test_the_kernels_own_weights_come_back(gloo: dist.ProcessGroup, kind: str) -> None:
    """Also after a lookup that failed."""
    model = select_on_shards_(shard_scenario(make_model(False), kind, gloo))
    before = [kernel.emb_module.weights for kernel in kernels_of(model)]
    values = [weights.detach().clone() for weights in before]
    features, wrapper = make_features(0, False), model.module["ebc"]
    with wrapper.alpha.upper_level():
        wrapper(features).values().sum().backward()
    with torch.inference_mode():
        wrapper(features)
    for kernel in kernels_of(model):
        kernel.emb_module.pooling_mode = None
    with pytest.raises(Exception, match=r"pooling_mode|NoneType|argument"):
        wrapper(features)
    for kernel, own, value in zip(kernels_of(model), before, values, strict=True):
        assert kernel.emb_module.weights is own
        assert torch.equal(own, value)
        assert own.grad is None


@pytest.mark.parametrize(
    ("optimizer", "batch_size", "replicated", "expected"),
    [
        ("adam", 10_000, False, True),
        ("adam", 1, False, False),
        ("adam", None, False, False),
        ("adam", 10_000, True, False),
        ("rowwise_adagrad", 10_000, False, False),
    ],
)
def test_small_tables_are_multiplied(
    gloo: dist.ProcessGroup, optimizer: str, batch_size: int | None, replicated: bool, expected: bool
) -> None:
    """Small beside a batch; a fused optimizer would step the multiplied ones."""
    recipe = make_recipe(optimizer=optimizer)
    tables = table_configs(recipe.model)
    counts = count_frequencies([batch.sparse_features for batch in recipe.data.train], tables)
    task = TrainTask(prepare_(recipe.model, blocks_from_counts(counts, tables, num_blocks=2)), recipe.loss)
    model, _ = shard(task, recipe, CPU, replicated=replicated, batch_size=batch_size)
    if not isinstance(kernels_of(model)[0].forward, ShardSelection):
        select_on_shards_(model)
    assert multiply_tables(model) == [expected] * len(kernels_of(model))


def test_training_finds_the_same_either_way(gloo: dist.ProcessGroup) -> None:
    """Tables beside batches in which they are large, and in which they are small."""
    losses, alphas = [], []
    for batch_size in (1, 10_000):
        recipe = make_recipe()
        tables = table_configs(recipe.model)
        counts = count_frequencies([batch.sparse_features for batch in recipe.data.train], tables)
        task = TrainTask(prepare_(recipe.model, blocks_from_counts(counts, tables, num_blocks=2)), recipe.loss)
        model, optimizer = shard(task, recipe, CPU, batch_size=batch_size)
        pipeline = BilevelTrainPipeline(model.train(), optimizer, CPU, alpha_averaging=0.9)
        pipeline.alpha_optimizer.learning_rate = 0.05
        pipeline.alpha_optimizer.retain_({8: torch.arange(8).expand_as(pipeline.alpha.of(8)) < 5})
        stream = BilevelStream(recipe.data.train, recipe.data.validation, LevelSchedule(warm_up_steps=5))
        losses.append(torch.stack([pipeline.progress(stream)[0].detach() for _ in range(40)]))
        alphas.append(pipeline.alpha.of(8).clone())
    assert bool((alphas[0] == 0).any())
    torch.testing.assert_close(alphas[1], alphas[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(losses[1], losses[0], atol=1e-4, rtol=0)
