"""Rivals: what each serves takes the bytes it says, and is what its method promises."""

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.rivals import __main__ as runner
from benchmarks.rivals import cce, cells, gains, mde, mpe, pep, rows, shared_rows, single_values, task
from benchmarks.rivals import product_quantisation as pq
from benchmarks.rivals.methods import METHODS, Method
from benchmarks.rivals.mixed import Blocks, zero_dropped_
from benchmarks.rivals.task import Recipes, Served, Task, UnmetError, shards_of
from tests.tiny import EMBEDDING_DIM, ROWS, make_recipe

DENSE_BYTES = 4 * EMBEDDING_DIM * sum(ROWS.values())


def make_task(size: float = 3.0, kind: str = "dlrm", **fields: object) -> Task:
    """A cell of the tiny recipe, of two short epochs."""
    build = Recipes(lambda dim: make_recipe(kind, embedding_dim=dim))
    rules = {"max_epochs": 2, "patience": 1, "trials": 2} | fields
    return Task(build=build, size=size, **rules)


def tables_of(model: nn.Module) -> dict[str, Tensor]:
    return {shard.table: shard.weight for shard in shards_of(model)}


def collection_of(model: nn.Module) -> EmbeddingBagCollection:
    (collection,) = (module for module in model.modules() if isinstance(module, EmbeddingBagCollection))
    return collection


def stored_bytes(served: Served, method: Method, precision: str) -> int:
    """Bytes of what a served model holds, counted from its own tensors and not from a formula."""
    model = served.model
    if method is METHODS["mpe"]:
        return mpe_bytes(model, torch.tensor(served.settings["widths"]))
    packed = [module for module in model.modules() if type(module).__name__ == "PackedEmbeddingBagCollection"]
    total = sum(module.table_bytes() for module in packed)
    for module in model.modules():
        if isinstance(module, shared_rows.ShortTables):
            for name, rows_of in module.share_rows.rows_of.items():
                if isinstance(rows_of, pq.Pointers) and name.endswith("_0"):  # those of a helper are a hash
                    bits = (module.tables.embedding_bags[name].num_embeddings - 1).bit_length()
                    total += -(-len(rows_of.pointers) * bits // 8)
    total += sum(p.nbytes for name, p in model.named_parameters() if ".matrices." in name)
    for weight in tables_of(model).values():
        if not any(isinstance(module, shared_rows.ShortTables) for module in model.modules()):
            weight = weight[:, : int(weight.abs().sum(0).count_nonzero())].contiguous()
        if method.precisions == single_values.VALUE_PRECISIONS:
            total += sum(part.nbytes for part in single_values.encode(weight, precision).values())
        elif precision == "fp32":
            total += weight.nbytes
        else:
            bits = rows.BITS[precision]
            missing = -weight.shape[1] % (16 // bits)
            weight = torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1)
            total += torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, bits).nbytes
    return total


def mpe_bytes(model: nn.Module, width_of_group: Tensor) -> int:
    """The same, where rows have a bit width by their group."""
    total, groups = 0, mpe.Groups.of(make_task())
    for name, weight in tables_of(model).items():
        widths = width_of_group[groups.group_of[name]]
        total += mpe.directory(widths).nbytes + 4 * (6 + EMBEDDING_DIM)
        for width in widths.unique().tolist():
            rows_of_width = weight[widths == width]
            total += len(rows_of_width) * -(-width * EMBEDDING_DIM // 8)
            assert all(len(column.unique()) <= 1 << width for column in rows_of_width.T)
            assert width or not rows_of_width.any()
    return total


CASES = [
    (name, method.precisions[-1], 1.6 if name == "mde" else 2.2)
    for name, method in METHODS.items()
    if name not in ("no-embeddings", "dnis-unrolled")
]


@pytest.mark.parametrize(("name", "precision", "size"), CASES)
def test_bytes_are_those_of_what_is_served_and_within_the_size(gloo, name: str, precision: str, size: float) -> None:
    method, cell = METHODS[name], make_task(size, precision=precision)
    served = method.run(cell)
    assert served.num_bytes == stored_bytes(served, method, precision)
    if method.has_size:
        assert served.num_bytes <= cell.num_bytes
    batch = next(iter(cell.build(None).data.test))
    predictions = served.model.eval()(batch.dense_features, batch.sparse_features)
    assert bool(predictions.isfinite().all())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("bits", "precision"), [(8, "int8"), (4, "int4")])
def test_rows_are_those_of_torchrecs_own_inference_tables(bits: int, precision: str) -> None:
    torch.manual_seed(0)
    table = EmbeddingBagConfig(name="t", num_embeddings=30, embedding_dim=8, feature_names=["f"])
    model = nn.ModuleList([EmbeddingBagCollection([table])])
    features = KeyedJaggedTensor(["f"], torch.arange(30), lengths=torch.ones(30, dtype=torch.int64))
    kinds = {8: torch.qint8, 4: torch.quint4x2}
    theirs = nn.ModuleList([EmbeddingBagCollection([table])])
    theirs.load_state_dict(model.state_dict())
    quantize_embeddings(theirs, kinds[bits], inplace=True)
    rows.round_rows_(model, precision)
    expected = theirs[0](features).values().float()
    torch.testing.assert_close(model[0](features).values(), expected, atol=1e-3, rtol=0)


def test_a_smaller_d_is_the_largest_of_the_size_and_its_tail_is_zero(gloo) -> None:
    cell = make_task(1.5)
    assert rows.largest_dim(cell) == 5  # 8 / 1.5, and any number of float32 columns
    served = rows.uniform_at(cell, 5)  # trained as the first columns of D = 8
    for weight in tables_of(served.model).values():
        assert not weight[:, 5:].any()
        assert weight[:, :5].all()
    assert served.num_bytes == DENSE_BYTES * 5 // 8


def naive_pooled(collection: EmbeddingBagCollection, features: KeyedJaggedTensor, row) -> Tensor:
    """Bags added up id by id; `row`: (table, id) -> vector."""
    parts = []
    for table in collection.embedding_bag_configs():
        for feature in table.feature_names:
            bags, results = features[feature], []
            for values in torch.split(bags.values(), bags.lengths().tolist()):
                total = sum((row(table.name, int(i)) for i in values), torch.zeros(table.embedding_dim))
                mean = table.pooling == PoolingType.MEAN and len(values)
                results.append(total / len(values) if mean else total)
            parts.append(torch.stack(results))
    return torch.cat(parts, dim=1)


def naive_short(module: shared_rows.ShortTables, combine) -> Callable[[str, int], Tensor]:
    """(table, id) -> its vector, part by part of the columns and short table by short table."""
    rows_of, bags = module.share_rows.rows_of, module.tables.embedding_bags

    def row(table: str, index: int) -> Tensor:
        parts: dict[str, Tensor] = {}
        for name, (config, _) in module.short.items():
            if config.name == table:
                part, vector = (
                    name[: name.rindex("_")],
                    bags[name].weight.detach()[int(rows_of[name](torch.tensor(index)))],
                )
                parts[part] = combine(parts[part], vector) if part in parts else vector
        return torch.cat(list(parts.values()))

    return row


def test_qr_multiplies_pooled_remainders_by_pooled_quotients_and_begins_as_hash(gloo) -> None:
    recipe = make_recipe()
    weights = tables_of(recipe.model)
    parts = {n: shared_rows.partition(weights[n], *r) for n, r in {"user": (8, 5), "genre": (12, 0)}.items()}
    module = shared_rows.ShortTables(collection_of(recipe.model), parts, torch.mul)
    quotients = module.tables.embedding_bags[shared_rows.short_name("user", 0, 1)].weight
    assert bool((quotients == 1).all())
    assert quotients.shape == (5, EMBEDDING_DIM)
    torch.nn.init.normal_(quotients)
    features = next(iter(recipe.data.train)).sparse_features
    ids = features["user"].values()
    expected = weights["user"][ids % 8] * quotients[ids // 8]
    torch.testing.assert_close(module(features)["user"], expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_cce_adds_up_clusters_and_helpers_and_keeps_what_few_vectors_say(gloo, parts: int) -> None:
    generator, recipe = torch.Generator().manual_seed(0), make_recipe()
    plain, weights = collection_of(recipe.model), tables_of(recipe.model)
    short = {name: cce.hashed(weight, parts, 7, generator) for name, weight in weights.items()}
    module = shared_rows.ShortTables(plain, short, torch.add)
    for bag in module.tables.embedding_bags.values():
        torch.nn.init.normal_(bag.weight, generator=generator)
    features = next(iter(recipe.data.train)).sparse_features
    expected = naive_pooled(plain, features, naive_short(module, torch.add))
    torch.testing.assert_close(module(features).values(), expected)
    for name in module.tables.embedding_bags:
        if name.startswith("user"):  # 7 clusters hold 7 helpers' rows where all ids point at one row of clusters
            module.share_rows.rows_of[name].pointers.fmod_(1 if name.endswith("_0") else 7)
    expected = module(features).values()
    cce.cluster_(module, {name: torch.ones(rows) for name, rows in ROWS.items()}, generator)
    torch.testing.assert_close(module(features).values(), expected)
    helpers = [bag.weight for name, bag in module.tables.embedding_bags.items() if name.endswith("_1")]
    assert len(helpers) == parts  # genre has no more rows than what would take its place
    assert not any(bool(helper.any()) for helper in helpers)
    assert shared_rows.short_bytes(short, "fp32") == sum(
        cce._bytes(table, parts, 7, "fp32") for table in plain.embedding_bag_configs()
    )


@pytest.mark.parametrize("method", ["hash", "compress", "pq", "uniform"])
def test_a_served_model_takes_gains(gloo, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def solve(cell: Task, model: nn.Module, wrappers) -> None:
        assert next(iter(gains.held_out(cell))) is not None
        for wrapper in wrappers:
            for factor in wrapper.factors.values():
                factor.data.fill_(0.5)

    monkeypatch.setattr(gains, "_solve_", solve)
    cell = make_task(1.5)
    served = METHODS[method].run(cell)
    recipe = cell.build(None)
    (fqn,) = (name for name, own in recipe.model.named_modules() if isinstance(own, EmbeddingBagCollection))
    features = next(iter(recipe.data.test)).sparse_features
    old = served.model.get_submodule(fqn)(features).values()
    other = gains.with_gains(cell, served)
    torch.testing.assert_close(other.model.get_submodule(fqn)(features).values(), 0.5 * old)
    assert other.num_bytes == served.num_bytes
    assert set(other.settings["gains"]) == set(ROWS)


def test_projected_tables_multiply_each_row_by_the_projection_of_its_block(gloo) -> None:
    torch.manual_seed(0)
    cell = make_task()
    blocks, recipe = Blocks.of(cell), cell.build(None)
    dims = {n: torch.arange(r.num_blocks, 0, -1).clamp(max=EMBEDDING_DIM) for n, r in blocks.routings.items()}
    plan = mde.Dims(EMBEDDING_DIM, dims, dict.fromkeys(ROWS, EMBEDDING_DIM))
    masks = blocks.masks(dims, plan.widths)
    mde.project_(recipe.model, plan, blocks.routings, blocks.rows)
    zero_dropped_(recipe.model, blocks.routings, masks)
    module = next(m for m in recipe.model.modules() if isinstance(m, mde.ProjectedTables))
    weights = {n: bag.weight.detach() for n, bag in module.tables.embedding_bags.items()}

    def row(table: str, index: int) -> Tensor:
        block, routing = int(blocks.routings[table].all_blocks()[index]), blocks.routings[table]
        vector, name = weights[table][index], plan.names(table)[min(block, routing.num_blocks - 1)]
        if block == routing.num_blocks or name not in module.project.matrices:
            return vector
        matrix = module.project.matrices[name].detach()
        return vector[: len(matrix)] @ matrix

    features = next(iter(recipe.data.test)).sparse_features
    torch.testing.assert_close(module(features).values(), naive_pooled(module, features, row), atol=1e-5, rtol=1e-5)


@given(
    num_rows=st.integers(1, 150),
    dim=st.sampled_from([1, 7, 300]),
    share=st.floats(0, 1),
    precision=st.sampled_from(single_values.VALUE_PRECISIONS),
)
def test_sparse_rows_hold_every_value_and_nothing_else(num_rows, dim, share, precision) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_rows, dim, generator=generator)
    weight[torch.rand(num_rows, dim, generator=generator) >= share] = 0
    parts = single_values.encode(weight, precision)
    decoded = single_values.decode(parts, weight.shape)
    error = {"fp32": 0.0, "fp16": 4e-3, "int8": 2e-2}[precision]
    assert float((decoded - weight).abs().max()) <= error
    assert not decoded[weight == 0].any()
    table = EmbeddingBagConfig(name="t", num_embeddings=num_rows, embedding_dim=dim, feature_names=["f"])
    column = 1 if dim <= 255 else 2
    values = int((weight != 0).sum()) * (single_values.VALUE_BYTES[precision] + column)
    assert sum(part.nbytes for part in parts.values()) == values + single_values.index_bytes(table, precision)
    starts = (weight != 0).sum(1).cumsum(0) - (weight != 0).sum(1)
    assert parts["starts"].tolist() == starts[:: single_values.ROWS_PER_START].tolist()


def test_pep_moves_values_and_thresholds_by_the_gradients_of_what_the_model_reads() -> None:
    values = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    thresholds = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(5, 4, dtype=torch.float64)
    (pep.soft_threshold(values, thresholds) * factor).sum().backward()
    value, threshold = pep.threshold_gradients(values.detach(), thresholds.detach(), factor)
    # PEP passes dead values no gradient either; sign has none
    torch.testing.assert_close(value, values.grad)
    torch.testing.assert_close(threshold, thresholds.grad)


@pytest.mark.parametrize("name", ["hash", "magnitude", "compress"])
def test_a_size_out_of_reach_is_said(gloo, name: str) -> None:
    precision = METHODS[name].precisions[0]
    with pytest.raises(UnmetError):
        METHODS[name].run(make_task(5000.0, precision=precision, cache=None))


def test_the_plain_model_is_trained_once(gloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = make_task(cache=tmp_path / "seed0.safetensors")
    first, best = task.plain(cell)
    monkeypatch.setattr(task, "train", lambda *_: pytest.fail("its weights lie there"))
    again, epoch = task.plain(cell)
    assert epoch == best
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))


def test_cells_are_lines_and_run_once(tmp_path, monkeypatch, capsys) -> None:
    forks = multiprocessing.get_context("forkserver")  # the tests' server has imported everything
    monkeypatch.setattr(runner.multiprocessing, "get_context", lambda _: forks)
    out = tmp_path / "rows.jsonl"
    argv = ["tests.tiny:demo", "--sizes", "3,5000", "--methods", "uniform", "--seeds", "0", "--max-epochs", "1"]
    argv += ["--ids", "shuffled", "--embedding-dim", "8", "--out", str(out)]
    assert runner.main(argv) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["method"], line["size"]) for line in lines] == [
        ("dense", None),
        ("uniform", 3.0),
        ("uniform", 5000.0),
    ]
    assert lines[0]["bytes"] == DENSE_BYTES
    assert lines[1]["bytes"] <= DENSE_BYTES / 3
    assert lines[1]["precision"] in rows.ROW_PRECISIONS
    assert lines[0].keys() == lines[1].keys()
    assert {(line["ids"], line["embedding_dim"]) for line in lines} == {("shuffled", 8)}
    assert "no D in fp32" in lines[2]["reason"]
    text = out.read_text()
    out.write_text(text + '{"recipe": "tests.ti')  # a line that was cut short
    assert runner.main(argv) == 0
    assert out.read_text() == text
    assert "uniform" in capsys.readouterr().out


def test_rows_on_validation_and_with_gains_come_second_and_never_to_methods_that_learn_there() -> None:
    argv = ["m:f", "--train-on", "validation", "--gains", "--sizes", "3", "--seeds", "0", "--out", "x.jsonl"]
    ways: dict[str, list[tuple[bool, bool]]] = {}
    for cell in runner.cells_of(runner.parse(argv)):
        ways.setdefault(cell.method, []).append((cell.with_validation, cell.gains))
    every = [(False, False), (False, True), (True, False), (True, True)]
    assert ways == {name: every[:1] if method.learns else every for name, method in METHODS.items()}


def test_tables_to_leave_alone_are_left_or_refused(gloo, tmp_path: Path) -> None:
    recipe = replace(make_recipe(), leave_alone=("genre",))
    build = Recipes(lambda dim: recipe)
    for name in ("int8-rows", "compress"):
        served = METHODS[name].run(Task(build=build, size=1.5, precision="int8", max_epochs=1))
        assert served.num_bytes >= 4 * EMBEDDING_DIM * ROWS["genre"]
    cell = cells.Cell(
        recipe="r", data=None, method="uniform", size=2.0, seed=0, rules={}, precisions=("fp32",), weights=tmp_path
    )
    with pytest.raises(UnmetError, match="cannot be left alone"):
        cells.measure(cell, Task(build=build, size=2.0))
