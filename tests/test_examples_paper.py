"""The paper as published: its gradients, its pruning value by value and its sparse tables, against oracles."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dnis_torchrec import BilevelStream, BilevelTrainPipeline, LevelSchedule, Size, TrainTask, prepare_
from examples.paper.__main__ import main
from examples.paper.blocks import global_blocks
from examples.paper.hypergradient import UnrolledHypergradient, unrolled_gradient
from examples.paper.pruning import keep_largest_, num_values, prune_values_
from examples.paper.search import PaperSettings, fine_tune_, search_as_published
from examples.paper.sparse_rows import load_table, lookup, save_tables
from tests import models
from tests.reference import blocks_reference, elementwise_keep_reference
from tests.tiny import make_recipe

CPU = torch.device("cpu")

Loss = Callable[[list[Tensor], Tensor], Tensor]


def by_autograd(weights: list[Tensor], alpha: Tensor, train: Loss, validation: Loss, steps: list[float]) -> Tensor:
    """`unrolled_gradient` of losses that are given as functions of (weights, alpha)."""

    def both() -> tuple[list[Tensor], list[Tensor]]:
        own, *of_weights = torch.autograd.grad(validation(weights, alpha), [alpha, *weights], materialize_grads=True)
        return [own], of_weights

    (gradient,) = unrolled_gradient(
        weights,
        steps,
        train_weight_gradient=lambda: torch.autograd.grad(train(weights, alpha), weights, materialize_grads=True),
        validation_gradients=both,
        train_alpha_gradient=lambda: torch.autograd.grad(train(weights, alpha), [alpha], materialize_grads=True),
    )
    return gradient


def objective(weights: list[Tensor], alpha: Tensor, train: Loss, validation: Loss, steps: list[float]) -> Tensor:
    """L_validation(Theta - xi * grad L_train(Theta, alpha), alpha), differentiable in alpha; xi of each weight."""
    gradients = torch.autograd.grad(train(weights, alpha), weights, create_graph=True)
    return validation([w - step * g for w, step, g in zip(weights, steps, gradients, strict=True)], alpha)


class SmallProblem:
    """Rows of an embedding table times alpha of their block, and two dense layers: nothing in it is quadratic."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.weights = [w.requires_grad_() for w in (0.5 * draw(9, 4), draw(4, 3), draw(3))]
        self.alpha = torch.rand(3, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        self.rows = {name: torch.randint(0, 9, (20,), generator=generator) for name in ("train", "validation")}
        self.labels = {name: draw(20) for name in self.rows}

    def loss(self, name: str) -> Loss:
        rows, labels = self.rows[name], self.labels[name]

        def value(weights: list[Tensor], alpha: Tensor) -> Tensor:
            table, hidden, over = weights
            return ((table[rows] * alpha[rows // 3] @ hidden).tanh() @ over - labels).square().mean()

        return value

    @property
    def losses(self) -> tuple[Loss, Loss]:
        return self.loss("train"), self.loss("validation")


@pytest.mark.parametrize("steps", [[0.01] * 3, [0.3] * 3, [2.0] * 3, [30.0, 0.1, 0.003]], ids=str)
def test_equals_finite_differences_of_the_true_objective(steps: list[float]) -> None:
    problem = SmallProblem(0, torch.float64)
    gradient = by_autograd(problem.weights, problem.alpha, *problem.losses, steps)
    first_order = by_autograd(problem.weights, problem.alpha, *problem.losses, [1e-12] * 3)
    expected, h = torch.zeros_like(gradient), 1e-5
    for index in range(gradient.numel()):
        change = torch.zeros_like(gradient)
        change.view(-1)[index] = h
        above, below = (
            objective(problem.weights, (problem.alpha + sign * change).detach(), *problem.losses, steps)
            for sign in (1, -1)
        )
        expected.view(-1)[index] = (above - below).detach() / (2 * h)
    torch.testing.assert_close(gradient, expected, atol=1e-8, rtol=1e-6)
    assert (first_order - expected).abs().max() > 0.003 * steps[0]  # the second order is not a detail


def test_weights_are_restored_bit_for_bit_after_an_error_too() -> None:
    weights = [torch.tensor([1e8, 1e-8, -0.0]), torch.rand(50, 3)]  # adding and subtracting would not bring these back
    before = [w.clone() for w in weights]
    calls: list[list[Tensor]] = []

    def train_alpha_gradient() -> list[Tensor]:
        calls.append([w.clone() for w in weights])
        if len(calls) == 2:
            raise ArithmeticError
        return [torch.ones(1)]

    with pytest.raises(ArithmeticError):
        unrolled_gradient(
            weights,
            [0.1, 0.1],
            train_weight_gradient=lambda: [torch.rand_like(w) for w in weights],
            validation_gradients=lambda: ([torch.ones(1)], [torch.rand_like(w) for w in weights]),
            train_alpha_gradient=train_alpha_gradient,
        )
    assert len(calls) == 2
    assert not torch.equal(calls[0][1], before[1])
    assert all(w.view(torch.int32).equal(old.view(torch.int32)) for w, old in zip(weights, before, strict=True))


class Noisy(nn.Module):
    """A model with dropout and running statistics, whose second layer no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = models.collection()
        self.over = nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.5), nn.Linear(24, 1))
        self.unused = nn.Linear(2, 2)
        self.drawn: list[float] = []

    def forward(self, sparse_features) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return self.over(self.collection(sparse_features).values()).squeeze(1)


def noisy(step: float = 0.5) -> tuple[nn.Module, Callable[[], list[Tensor]], list[str]]:
    """The prepared model, its hypergradient as a function of nothing, and the passes that are made."""
    torch.manual_seed(0)
    model = prepare_(Noisy(), models.blocks())
    models.randomise_alpha_(model)
    passes: list[str] = []

    def loss(name: str, seed: int) -> Callable[[], Tensor]:
        labels = torch.rand(models.BATCH_SIZE, generator=torch.Generator().manual_seed(seed))

        def run() -> Tensor:
            passes.append(name)
            return (model(models.features(seed)) - labels).square().mean()

        return run

    compute = UnrolledHypergradient(model, models.alpha_of(model), step)
    return model, lambda: compute(loss("train", 1), loss("validation", 2)), passes


def test_leaves_no_trace() -> None:
    model, compute, passes = noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    assert any(bool(gradient.any()) for gradient in compute())
    assert passes == ["train", "validation", "train", "train"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(value.grad is None and not value.requires_grad for value in models.alpha_of(model).buffers())
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(module.track_running_stats for module in model.modules() if isinstance(module, nn.BatchNorm1d))


def test_all_passes_draw_the_same_random_numbers() -> None:
    """Else the central difference would be that of two dropout masks, divided by a small number."""
    model, compute, passes = noisy()
    compute()
    assert len(passes) == len(model.drawn) == 4
    assert len(set(model.drawn)) == 1


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30), st.data())
def test_the_largest_values_stay(values: list[float], data: st.DataObject) -> None:
    """Of any floats: ties, denormals, signed zeros, over two tables."""
    cut, num_keep = data.draw(st.integers(0, len(values))), data.draw(st.integers(0, len(values)))
    parts = [torch.tensor(values[:cut]).view(-1, 1), torch.tensor(values[cut:]).view(-1, 1)]
    expected = [part * kept for part, kept in zip(parts, elementwise_keep_reference(parts, num_keep), strict=True)]
    keep_largest_(parts, num_keep)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def test_a_size_is_met_to_a_value_and_the_scheme_tells_the_columns() -> None:
    model, blocks, counts = models.collection(), models.blocks(), models.counts()
    tables = {part.table: part.weight for part in models.shards_of(model)}
    seen = [weight * (counts.counts[name] > 0).unsqueeze(1) for name, weight in tables.items()]
    shapes = [tuple(weight.shape) for weight in tables.values()]
    size = Size(embedding_bytes=sum(4 * (rows + 1) for rows, _ in shapes) + 5 * 50 + 4)
    kept = elementwise_keep_reference(seen, num_values(size, shapes))
    scheme = prune_values_(model, blocks, counts, size)
    assert scheme.parameters == 50
    for (name, weight), before, mask in zip(tables.items(), seen, kept, strict=True):
        assert torch.equal(weight, before * mask)
        table = scheme.tables[name]
        for block, columns in enumerate(table.retained):
            assert torch.equal((weight[table.routing.all_blocks() == block] != 0).any(dim=0), columns)
    with pytest.raises(ValueError, match="at most"):
        num_values(Size(compression=1e6), shapes)


@pytest.mark.parametrize("kind", ["csr", "coo"])
def test_sparse_tables_come_back(tmp_path: Path, kind: str) -> None:
    model = models.collection()
    keep_largest_([part.weight for part in models.shards_of(model)], 40)
    paths = save_tables(model, tmp_path, kind)
    for part in models.shards_of(model):
        matrix = scipy.sparse.load_npz(paths[part.table])
        assert matrix.format == kind
        assert torch.equal(load_table(paths[part.table]), part.weight)
        ids = torch.tensor([2, 0, 2])
        assert torch.equal(lookup(matrix, ids), part.weight[ids])


def test_blocks_are_cut_over_all_tables_of_a_dimension() -> None:
    counts, tables = models.counts(), models.tables()
    blocks = global_blocks(counts, tables, 3)
    for dim in {table.embedding_dim for table in tables}:
        names = [table.name for table in tables if table.embedding_dim == dim]
        of_rows = [int(count) for name in names for count in counts.counts[name]]
        expected = blocks_reference([count + 1 for count in of_rows], 3, 1)  # never seen rows are not apart
        assert [b for name in names for b in blocks.routings[name].all_blocks().tolist()] == expected
        assert {blocks.first_alpha_row(name) for name in names} == {0}


def test_pruned_values_stay_zero_while_others_train_on() -> None:
    recipe = make_recipe()
    tables = [part.weight for part in models.shards_of(recipe.model)]
    keep_largest_(tables, 60)
    before = [table.clone() for table in tables]
    fine_tune_(recipe.model, recipe, CPU, epochs=2)
    assert not any(bool(table[old == 0].any()) for table, old in zip(tables, before, strict=True))
    assert any(bool((table != old).any()) for table, old in zip(tables, before, strict=True))


@pytest.mark.parametrize("is_unrolled", [False, True])
def test_steps_are_those_of_the_bilevel_pipeline(gloo, is_unrolled: bool) -> None:
    """Of first order as the package's pipeline takes them; unrolled they are others."""
    recipe, others = make_recipe(), make_recipe()
    outcome = search_as_published(recipe, PaperSettings(epochs=2, num_blocks=3, is_unrolled=is_unrolled), CPU)
    task = TrainTask(prepare_(others.model, outcome.blocks), others.task)
    model = models.shard_densely(task)
    adam = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda weights: torch.optim.Adam(weights, lr=1e-2))
    pipeline = BilevelTrainPipeline(model.train(), adam, CPU)
    stream = BilevelStream(others.data.train, others.data.validation, LevelSchedule(warm_up_steps=10))
    while pipeline.lower_steps < 20:
        pipeline.progress(stream)
    ours, theirs = outcome.alpha["user"], pipeline.alpha.of(8)
    assert torch.allclose(ours, theirs, atol=1e-4) != is_unrolled


def test_the_command_searches_prunes_and_draws(tmp_path: Path) -> None:
    where = ["--out", str(tmp_path), "--compression", "2.5,4", "--num-blocks", "3", "--fine-tune-epochs", "1"]
    assert main(["tests.tiny:demo", "--epochs", "2", "--unrolled", *where]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["compression"] for row in rows] == [2.5, 4]
    assert rows[0]["values"] > rows[1]["values"]
    for name in ("alpha", "frequencies", "history", "quality"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
    assert {path.name for path in (tmp_path / "x4").iterdir()} == {"user.npz", "genre.npz"}
