"""Rivals: what each serves takes the bytes it says, and is what its method promises."""

from __future__ import annotations

import json
import multiprocessing
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
from benchmarks.rivals import cells, mde, nis, pep, random_search, rows, shared_rows, single_values, task
from benchmarks.rivals.methods import METHODS, Method
from benchmarks.rivals.mixed import Blocks, mixed_scheme, put_in_place, uncompressed_scheme, zero_dropped_
from benchmarks.rivals.task import Recipes, Served, Task, UnmetError, best_of, shards_of
from tests.tiny import EMBEDDING_DIM, ROWS, make_recipe

DENSE_BYTES = 4 * EMBEDDING_DIM * sum(ROWS.values())
CPU = torch.device("cpu")


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


def packed_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == "PackedEmbeddingBagCollection"]


def stored_bytes(model: nn.Module, method: Method, precision: str) -> int:
    """Bytes of what a served model holds, counted from its own tensors and not from a formula."""
    total = sum(module.table_bytes() for module in packed_of(model))
    total += sum(p.nbytes for name, p in model.named_parameters() if ".matrices." in name)
    for weight in tables_of(model).values():
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


CASES = [
    (name, precision, 1.6 if name == "mde" else 2.2)
    for name, method in METHODS.items()
    for precision in method.precisions
    if name not in ("no-embeddings", "dnis-unrolled") and (name, precision) != ("uniform-grid", "fp32")
]


@pytest.mark.parametrize(("name", "precision", "size"), CASES)
def test_bytes_are_those_of_what_is_served_and_within_the_size(gloo, name: str, precision: str, size: float) -> None:
    method, cell = METHODS[name], make_task(size, precision=precision)
    served = method.run(cell)
    assert served.num_bytes == stored_bytes(served.model, method, precision)
    if method.has_size:
        assert served.num_bytes <= cell.num_bytes
    batch = next(iter(cell.build(None).data.test))
    predictions = served.model.eval()(batch.dense_features, batch.sparse_features)
    assert bool(predictions.isfinite().all())
    if precision == method.precisions[0]:
        twice = method.run(replace(cell, device=CPU)).model.eval()(batch.dense_features, batch.sparse_features)
        assert torch.equal(predictions, twice)


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


def test_the_first_axes_hold_most_and_training_on_is_taken_where_it_helps(gloo) -> None:
    cell = make_task(2.0, max_epochs=3)
    cut, trained = rows.cut_axes(cell), rows.low_rank(cell)
    losses = [task.loss_on_selection(cell, served.model) for served in (cut, trained)]
    assert losses[1] <= losses[0]
    whole = rows.dense(cell)
    spread = {n: float(w.square().sum()) for n, w in tables_of(whole.model).items()}
    for name, weight in tables_of(cut.model).items():
        assert float(weight.square().sum()) > 0.5 * spread[name]


def test_a_model_that_may_not_be_turned_has_no_axes_to_cut(gloo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "rotation_groups", lambda model: [])
    for method in (rows.cut_axes, rows.low_rank):
        with pytest.raises(UnmetError, match="may not be turned"):
            method(make_task(2.0))


# --- several ids of one row -------------------------------------------------------------------------


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


def test_hash_reads_the_row_of_the_remainder(gloo) -> None:
    recipe = make_recipe()
    plain = collection_of(recipe.model)
    module = shared_rows.ShortTables(plain, {"user": (7, 0), "genre": (12, 0)})
    features = next(iter(recipe.data.train)).sparse_features
    weights = {name: bag.weight.detach() for name, bag in module.tables.embedding_bags.items()}
    expected = naive_pooled(plain, features, lambda t, i: weights[t][i % len(weights[t])])
    torch.testing.assert_close(module(features).values(), expected)


def test_qr_multiplies_pooled_remainders_by_pooled_quotients_and_begins_as_hash(gloo) -> None:
    recipe = make_recipe()
    plain = collection_of(recipe.model)
    rows_of = {"user": (8, 5), "genre": (12, 0)}
    module = shared_rows.ShortTables(plain, rows_of)
    quotients = module.tables.embedding_bags["user_quotient"].weight
    assert bool((quotients == 1).all())
    assert quotients.shape == (5, EMBEDDING_DIM)
    torch.nn.init.normal_(quotients)
    features = next(iter(recipe.data.train)).sparse_features
    first = module.tables.embedding_bags["user"].weight
    ids = features["user"].values()
    expected = first[ids % 8] * quotients[ids // 8]
    torch.testing.assert_close(module(features)["user"], expected)


# --- mixed dimensions -------------------------------------------------------------------------------


def test_blocks_leave_out_rows_that_training_never_reads(gloo) -> None:
    blocks = Blocks.of(make_task())
    read = {name: set() for name in ROWS}
    for batch in make_recipe().data.train:
        for name in ROWS:
            read[name] |= set(batch.sparse_features[name].values().tolist())
    for name, routing in blocks.routings.items():
        inside = (routing.all_blocks() < routing.num_blocks).nonzero()[:, 0].tolist()
        assert set(inside) == read[name]
        assert int(blocks.rows[name].sum()) == len(read[name])


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_packed_tables_hold_what_is_kept_and_nothing_else(gloo, bits: int) -> None:
    torch.manual_seed(0)
    cell = make_task(precision={32: "fp32", 8: "int8", 4: "int4"}[bits])
    blocks, model = Blocks.of(cell), cell.build(None).model
    masks = {n: torch.rand(r.num_blocks, EMBEDDING_DIM) < 0.5 for n, r in blocks.routings.items()}
    zero_dropped_(model, blocks.routings, masks)
    weights = {name: weight.clone() for name, weight in tables_of(model).items()}
    for name, weight in weights.items():
        or_none = torch.cat([masks[name], torch.zeros(1, EMBEDDING_DIM, dtype=torch.bool)])
        assert torch.equal(weight != 0, or_none[blocks.routings[name].all_blocks()])
    scheme = mixed_scheme(uncompressed_scheme(model), blocks.routings, masks, bits, weights)
    features = next(iter(cell.build(None).data.test)).sparse_features
    before = collection_of(model)(features).values()
    (module,) = packed_of(put_in_place(model, scheme))
    atol = {32: 1e-6, 8: 2e-2, 4: 3e-1}[bits]
    torch.testing.assert_close(module(features).values(), before, atol=atol, rtol=0)
    assert module.table_bytes() == scheme.served_bytes("packed") == blocks.num_bytes(masks)


def test_random_dims_fall_and_use_the_bytes_up(gloo) -> None:
    cell = make_task(2.0)
    blocks, generator = Blocks.of(cell), torch.Generator().manual_seed(0)
    first, second = (random_search.random_dims(blocks, generator) for _ in range(2))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for dims in (first, second):
        assert all(bool((dim.diff() <= 0).all()) for dim in dims.values())
        num_bytes = blocks.num_bytes(blocks.masks(dims, dict.fromkeys(ROWS, EMBEDDING_DIM)))
        assert 0.85 * cell.num_bytes < num_bytes <= cell.num_bytes


def test_mde_follows_the_power_of_popularity_and_counts_its_projections(gloo) -> None:
    cell = make_task(1.5)
    blocks = Blocks.of(cell)
    shares = mde.popularity(blocks)
    assert max(float(share.max()) for share in shares.values()) == 1
    dims = mde.largest_dims(blocks, 0.3, is_integer=True)
    for dim in dims.dims.values():
        assert bool((dim.diff() <= 0).all())
        assert int(dim.min()) >= 1
    projections = sum(4 * d * width for d, width in dims.shapes(blocks.rows).values())
    table_bytes = blocks.num_bytes(blocks.masks(dims.dims, dims.widths))
    assert 0.8 * cell.num_bytes < table_bytes + projections <= cell.num_bytes
    assert mde.round_dims(torch.tensor([0.2, 2.4, 2.6, 6.0]), True).tolist() == [1, 2, 3, 6]
    assert mde.round_dims(torch.tensor([0.2, 2.4, 3.0, 6.0]), False).tolist() == [1, 2, 4, 8]


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


# --- NIS --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_single", [True, False])
def test_the_grid_costs_what_it_keeps_and_choices_never_overlap(gloo, is_single: bool) -> None:
    blocks = Blocks.of(make_task(2.0))
    grid = nis.make_grid(blocks, is_single=is_single)
    tables = [choice.table for choice in grid.choices]
    assert len(tables) == len(ROWS) * (1 if is_single else nis.WIDTHS)
    for choice in grid.choices:
        assert not choice.options[0].any()
        for option, cost in zip(choice.options, choice.costs, strict=True):
            assert float(cost) == 4 * int(blocks.rows[choice.table] @ option.sum(1))
    full = grid.masks([len(choice.options) - 1 for choice in grid.choices])
    assert all(bool((mask.any(1) == (blocks.rows[table] > 0)).all()) for table, mask in full.items())
    assert sum(int(c.options[-1].sum()) for c in grid.choices) == sum(int(mask.sum()) for mask in full.values())


@given(
    costs=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3),
    amount=st.integers(9, 20),
    seed=st.integers(0, 99),
)
def test_the_most_probable_choice_within_an_amount_is_that_of_all_combinations(costs, amount, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.tensor([0.0, *map(float, row)], dtype=torch.float64) for row in costs]
    log_p = [torch.randn(len(row), generator=generator).log_softmax(0) for row in tensors]
    pick = nis.most_probable_within(log_p, tensors, amount)

    def of(choice: list[int]) -> tuple[float, float]:
        cost = sum(float(row[option]) for row, option in zip(tensors, choice, strict=True))
        return cost, sum(float(row[option]) for row, option in zip(log_p, choice, strict=True))

    combinations = [
        list(c) for c in torch.cartesian_prod(*[torch.arange(len(r)) for r in tensors]).view(-1, len(tensors)).tolist()
    ]
    within = [of(choice) for choice in combinations if 0 < of(choice)[0] <= amount]
    assert 0 < of(pick)[0] <= amount
    empty = of([0] * len(tensors))[1]
    best = max(value for _, value in within)
    if best >= empty:
        assert of(pick)[1] == pytest.approx(best)


# --- single values ----------------------------------------------------------------------------------


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


def test_the_largest_values_of_all_tables_stay(gloo) -> None:
    model = make_recipe().model
    whole = torch.cat([weight.flatten().abs() for weight in tables_of(model).values()])
    single_values.keep_largest_(model, 37)
    left = torch.cat([weight.flatten().abs() for weight in tables_of(model).values()])
    assert int(left.count_nonzero()) == 37
    assert float(left[left > 0].min()) >= float(whole[left == 0].max())


def test_pep_moves_values_and_thresholds_by_the_gradients_of_what_the_model_reads() -> None:
    values = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    thresholds = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(5, 4, dtype=torch.float64)
    (pep.soft_threshold(values, thresholds) * factor).sum().backward()
    value, threshold = pep.threshold_gradients(values.detach(), thresholds.detach(), factor)
    # PEP passes dead values no gradient either; sign has none
    torch.testing.assert_close(value, values.grad)
    torch.testing.assert_close(threshold, thresholds.grad)


def test_int4_qat_trains_through_the_rounding_and_serves_what_it_trained(gloo) -> None:
    cell = make_task(3.0)
    served = METHODS["int4-qat"].run(cell)
    for weight in tables_of(served.model).values():
        torch.testing.assert_close(rows.in_precision(weight, "int4"), weight, atol=2e-3, rtol=0)
        assert all(len(row.unique()) <= 16 for row in weight)


def test_the_best_trial_within_the_bytes_counts(gloo) -> None:
    cell = make_task(2.0)
    model = cell.build(None).model
    trials = [Served(model=model, num_bytes=10), Served(model=model, num_bytes=10**9)]
    served = best_of(cell, [lambda t=trial: t for trial in trials])
    assert (served.num_bytes, served.trials) == (10, 2)
    with pytest.raises(UnmetError, match="none of 1 trials"):
        best_of(cell, [lambda: trials[1]])


# --- what is refused, and the runner ----------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_size])
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


def test_cells_are_lines_and_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forks = multiprocessing.get_context("forkserver")  # the tests' server has imported everything
    monkeypatch.setattr(runner.multiprocessing, "get_context", lambda _: forks)
    out = tmp_path / "rows.jsonl"
    argv = ["tests.tiny:demo", "--sizes", "3,5000", "--methods", "uniform", "--seeds", "0", "--max-epochs", "1"]
    argv += ["--with-validation", "--out", str(out)]
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
    assert "no D in fp32" in lines[2]["reason"]
    text = out.read_text()
    out.write_text(text + '{"recipe": "tests.ti')  # a line that was cut short
    assert runner.main(argv) == 0
    assert out.read_text() == text
    assert "uniform" in capsys.readouterr().out


def test_learning_methods_never_train_on_validation() -> None:
    arguments = runner.parse(["m:f", "--with-validation", "--out", "x.jsonl"])
    found = {cell.method: cell.with_validation for cell in runner.cells_of(arguments)}
    assert {name for name, joins in found.items() if not joins} == {n for n, m in METHODS.items() if m.learns}


def test_tables_to_leave_alone_are_left_or_refused(gloo, tmp_path: Path) -> None:
    recipe = replace(make_recipe(), leave_alone=("genre",))
    build = Recipes(lambda dim: recipe)
    for name in ("int8-rows", "compress"):
        served = METHODS[name].run(Task(build=build, size=1.5, precision="int8", max_epochs=1))
        assert served.num_bytes >= 4 * EMBEDDING_DIM * ROWS["genre"]
    cell = cells.Cell(
        recipe="r",
        data=None,
        method="uniform",
        size=2.0,
        seed=0,
        with_validation=False,
        rules={},
        precisions=("fp32",),
        weights=tmp_path,
    )
    with pytest.raises(UnmetError, match="cannot be left alone"):
        cells.measure(cell, Task(build=build, size=2.0))
