"""Rivals: what each serves takes the bytes it says, and is what its method promises."""

from __future__ import annotations

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
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.rivals import __main__ as runner
from benchmarks.rivals import (
    cce,
    cells,
    gains,
    mde,
    mpe,
    nis,
    pep,
    random_search,
    rows,
    shared_rows,
    single_values,
    streams,
    task,
)
from benchmarks.rivals import product_quantisation as pq
from benchmarks.rivals.methods import METHODS, Method
from benchmarks.rivals.mixed import Blocks, mixed_scheme, put_in_place, uncompressed_scheme, zero_dropped_
from benchmarks.rivals.task import Recipes, Served, Task, UnmetError, best_of, shards_of
from dnis_torchrec.blocks.counts import count_frequencies
from dnis_torchrec.blocks.routing import RecordLayout, RowRouting
from dnis_torchrec.selection.shards import collections
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


def stored_bytes(served: Served, method: Method, precision: str) -> int:
    """Bytes of what a served model holds, counted from its own tensors and not from a formula."""
    model = served.model
    if method is METHODS["mpe"]:
        return mpe_bytes(model, torch.tensor(served.settings["widths"]))
    total = sum(module.table_bytes() for module in packed_of(model))
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
    (name, precision, 1.6 if name == "mde" else 2.2)
    for name, method in METHODS.items()
    for precision in dict.fromkeys((method.precisions[0], method.precisions[-1]))
    if name not in ("no-embeddings", "dnis-unrolled") and (name, precision) != ("uniform-grid", "fp32")
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
    if precision == method.precisions[-1]:
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


def test_hash_reads_the_row_of_the_remainder(gloo) -> None:
    recipe = make_recipe()
    plain = collection_of(recipe.model)
    weights = tables_of(recipe.model)
    parts = {name: shared_rows.partition(weights[name], rows, 0) for name, rows in {"user": 7, "genre": 12}.items()}
    module = shared_rows.ShortTables(plain, parts, torch.mul)
    features = next(iter(recipe.data.train)).sparse_features
    expected = naive_pooled(plain, features, lambda t, i: weights[t][i % {"user": 7, "genre": 12}[t]])
    torch.testing.assert_close(module(features).values(), expected)


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


def test_tables_of_few_distinct_sub_vectors_are_quantised_without_an_error(gloo) -> None:
    generator, width = torch.Generator().manual_seed(0), 2
    model = make_recipe().model
    for weight in tables_of(model).values():
        codewords = torch.randn(EMBEDDING_DIM // width, 8, width, generator=generator)
        picks = [(torch.arange(len(weight)) * (2 * part + 1)) % 8 for part in range(len(codewords))]
        weight.copy_(torch.cat([rows[pick] for rows, pick in zip(codewords, picks, strict=True)], dim=1))
    features = next(iter(make_recipe().data.test)).sparse_features
    expected = collection_of(model)(features).values()
    parts = {n: pq.quantise(w, torch.ones(len(w)), width, 3, generator) for n, w in tables_of(model).items()}
    shared_rows.shorten_(model, parts)
    (module,) = (m for m in model.modules() if isinstance(m, shared_rows.ShortTables))
    torch.testing.assert_close(module(features).values(), expected)
    pointers = sum(-(-rows * 3 // 8) for rows in ROWS.values()) * EMBEDDING_DIM // width
    assert shared_rows.short_bytes(parts, "fp32") == pointers + 2 * 8 * EMBEDDING_DIM * 4


def test_centres_stand_where_rows_are_read() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.cat([torch.randn(50, 3, generator=generator) + 9, torch.randn(50, 3, generator=generator) - 9])
    weights = torch.cat([torch.ones(50), torch.full((50,), 10.0)])
    centres, nearest = pq.k_means(points, weights, 2, generator)
    assert torch.equal(nearest, torch.cdist(points, centres).argmin(1))
    assert len(nearest[:50].unique()) == len(nearest[50:].unique()) == 1
    for group in (slice(50), slice(50, None)):
        torch.testing.assert_close(centres[nearest[group][0]], points[group].mean(0))


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


def test_mpe_rounds_to_levels_around_an_offset_and_learns_by_lsq() -> None:
    values = torch.tensor([-2.0, -0.3, 0.2, 0.9, 5.0], requires_grad=True)
    step, offset = torch.tensor(1.0, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    rounded = mpe.quantise(values, step, offset, 2)
    assert rounded.tolist() == [-1.5, -0.5, 0.5, 0.5, 1.5]
    rounded.sum().backward()
    assert values.grad.tolist() == [0.5, 1, 1, 1, 0] or values.grad.tolist() == [1, 1, 1, 1, 0]
    assert float(step.grad) == pytest.approx(sum([0.5, -0.2, 0.3, -0.4, 1.5]), abs=0.51 * 2)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_mpe_serves_what_it_says_in_the_bytes_that_it_says(is_sorted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = torch.randint(7, (300,), generator=generator)
    widths = widths.sort(descending=True).values if is_sorted else widths
    steps, offset = torch.rand(6, generator=generator) + 0.1, torch.randn(5, generator=generator)
    values = torch.randn(300, 5, generator=generator)
    expected = torch.zeros(300, 5)
    for width in range(1, 7):
        expected[widths == width] = mpe.quantise(values, steps[width - 1], offset, width)[widths == width]
    parts = mpe.encode(expected, widths, steps, offset)
    torch.testing.assert_close(mpe.decode(parts, widths), expected)
    codes = sum(int((widths == width).sum()) * -(-width * 5 // 8) for width in range(1, 7))
    found = mpe.directory(widths)
    assert sum(part.nbytes for part in parts.values()) == codes + found.nbytes + 4 * 6 + 4 * 5
    assert found.nbytes == (12 * 7 if is_sorted else RecordLayout(7).num_bytes(300))


def test_mpe_takes_the_likeliest_widths_and_uses_the_bytes_up() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(128, 7, generator=generator, dtype=torch.float64).log_softmax(1)
    costs = torch.arange(7) * torch.randint(5, 20, (128, 1), generator=generator)
    likeliest = int(costs.gather(1, log_p.argmax(1, keepdim=True)).sum())
    assert torch.equal(mpe.widths_within(log_p, costs, likeliest), log_p.argmax(1))
    for spare in (likeliest // 3, 3 * likeliest // 2):
        num_bytes = int(costs.gather(1, mpe.widths_within(log_p, costs, spare)[:, None]).sum())
        assert 0.97 * spare <= num_bytes <= spare


# --- gains ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dlrm", "shared"])
def test_gains_multiply_what_the_ids_of_a_block_stand_for(gloo, kind: str) -> None:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=30, embedding_dim=4, feature_names=features, pooling=pooling)
        for name, features, pooling in (
            ("s", ["f", "g"], PoolingType.SUM),
            ("t", ["g"] if kind == "shared" else ["h"], PoolingType.MEAN),
        )
    ]
    plain = EmbeddingBagCollection(tables)
    routings = {name: RowRouting.from_map(torch.randint(3, (30,)), 3) for name in "st"}
    module = gains.BlockGains(plain, plain, routings)
    lengths = torch.randint(1, 3, (60,))
    features = KeyedJaggedTensor(["f", "g", "h"], torch.randint(30, (int(lengths.sum()),)), lengths=lengths)
    torch.testing.assert_close(module(features).values(), plain(features).values())
    assert module(features).keys() == plain(features).keys()
    for factor in module.factors.values():
        torch.nn.init.normal_(factor)
    bags = plain.embedding_bags

    def row(table: str, index: int) -> Tensor:
        return (module.factors[table][routings[table].all_blocks()[index]] * bags[table].weight[index]).detach()

    torch.testing.assert_close(module(features).values(), naive_pooled(plain, features, row))
    torch.testing.assert_close(module.whole_tables()(features).values(), plain(features).values())


def test_gains_of_a_rival_are_solved_on_samples_that_it_was_not_trained_on(gloo) -> None:
    """Rows of a hundred times their values: held-out samples take some of that back."""
    cell = make_task(1.5)
    served = METHODS["hash"].run(cell)
    for collection in collections(cell.build(None).model):
        tables = served.model.get_submodule(collection)
        with torch.no_grad():
            for parameter in tables.parameters():
                parameter.mul_(100)
    other = gains.with_gains(cell, served)
    factors = torch.cat([torch.tensor(part) for part in other.settings["gains"].values()])
    assert float(factors.mean()) < 0.9


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
    (fqn,), features = collections(recipe.model), next(iter(recipe.data.test)).sparse_features
    old = served.model.get_submodule(fqn)(features).values()
    other = gains.with_gains(cell, served)
    torch.testing.assert_close(other.model.get_submodule(fqn)(features).values(), 0.5 * old)
    assert other.num_bytes == served.num_bytes
    assert set(other.settings["gains"]) == set(ROWS)


def test_gains_scale_rows_of_sequences() -> None:
    table = EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    plain, routing = EmbeddingCollection([table]), RowRouting.from_map(torch.arange(9) % 3, 3)
    module = gains.BlockGains(plain, plain, {"t": routing})
    torch.nn.init.normal_(module.factors["t"])
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 4, 8, 2]), lengths=torch.tensor([3, 1]))
    expected = plain(features)["f"].values() * module.factors["t"][torch.tensor([0, 1, 2, 2])].unsqueeze(1)
    torch.testing.assert_close(module(features)["f"].values(), expected)


# --- streams, and rates that fall -------------------------------------------------------------------


def test_shuffled_ids_are_the_same_samples_in_another_order_of_rows(gloo) -> None:
    recipe, shuffled = make_recipe(), streams.shuffle_ids(make_recipe(), 3)
    counts = [
        count_frequencies([b.sparse_features for b in of.data.train], task.table_configs(of.model)).counts
        for of in (recipe, shuffled)
    ]
    for name in ROWS:
        assert not torch.equal(counts[0][name], counts[1][name])
        assert torch.equal(counts[0][name].sort().values, counts[1][name].sort().values)
    for split in ("train", "validation", "selection", "test"):
        parts = zip(getattr(recipe.data, split), getattr(shuffled.data, split), strict=True)
        for batch, other in parts:
            for name in ROWS:
                new = shuffled.data.train.rows[name][batch.sparse_features[name].values()]
                assert torch.equal(other.sparse_features[name].values(), new)
            assert torch.equal(batch.labels, other.labels)
    both = streams.train_on_validation(shuffled).data.train
    assert len(list(both)) == len(list(recipe.data.train)) + len(list(recipe.data.validation))


def test_training_on_validation_takes_the_best_number_of_epochs_without_a_stop(
    gloo, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = [], task.train_plainly

    def spy(model, stepper, recipe, device, **rules):
        calls.append((sum(len(b.labels) for b in recipe.data.train), rules["max_epochs"], rules["patience"]))
        return real(model, stepper, recipe, device, **rules)

    monkeypatch.setattr(task, "train_plainly", spy)
    cell = make_task(with_validation=True, max_epochs=3)
    _, training = task.train(cell, cell.build(None))
    data = cell.build(None).data
    sizes = [sum(len(b.labels) for b in split) for split in (data.train, data.validation)]
    assert calls == [(sizes[0], 3, 1), (sum(sizes), training.best_epoch + 1, None)]
    assert len(training.history) == training.best_epoch + 1


def test_rates_fall_and_never_lose_by_selection(gloo, tmp_path: Path) -> None:
    cell = make_task(2.0, max_epochs=3, cache=tmp_path / "seed0.safetensors")
    whole, falling = rows.dense(cell), METHODS["falling-rates"].run(cell)
    losses = [task.loss_on_selection(cell, served.model) for served in (whole, falling)]
    assert losses[1] <= losses[0]
    assert falling.num_bytes == DENSE_BYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed0+falling.safetensors", "seed0.safetensors"]


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
