"""Curvature against second derivatives by autograd: losses, tasks, couplings, pooled tables and unpooled ones."""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec import blocks_from_counts, prepare_
from dnis_torchrec.allocation.bits import allocate
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.allocation.curvature import Curvature, curvature, curvature_of_read_tables
from dnis_torchrec.blocks.blocking import RowBlocks
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.task import Predictions, Task, TrainTask
from dnis_torchrec.selection.shards import collections
from tests import models
from tests.models import NAMES, ClickAndRating, Interest, alpha_of, interest, of_two, shard_as
from tests.reference import ReferenceTable, couplings_reference, curvature_reference, pooled_reference
from tests.tiny import make_recipe

ROWS = {"a": 11, "b": 7, "c": 10}
DIMS = {"a": 4, "b": 4, "c": 8}
FEATURES = {"a": ["one", "both"], "b": ["both", "few"], "c": ["many"]}
LENGTHS = {"one": 1, "both": 3, "few": 1, "many": 4}
"""Longest bags; two features of one table, one feature of two tables."""
COLLECTIONS = (("a", "b"), ("c",))


@dataclass(frozen=True)
class Case:
    """What a model is to be like: longest bags by feature, and rows of each table that belong to no block."""

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    lengths: tuple[int, ...] = tuple(LENGTHS.values())
    num_outputs: int = 1
    num_blocks: int = 3
    unassigned: int = 0


class Net(nn.Module):
    """Two collections of three tables and two dense layers in float64: not linear in what is pooled."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.num_outputs = case.num_outputs
        self.collections = nn.ModuleList(
            EmbeddingBagCollection(tables=[config(name, case) for name in names], is_weighted=case.is_weighted)
            for names in COLLECTIONS
        )
        width = sum(DIMS[name] * len(FEATURES[name]) for name in ROWS)
        self.over = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Dropout(), nn.Linear(5, case.num_outputs))
        self.over.double()

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``(B,)`` of one output, else ``(B, T)``; the dense features are not used."""
        pooled = [collection(sparse_features).to_dict() for collection in self.collections]
        parts = [part.double() for own in pooled for _, part in sorted(own.items())]
        predictions = self.over(torch.cat(parts, dim=1))
        return predictions.squeeze(1) if self.num_outputs == 1 else predictions


def config(name: str, case: Case) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS[name],
        embedding_dim=DIMS[name],
        feature_names=FEATURES[name],
        pooling=case.pooling,
    )


def make_model(case: Case) -> Net:
    """The same weights in every process."""
    torch.manual_seed(3)
    net = Net(case)
    for collection in net.collections:
        for bag in collection.embedding_bags.values():
            nn.init.normal_(bag.weight)
    return net


def make_blocks(case: Case) -> RowBlocks:
    """Blocks of all tables; `a` is in frequency order, the others are not."""
    generator = torch.Generator().manual_seed(2)
    drawn = {name: torch.randint(0, 20, (rows,), generator=generator) for name, rows in ROWS.items()}
    drawn["a"] = drawn["a"].sort(descending=True).values
    counts = FrequencyCounts(drawn, dict(zip(LENGTHS, case.lengths, strict=True)), 60)
    configs = [config(name, case) for name in ROWS]
    blocks = blocks_from_counts(counts, configs, num_blocks=case.num_blocks, least_rows=1)
    if not case.unassigned:
        return blocks
    dropped = {name: torch.arange(rows) >= rows - case.unassigned for name, rows in ROWS.items()}
    routings: dict[str, RowRouting] = {name: blocks.routings[name].without_rows(dropped[name]) for name in ROWS}
    return replace(blocks, routings=routings)


def make_batch(case: Case, seed: int, size: int = 6) -> Batch:
    """Bags, empty ones among them, and labels in [0, 1]: one per sample and output."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, most + 1, (size,), generator=generator) for most in case.lengths]
    rows = min(ROWS.values())
    values = torch.randint(0, rows, (int(torch.cat(lengths).sum()),), generator=generator)
    features = KeyedJaggedTensor(
        keys=list(LENGTHS),
        values=values,
        lengths=torch.cat(lengths),
        weights=torch.rand(len(values), generator=generator) + 0.5 if case.is_weighted else None,
    )
    shape = (size,) if case.num_outputs == 1 else (size, case.num_outputs)
    labels = torch.randint(0, 2, shape, generator=generator).float()
    return Batch(torch.zeros(size, 1), features, labels)


def make_batches(case: Case, num_batches: int = 2) -> list[Batch]:
    return [make_batch(case, seed, 6 - seed % 2) for seed in range(num_batches)]


def expected(
    case: Case, batches: list[Batch], loss: Callable[[Tensor, Tensor], Tensor], alpha: dict[str, Tensor] | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """G and H of every table by the oracle, of all batches as one; of another alpha than 1 times that alpha."""
    net, blocks = make_model(case).eval(), make_blocks(case)
    weights = {name: bag.weight.detach() for own in net.collections for name, bag in own.embedding_bags.items()}
    sizes = {name: (blocks.routings[name].num_blocks, DIMS[name]) for name in ROWS}
    ones = {name: torch.ones(size, dtype=torch.float64) for name, size in sizes.items()}
    factors = ones if alpha is None else alpha

    def predict(scales: dict[str, Tensor]) -> Tensor:
        parts = []
        for names in COLLECTIONS:
            pooled = {}
            for name in names:
                for feature in FEATURES[name]:
                    key, alpha = f"{feature}@{name}" if feature == "both" else feature, scales[name] * factors[name]
                    pooled[key] = _pooled(case, weights[name], alpha, blocks, name, feature, batches)
            parts += [part for _, part in sorted(pooled.items())]
        return net.over(torch.cat(parts, dim=1))

    return curvature_reference(predict, ones, torch.cat([batch.labels for batch in batches]).double(), loss)


def _pooled(
    case: Case, weight: Tensor, alpha: Tensor, blocks: RowBlocks, name: str, feature: str, batches: list[Batch]
) -> Tensor:
    of_none = torch.ones(1, alpha.shape[1], dtype=torch.float64)  # rows of no block are multiplied by nothing
    of_rows, is_mean = blocks.routings[name].all_blocks(), case.pooling == PoolingType.MEAN
    table = ReferenceTable(weight.double(), torch.cat([alpha, of_none]), of_rows, is_mean)
    parts = []
    for batch in batches:
        jagged = batch.sparse_features[feature]
        bags = [bag.tolist() for bag in jagged.to_dense()]
        of_ids = [bag.tolist() for bag in jagged.to_dense_weights()] if case.is_weighted else None
        parts.append(pooled_reference(table, bags, of_ids))
    return torch.cat(parts)


BCE = nn.BCEWithLogitsLoss()
ONE_ID = (1, 1, 1, 1)


def quartic(predictions: Tensor, labels: Tensor) -> Tensor:
    """A user's own loss, whose third derivative is not 0."""
    return (predictions - labels).pow(4).mean()


def ratio(predictions: Tensor, labels: Tensor) -> Tensor:
    """A loss of two outputs that meet within a sample."""
    return (predictions[:, 0] * (1 + predictions[:, 1].exp()) - labels[:, 0]).square().mean()


def assert_as_expected(found: Curvature, wanted: dict[str, tuple[Tensor, Tensor]], rtol: float = 1e-5) -> None:
    assert list(found.gradient) == list(found.curvature) == list(wanted)
    for table, (gradient, bend) in wanted.items():
        for got, want in ((found.gradient[table], gradient), (found.curvature[table], bend)):
            torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * float(want.abs().max() + 1e-12))


CASES: dict[str, Case] = {
    "one id": Case(lengths=ONE_ID),
    "several ids": Case(),
    "mean": Case(pooling=PoolingType.MEAN),
    "weighted": Case(is_weighted=True),
    "one weighted id": Case(is_weighted=True, lengths=ONE_ID),
    "rows of no block": Case(unassigned=3),
    "rows of no block, mean": Case(unassigned=3, pooling=PoolingType.MEAN),
    "rows of no block, one id": Case(unassigned=3, lengths=ONE_ID),
    "one block": Case(num_blocks=1),
}


@pytest.mark.parametrize(
    ("name", "loss"), [*((name, quartic) for name in CASES), ("several ids", nn.MSELoss()), ("weighted", BCE)]
)
def test_it_is_what_the_oracle_finds(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    case = CASES[name]
    batches = make_batches(case)
    found = curvature(make_model(case), batches, make_blocks(case), loss=loss)
    assert_as_expected(found, expected(case, batches, loss))
    assert found.num_samples == 11


@pytest.mark.parametrize("loss", [nn.MSELoss(), BCE, ratio])
def test_of_two_outputs(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """MSE of two outputs is half the mean over samples of their sum; the oracle's samples have two outputs, too."""
    case = Case(num_outputs=2)
    batches = make_batches(case)
    assert_as_expected(
        curvature(make_model(case), batches, make_blocks(case), loss=loss), expected(case, batches, loss)
    )


@pytest.mark.parametrize(
    ("sharding_type", "name"),
    [*((None, name) for name in ("several ids", "mean", "one id", "weighted")), ("table_wise", "several ids")],
)
@pytest.mark.usefixtures("gloo")
def test_of_a_prepared_model_it_is_in_relative_steps_of_alpha(sharding_type: str | None, name: str) -> None:
    case, blocks = CASES[name], make_blocks(CASES[name])
    batches = make_batches(case)
    model = prepare_(make_model(case), blocks)
    alpha = alpha_of(model)
    for dim in alpha.dims:
        alpha.of(dim).uniform_(0.2, 1)
    first = {table: blocks.first_alpha_row(table) for table in ROWS}
    of_tables = {
        table: alpha.of(DIMS[table])[first[table] : first[table] + blocks.routings[table].num_blocks].double()
        for table in ROWS
    }
    sharded = model if sharding_type is None else shard_as(model, sharding_type)
    found = curvature(sharded, batches, blocks, loss=BCE)
    assert_as_expected(found, expected(case, batches, BCE, of_tables))


def test_of_a_train_task_whose_collection_is_called_twice() -> None:
    """Both calls read the same blocks, so what a sample reads in them is added up before it is squared."""

    class Twice(Net):
        def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
            return super().forward(dense_features, sparse_features) + super().forward(dense_features, sparse_features)

    case, batches = Case(), make_batches(Case())
    model = make_model(case)
    model.__class__ = Twice
    found = curvature(TrainTask(model, BCE), batches, make_blocks(case), loss=BCE)
    doubled = make_model(case)
    doubled.over[3].weight.data.mul_(2)
    doubled.over[3].bias.data.mul_(2)
    once = curvature(doubled, batches, make_blocks(case), loss=BCE)
    assert_as_expected(found, {table: (once.gradient[table], once.curvature[table]) for table in ROWS})


def test_nothing_of_the_model_changes() -> None:
    case = Case()
    model = make_model(case)
    model.over.eval()
    model.over[2].train()
    before = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    with torch.no_grad():
        curvature(model, make_batches(case), make_blocks(case), loss=BCE)
    assert [module.training for module in model.modules()] == before[1]
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all("forward" not in vars(collection) for collection in collections(model).values())


def test_no_more_batches_than_are_enough() -> None:
    case, blocks = Case(), make_blocks(Case())
    batches = make_batches(case, 5)
    stream = iter(batches)
    found = curvature(make_model(case), stream, blocks, loss=BCE, num_samples=12)
    assert found.num_samples == 6 + 5 + 6
    assert len(list(stream)) == 2
    assert_as_expected(found, expected(case, batches[:3], BCE))
    assert curvature(make_model(case), batches, blocks, loss=BCE, num_samples=None).num_samples == 28


def test_the_error_is_that_of_the_batches() -> None:
    """A ratio of means over batches, so its error is that of the batches' differences from it."""
    case, blocks = Case(), make_blocks(Case())
    batches, model = make_batches(case, 7), make_model(case)
    alone = [curvature(model, [batch], blocks, loss=BCE) for batch in batches]
    assert all(own.relative_error == math.inf for own in alone)
    sizes = torch.tensor([own.num_samples for own in alone]).double()
    sums = torch.tensor([float(sum(h.sum() for h in own.curvature.values())) for own in alone]).double() * sizes
    mean = sums.sum() / sizes.sum()
    error = (sums - mean * sizes).square().sum().mul(7 / 6).sqrt() / sizes.sum()
    found = curvature(model, batches, blocks, loss=BCE)
    assert found.relative_error == pytest.approx(float(error / mean), rel=1e-6)
    assert repr(found) == f"Curvature(3 tables, {int(sizes.sum())} samples, relative error {found.relative_error:.2g})"


@pytest.mark.parametrize(("first", "measured"), [(0, 6), (3, 24), (4, 60), (None, 60)])
def test_a_sample_grows_until_it_reads_what_training_reads(first: int | None, measured: int) -> None:
    """Four times as large each time; a table that is worth nothing, and read, makes no sample larger."""
    reads, blocks, model = Case(), make_blocks(Case()), make_model(Case())
    without = Case(lengths=(1, 0, 0, 3))
    with torch.no_grad():
        model.collections[0].embedding_bags["a"].weight.zero_()
    batches = [make_batch(reads if place == first else without, 2 * place, 6) for place in range(10)]
    found = curvature_of_read_tables(model, batches, blocks, loss=BCE, num_samples=1)
    assert found.num_samples == measured
    assert found.unread == ({"b"} if first is None else frozenset())
    assert not found.curvature["a"].any()


def trained(steps: int) -> tuple[nn.Module, list[Batch]]:
    """torchrec's DLRM on a task that it can learn, after some steps of Adam."""
    recipe = make_recipe()
    batches = list(recipe.data.train)
    optimizer = torch.optim.Adam(recipe.model.parameters(), 1e-2)
    for step in range(steps):
        batch = batches[step % len(batches)]
        predictions = recipe.model(batch.dense_features, batch.sparse_features).squeeze(1)
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(predictions, batch.labels).backward()
        optimizer.step()
    return recipe.model, batches


@pytest.mark.parametrize(("steps", "looks_trained"), [(0, False), (60, True)])
def test_a_model_that_looks_untrained_is_told(steps: int, looks_trained: bool, caplog) -> None:
    model, batches = trained(steps)
    blocks = models.blocks_of(model, batches, num_blocks=3)
    with caplog.at_level(logging.WARNING):
        curvature(model, batches, blocks, loss=BCE)
    assert (caplog.messages == []) is looks_trained
    if not looks_trained:
        assert "the model looks untrained: the gradient of the loss in alpha has norm" in caplog.text


def pairs(predictions: Tensor, labels: Tensor) -> Tensor:
    """A loss of pairs of samples."""
    return functional.softplus(predictions.unsqueeze(0) - predictions.unsqueeze(1)).mean()


def gone(predictions: Tensor, labels: Tensor) -> Tensor:
    return (predictions.detach() - labels).square().mean()


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (nn.L1Loss(), ValueError, "loss L1Loss: expected one that is twice differentiable, got second derivatives of"),
        (nn.MSELoss(reduction="sum"), ValueError, "loss MSELoss: expected a mean over the samples, got"),
        (nn.MSELoss(reduction="none"), ValueError, r"loss MSELoss: expected a scalar, .* got \(6,\)"),
        (pairs, ValueError, "loss pairs: expected a mean of the losses of single samples, got one in which"),
        (gone, NotImplementedError, "loss gone: supported are losses that are twice differentiable in the"),
    ],
)
def test_a_loss_that_has_no_curvature_of_samples_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        curvature(make_model(Case()), make_batches(Case()), make_blocks(Case()), loss=loss)


def changed(**parts: object) -> list[Batch]:
    """Two batches, the second one with other parts."""
    first, second = make_batches(Case())
    return [first, replace(second, **parts)]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches: expected at least one batch, got none"),
        (changed(labels=None), "batch 1, labels: expected those of 5 samples, for the loss, got none; take batches of"),
        (changed(labels=torch.empty(0)), "batch 1, labels: expected those of 5 samples, for the loss, got none"),
        (changed(labels=torch.ones(4)), "batch 1, sparse_features: expected 4 samples, one for each label, got 5"),
        (changed(labels=torch.full((5,), math.nan)), "batch 1: expected finite labels, got nan"),
        (changed(labels=torch.full((5,), 2.0)), r"batch 1: expected labels in \[0, 1\] for BCEWithLogitsLoss, got 2.0"),
        (changed(dense_features=torch.full((5, 1), math.inf)), "batch 1, dense_features, sample 0, column 0: expected"),
    ],
)
def test_bad_batches_are_named(batches: list[Batch], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        curvature(make_model(Case()), batches, make_blocks(Case()), loss=BCE)


def test_predictions_that_are_not_finite_are_named() -> None:
    model = make_model(Case())
    model.over[3].bias.data.fill_(math.nan)
    with pytest.raises(ValueError, match="^batch 0: expected finite predictions"):
        curvature(model, make_batches(Case()), make_blocks(Case()), loss=BCE)
    assert model.training


@pytest.mark.parametrize(
    ("model", "changes", "case", "options", "place"),
    [
        (make_model(Case()), {"embedding_dims": DIMS | {"c": 5}}, Case(), {}, "table 'c'"),
        (make_model(Case()), {}, Case(lengths=ONE_ID), {}, "table 'a', feature 'both'"),
        (nn.Linear(1, 1), {}, Case(), {}, "model"),
        (make_model(Case()), {}, Case(), {"num_samples": 0}, "num_samples"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: nn.Module, changes: dict[str, Any], case: Case, options: dict[str, int], place: str
) -> None:
    with pytest.raises(ValueError, match=f"^{place}"):
        curvature(model, make_batches(Case()), replace(make_blocks(case), **changes), loss=BCE, **options)


CASES_OF_COUPLINGS = {name: CASES[name] for name in ("one id", "several ids", "mean", "rows of no block, mean")}
CASES_OF_COUPLINGS["two outputs"] = Case(num_outputs=2)


def expected_couplings(case: Case, batch: Batch, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    net, blocks = make_model(case).eval(), make_blocks(case)
    pooled, parts = {}, []
    for collection, names in zip(net.collections, COLLECTIONS, strict=True):
        of_keys = {
            key: value.detach().requires_grad_() for key, value in collection(batch.sparse_features).to_dict().items()
        }
        parts += [value.double() for _, value in sorted(of_keys.items())]
        for name in names:
            pooled |= {(name, f): of_keys[f"{f}@{name}" if f == "both" else f] for f in FEATURES[name]}
    predictions = net.over(torch.cat(parts, dim=1))

    def second(n: int) -> Tensor:
        def of_sample(z: Tensor) -> Tensor:
            return loss(
                z.view(1, -1).squeeze(1) if case.num_outputs == 1 else z.view(1, -1), batch.labels[n : n + 1].double()
            )

        found = torch.autograd.functional.hessian(of_sample, predictions[n].detach())
        return found.view(case.num_outputs, case.num_outputs)

    return couplings_reference(
        predictions,
        pooled,
        {key: [bag.tolist() for bag in batch.sparse_features[key[1]].to_dense()] for key in pooled},
        {name: blocks.routings[name].all_blocks().tolist() for name in ROWS},
        second,
        num_blocks=case.num_blocks,
        is_mean=case.pooling == PoolingType.MEAN,
    )


@pytest.mark.parametrize("loss", [nn.MSELoss(), BCE])
@pytest.mark.parametrize("name", CASES_OF_COUPLINGS)
def test_they_are_what_the_oracle_finds(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    case = CASES_OF_COUPLINGS[name]
    batches = make_batches(case)
    found = curvature(make_model(case), batches, make_blocks(case), loss=loss)
    sums = [expected_couplings(case, batch, loss) for batch in batches]
    for table in ROWS:
        wanted = sum(of_batch[table] for of_batch in sums) / found.num_samples
        assert isinstance(wanted, Tensor)
        torch.testing.assert_close(found.couplings[table], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


class NextItem(nn.Module):
    """Two sequences on one table, multiplied by a matrix that no axes of the table are known for."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="item", num_embeddings=300, embedding_dim=16, feature_names=["seen", "next"])
        self.items = EmbeddingCollection(tables=[table])
        self.mix = nn.Linear(16, 4, bias=False)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """``(B,)``."""
        found = self.items(sparse_features)
        seen, following = (found[name].values().view(len(dense_features), -1, 16) for name in ("seen", "next"))
        return (self.mix(seen).sum(1) * self.mix(following).sum(1)).sum(1)


def sequences(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.cat([torch.full((256,), 3), torch.ones(256, dtype=torch.int64)])
    ids = (torch.rand(1024, generator=generator).square() * 300).long()
    features = KeyedJaggedTensor(keys=["seen", "next"], values=ids, lengths=lengths)
    return Batch(torch.zeros(256, 1), features, torch.zeros(256))


def test_a_table_of_no_known_axes_is_served_far_better() -> None:
    """Its 16 columns move predictions in four directions alone: errors across them cancel."""
    torch.manual_seed(1)
    model, batches = NextItem(), [sequences(seed) for seed in range(8)]
    nn.init.normal_(model.items.embeddings["item"].weight)
    with torch.no_grad():
        for batch in batches:
            batch.labels.copy_(model(batch.dense_features, batch.sparse_features))
    measured = measure_(copy.deepcopy(model), batches, loss=nn.MSELoss())
    found = measured.allocate(compression=16)
    without = allocate(
        measured.model,
        measured.blocks,
        measured.counts,
        curvature(measured.model, batches, measured.blocks, loss=nn.MSELoss(), couplings=False),
        compression=16,
    )
    nearest = measured.sample.predict(without.scheme).loss_increase
    assert measured.sample.predict(found.scheme).loss_increase < 0.5 * nearest
    own = [table.scheme.tables["item"] for table in (found, without)]
    assert torch.equal(own[0].codes.bits, own[1].codes.bits)
    compressed = copy.deepcopy(model)
    dnis.compress(compressed, batches, loss=nn.MSELoss(), compression=16)
    with torch.no_grad():
        errors = torch.cat([compressed(b.dense_features, b.sparse_features) - b.labels for b in batches])
    assert float(errors.square().mean()) < 0.6 * nearest


CASE = Case(num_outputs=2)


def apart(z: Tensor, labels: Tensor) -> Tensor:
    """A click, and a rating that counts more the more it is."""
    click, rating = labels.double().unbind(1)
    of_ratings = (1 + rating) * mse_loss(z[:, 1], rating, reduction="none")
    return binary_cross_entropy_with_logits(z[:, 0], click) + 0.3 * of_ratings.mean()


def joint(z: Tensor, labels: Tensor) -> Tensor:
    """A click, and a purchase, which only follows a click: the product of two chances."""
    click, bought = labels.double().unbind(1)
    chance = z.sigmoid().prod(1).clamp(1e-9, 1 - 1e-9)
    of_both = -(bought * chance.log() + (1 - bought) * (1 - chance).log())
    return binary_cross_entropy_with_logits(z[:, 0], click) + of_both.mean()


class Named(nn.Module):
    """The model's outputs by name, the first as a column; and others that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Net = make_model(CASE)

    def forward(self, dense_features: Tensor, sparse_features: Any) -> dict[str, Tensor]:
        z = self.net(dense_features, sparse_features)
        unread = {"hidden": z.repeat(1, 9), "scale": z.sum()}
        return unread | {"one": z[:, :1], "other": z[:, 1], "chance": z[:, 0].sigmoid()}


class Of(Task):
    """The task of a loss of both outputs."""

    kinds: Mapping[str, str] = {"one": "regression"}

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self._loss = loss

    def loss(self, batch: Batch, outputs: Mapping[str, Tensor]) -> Tensor:
        return self._loss(torch.cat([outputs["one"], outputs["other"].unsqueeze(1)], dim=1), batch.labels)

    def predictions(self, batch: Batch, outputs: Mapping[str, Tensor]) -> Mapping[str, Predictions]:
        return {"one": Predictions(outputs["one"], batch.labels[:, 0])}


@pytest.mark.parametrize("loss", [apart, joint])
def test_equals_the_oracle(loss: Any) -> None:
    batches, model = make_batches(CASE), Named()
    found = curvature(TrainTask(model, Of(loss)), batches, make_blocks(CASE), loss=Of(loss))
    assert_as_expected(found, expected(CASE, batches, loss))


def test_a_task_whose_loss_depends_on_no_output_is_refused() -> None:
    task = Of(lambda z, labels: (z.detach() - labels).square().mean())
    with pytest.raises(ValueError, match="batch 0, task Of: expected a loss that depends on the outputs"):
        curvature(Named(), make_batches(CASE), make_blocks(CASE), loss=task)


def expected_of_sequences(
    model: Interest, batches: list[Batch], blocks: RowBlocks, loss: Any
) -> dict[str, tuple[Tensor, Tensor]]:
    """What the oracle finds for a model whose every row is multiplied by its block's alpha."""
    naive = copy.deepcopy(model).eval()
    weights = {name: dict(naive.named_parameters())[key].detach() for name, key in NAMES.items()}
    alpha = {
        name: torch.ones(blocks.routings[name].num_blocks, weight.shape[1], dtype=torch.float64)
        for name, weight in weights.items()
    }
    labels = torch.cat([batch.labels for batch in batches])

    def predict(leaves: dict[str, Tensor]) -> Tensor:
        multiplied = {
            NAMES[name]: weight * leaves[name][blocks.routings[name].all_blocks().long()].float()
            for name, weight in weights.items()
        }
        parts = [functional_call(naive, multiplied, (batch.dense_features, batch.sparse_features)) for batch in batches]
        return torch.cat(parts).double().view(len(labels), -1)

    return curvature_reference(predict, alpha, labels.double(), loss)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_of_sequences_and_bags_it_is_what_the_oracle_finds(num_outputs: int, wrapped: bool) -> None:
    """Of one output and its loss, or of a task of two."""
    model, loss, measured_by = interest(), BCE, BCE
    if num_outputs == 2:
        model, loss, measured_by = models.two_outputs(), of_two, ClickAndRating()
    batches = [models.make_batch(seed) for seed in (1, 2)]
    blocks = models.blocks_of(model, [models.make_batch(seed) for seed in range(4)], num_blocks=3)
    wanted = expected_of_sequences(model, batches, blocks, loss)
    if wrapped:
        prepare_(model, blocks)
    measured = model if num_outputs == 1 else TrainTask(model, measured_by)
    found = curvature(measured, batches, blocks, loss=measured_by)
    assert list(found.curvature) == list(NAMES)
    for name, (gradient, bend) in wanted.items():
        torch.testing.assert_close(found.gradient[name], gradient, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.curvature[name], bend, rtol=1e-4, atol=1e-6)
        assert float(bend.max()) > 0
