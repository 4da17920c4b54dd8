"""Recipes: they build at any embedding_dim on the same splits, run, trace, learn, and start from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchrec.datasets.criteo import DEFAULT_INT_NAMES
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.tracing import Tracer
from torchrec.models.dlrm import DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.data.batches import InMemoryBatches
from dnis_torchrec.data.recipe import Recipe, load_recipe
from dnis_torchrec.data.task import TrainTask
from examples import amazon_sports, anime, criteo, lastfm_tags, movielens, synthetic
from examples.models import NeuMF
from tests.tab_separated_files import write_tab_separated
from tests.test_examples_datasets import criteo_line, ml_1m, write

__all__ = ["ml_1m"]

OF_MOVIELENS = ("mf", "mlp", "neumf", "ctr_fm", "ctr_wide_deep", "ctr_deepfm", "ctr_dlrm", "ctr_dlrm_dcn")
OF_CRITEO = ("fm", "fm_weighted", "wide_deep", "deepfm", "simple_deepfm", "dlrm")
RECIPES: dict[str, Callable[..., Recipe]] = {
    **{f"movielens:{name}": getattr(movielens, name) for name in OF_MOVIELENS},
    **{f"criteo:{name}": getattr(criteo, name) for name in OF_CRITEO},
    **{f"anime:{name}": getattr(anime, name) for name in ("mf", "fm")},
    **{f"amazon_sports:{name}": getattr(amazon_sports, name) for name in ("fm", "deepfm")},
    **{f"lastfm_tags:{name}": getattr(lastfm_tags, name) for name in ("fm", "deepfm", "dlrm")},
    "synthetic:demo": synthetic.demo,
}
DEFAULT_DIMS = {"synthetic:demo": 16}


@pytest.fixture
def data(ml_1m: Path) -> Path:
    write(ml_1m / "train.txt.gz", [criteo_line(i) for i in range(200)])
    write_tab_separated(ml_1m)
    return ml_1m


@pytest.fixture(params=RECIPES)
def build(request: pytest.FixtureRequest, data: Path) -> Callable[..., Recipe]:
    name = request.param
    folder = None if name == "synthetic:demo" else data
    return lambda **arguments: RECIPES[name](folder, **arguments)


def tables_of(model: nn.Module) -> EmbeddingBagCollection:
    (tables,) = (module for module in model.modules() if isinstance(module, EmbeddingBagCollection))
    return tables


def splits_of(recipe: Recipe) -> list[InMemoryBatches]:
    return [recipe.data.train, recipe.data.validation, recipe.data.selection, recipe.data.test]


@pytest.mark.parametrize("embedding_dim", [None, 1, 3, 6])
def test_builds_and_runs_at_any_embedding_dim(request, build, embedding_dim):
    recipe = build(embedding_dim=embedding_dim)
    default = DEFAULT_DIMS.get(request.node.callspec.params["build"], 64)
    dims = {config.embedding_dim for config in tables_of(recipe.model).embedding_bag_configs()}
    dim = embedding_dim or default
    assert dims == ({dim, 4 * dim} if isinstance(recipe.model, NeuMF) else {dim})
    batch = next(iter(recipe.data.train))
    loss, (_, predictions) = TrainTask(recipe.model, recipe.loss)(batch)
    labels = batch.labels
    assert predictions.shape == labels.shape
    assert torch.isfinite(loss)
    loss.backward()
    assert all(parameter.grad is not None for parameter in recipe.model.parameters())


def test_predictions_are_logits(build):
    recipe = build()
    if isinstance(recipe.loss, nn.BCEWithLogitsLoss):
        last = recipe.model.first_order if hasattr(recipe.model, "first_order") else recipe.model.over_arch
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.fill_(-5.0)
            batch = next(iter(recipe.data.test))
            assert float(recipe.model(batch.dense_features, batch.sparse_features).max()) < 0


def test_splits_are_disjoint_and_the_same_at_any_embedding_dim(build):
    splits, others = splits_of(build(seed=3)), splits_of(build(seed=3, embedding_dim=2))
    rows = torch.cat([split.rows for split in splits])
    assert rows.unique().numel() == rows.numel()
    for split, other in zip(splits, others, strict=True):
        batch, same = next(iter(split)), next(iter(other))
        assert torch.equal(batch.sparse_features.values(), same.sparse_features.values())
        assert torch.equal(batch.labels, same.labels)
    assert not torch.equal(splits[3].rows, splits_of(build(seed=4))[3].rows)


def test_weights_depend_on_the_seed_alone(build):
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = build(seed=7).model.state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = build(seed=7).model.state_dict(), build(seed=8).model.state_dict()
    assert same_weights(first, again)
    assert not same_weights(first, other)


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(value.shape == other[key].shape and torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("name", ["wide_deep", "deepfm", "dlrm"])
def test_rates_for_the_sample_are_not_those_of_the_whole_of_criteo(monkeypatch, data, name):
    sample = RECIPES[f"criteo:{name}"](data, embedding_dim=2)
    monkeypatch.setattr(criteo, "_WHOLE_DATA_SET", 200)
    whole = RECIPES[f"criteo:{name}"](data, embedding_dim=2)
    assert sample.dense_learning_rate < whole.dense_learning_rate == 1e-3
    assert whole.table_learning_rate == 1e-3
    assert sample.row_weights == whole.row_weights


@pytest.mark.parametrize("name", movielens.PLAIN)
def test_plain_models_learn_as_was_chosen_for_them(data, name):
    recipe, chosen = getattr(movielens, name)(data, embedding_dim=2), movielens.PLAIN[name]
    assert chosen.keys() >= {"embedding_l2"}
    assert {field: getattr(recipe, field) for field in chosen} == chosen


def test_traces_with_torchrecs_tracer(build):
    recipe = build(embedding_dim=4)
    task = TrainTask(recipe.model, recipe.loss)
    tables = tables_of(task)
    (fqn,) = (name for name, module in task.named_modules() if module is tables)
    # As TorchRec's pipelines choose them: the outermost modules without a collection inside.
    leaves = [name for name, module in task.named_modules() if not any(part is tables for part in module.modules())]
    graph = Tracer(leaf_modules=[fqn, *leaves]).trace(task)
    (call,) = (node for node in graph.nodes if node.op == "call_module" and node.target == fqn)
    # The tables read the batch's own sparse_features, or the pipeline could not start their input_dist early.
    assert call.args[0].op == "call_function"
    assert call.args[0].args[1] == "sparse_features"


def test_torchrecs_pipeline_runs_it(build, gloo):
    recipe = build(embedding_dim=4)
    model = DistributedModelParallel(TrainTask(recipe.model, recipe.loss), device=torch.device("cpu"))
    with torch.no_grad():
        _, (_, want) = model(next(iter(recipe.data.test)))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.device("cpu"))
    _, predictions = pipeline.progress(iter(recipe.data.test))
    assert torch.equal(predictions, want)
    assert len(pipeline._pipelined_modules) == 1


def test_mf_takes_another_collection_in_place_of_its_own(data):
    class Doubled(EmbeddingBagCollectionInterface):
        def __init__(self, tables: EmbeddingBagCollection) -> None:
            super().__init__()
            self.tables = tables

        def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
            pooled = self.tables(features)
            return KeyedTensor(pooled.keys(), pooled.length_per_key(), 2 * pooled.values())

        def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
            return self.tables.embedding_bag_configs()

        def is_weighted(self) -> bool:
            return False

    recipe = movielens.mf(data, embedding_dim=4)
    batch, mean = next(iter(recipe.data.test)), recipe.model.global_mean
    with torch.no_grad():
        before = recipe.model(batch.dense_features, batch.sparse_features)
        recipe.model.embedding_bag_collection = Doubled(recipe.model.embedding_bag_collection)
        after = recipe.model(batch.dense_features, batch.sparse_features)
    assert not torch.equal(before, mean.expand_as(before))
    assert torch.allclose(after - mean, 4 * (before - mean), atol=1e-6)


def test_mf_learns(data):
    recipe = movielens.mf(data, embedding_dim=4)
    optimizer = torch.optim.Adam(recipe.model.parameters(), lr=0.05)
    task, losses = TrainTask(recipe.model, recipe.loss), []
    for _ in range(60):
        for batch in recipe.data.train:
            loss, (detached, _) = task(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(detached))
    assert losses[-1] < 0.5 * losses[0]


def test_mf_starts_at_the_mean_of_the_training_labels(data):
    recipe = movielens.mf(data, seed=2)
    train = torch.cat([batch.labels for batch in recipe.data.train])
    assert float(recipe.model.global_mean) == pytest.approx(float(train.mean()), abs=1e-5)
    batch = next(iter(recipe.data.test))
    predictions = recipe.model(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
    assert torch.allclose(predictions, recipe.model.global_mean.expand_as(predictions), atol=1e-2)


@pytest.mark.parametrize("name", ["mlp", "neumf"])
def test_models_of_ratings_start_near_the_mean_of_the_training_labels(data, name):
    recipe = getattr(movielens, name)(data, seed=2)
    mean = torch.cat([batch.labels for batch in recipe.data.train]).mean()
    assert float(recipe.model.over.bias.detach()) == pytest.approx(float(mean), abs=1e-5)


@pytest.mark.parametrize("recipe", [movielens.ctr_fm, movielens.ctr_deepfm, criteo.fm, criteo.wide_deep])
def test_models_of_clicks_start_near_the_log_odds_of_the_training_labels(data, recipe):
    built = recipe(data, seed=2)
    rate = float(torch.cat([batch.labels for batch in built.data.train]).mean())
    assert float(built.model.first_order.bias.detach()) == pytest.approx(math.log(rate / (1 - rate)), abs=0.05)


@pytest.mark.parametrize("name", ["mlp", "neumf", "ctr_wide_deep", "ctr_deepfm"])
def test_the_tower_is_the_same_at_every_embedding_dim(data, name):
    towers = []
    for embedding_dim in (64, 4):
        model = getattr(movielens, name)(data, embedding_dim=embedding_dim).model
        tower = model.deep[0] if hasattr(model, "deep") else model.tower
        towers.append([layer._linear.out_features for layer in tower._mlp])
    assert towers[0] == towers[1]


def test_scalars_of_criteo_reach_fm_both_ways(data):
    bucketised, weighted = criteo.fm(data), criteo.fm_weighted(data)
    tables = tables_of(bucketised.model)
    assert not tables.is_weighted()
    assert len(tables.embedding_bags) == 39
    assert next(iter(bucketised.data.train)).dense_features.shape[1] == 0
    tables = tables_of(weighted.model)
    assert tables.is_weighted()
    assert tables.embedding_bags["scalars"].weight.shape == (13, 64)
    batch = next(iter(weighted.data.train))
    for column, name in enumerate(DEFAULT_INT_NAMES):
        assert torch.equal(batch.sparse_features[name].weights(), batch.dense_features[:, column])


def test_scalars_of_held_out_lines_move_no_bucket_of_the_training_lines(tmp_path):
    """Buckets and their order by frequency: so many equal values would be a bucket near the top."""
    lines = [criteo_line(i) for i in range(200)]
    folders = [tmp_path / "published", tmp_path / "changed"]
    for folder in folders:
        folder.mkdir()
    write(folders[0] / "train.txt", lines)
    recipe = criteo.fm(folders[0], embedding_dim=2)
    for row in torch.cat([split.rows for split in splits_of(recipe)[1:]]).tolist():
        label, *rest = lines[row].split("\t")
        lines[row] = "\t".join([label, *["8"] * len(DEFAULT_INT_NAMES), *rest[len(DEFAULT_INT_NAMES) :]])
    write(folders[1] / "train.txt", lines)
    changed = criteo.fm(folders[1], embedding_dim=2)
    for batch, other in zip(recipe.data.train, changed.data.train, strict=True):
        assert torch.equal(batch.sparse_features.values(), other.sparse_features.values())
    held_out = [next(iter(built.data.test)).sparse_features.values() for built in (recipe, changed)]
    assert not torch.equal(*held_out)


FOLDERS = {
    "movielens": "ml-1m",
    "criteo": "criteo-kaggle-137k",
    "anime": "second",
    "lastfm_tags": "second",
    "amazon_sports": "second",
}
FILES = {
    "movielens": "ratings.dat",
    "criteo": "train.txt",
    "anime": "anime.tsv",
    "lastfm_tags": "lastfm_tag_ctr.tsv",
    "amazon_sports": "amazon_sports_seq.tsv",
}


@pytest.mark.real_data
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "synthetic:demo"])
def test_the_publishers_files(real_data, name):
    recipe = RECIPES[name](real_data / FOLDERS[name.split(":")[0]])
    loss, (_, predictions) = TrainTask(recipe.model, recipe.loss)(next(iter(recipe.data.train)))
    assert torch.isfinite(predictions).all()
    if name != "criteo:simple_deepfm":  # starts far off: its pairwise products of dense embeddings are added up
        assert float(loss.detach()) < (0.8 if isinstance(recipe.loss, nn.BCEWithLogitsLoss) else 3)


def test_found_by_name():
    assert load_recipe("examples.movielens:mf") is movielens.mf


NEED_DATA = [recipe for name, recipe in RECIPES.items() if name != "synthetic:demo"] + [criteo.dlrm_from_checkpoint]


@pytest.mark.parametrize("recipe", NEED_DATA)
def test_no_data_folder_and_no_file_in_it(recipe, tmp_path, monkeypatch):
    spec = f"{recipe.__module__}:{recipe.__name__}"
    with pytest.raises(ValueError, match=rf"^recipe '{spec}': expected a data folder, got none; get it from .+"):
        recipe(None)
    if recipe is criteo.dlrm_from_checkpoint:  # its checkpoint is looked for first
        save_file({"w": torch.zeros(1)}, tmp_path / "checkpoint.safetensors")
    wanted = FILES[recipe.__module__.split(".")[1]]
    others = r"\['checkpoint\.safetensors'\]" if recipe is criteo.dlrm_from_checkpoint else "an empty folder"
    for got in (others, r"\[.*'other\.txt'\]"):
        with pytest.raises(ValueError, match=rf"expected {wanted}\[\.gz\].*, got {got}; get it from .+"):
            recipe(tmp_path)
        (tmp_path / "other.txt").touch()


def test_demo_takes_no_data(tmp_path):
    with pytest.raises(ValueError, match="expected no data folder"):
        synthetic.demo(tmp_path)


class TestDlrmFromCheckpoint:
    @pytest.fixture
    def weights(self, data) -> dict[str, torch.Tensor]:
        return criteo.dlrm(data, embedding_dim=8, seed=0).model.state_dict()

    def test_starts_from_the_weights(self, data, weights):
        save_file({key: value + 1 for key, value in weights.items()}, data / "checkpoint.safetensors")
        recipe = criteo.dlrm_from_checkpoint(data)
        loaded = recipe.model.state_dict()
        assert all(torch.equal(loaded[key], value + 1) for key, value in weights.items())
        assert recipe.dense_learning_rate == criteo.dlrm(data).dense_learning_rate < 1e-3

    def test_torch_file_of_a_wrapper_named_in_the_environment(self, data, weights, monkeypatch, tmp_path_factory):
        path = tmp_path_factory.mktemp("elsewhere") / "dlrm.pt"
        wrapped = DLRMTrain(criteo.dlrm(data, embedding_dim=8, seed=0).model)
        torch.save(wrapped.state_dict(), path)
        monkeypatch.setenv("DNIS_CHECKPOINT", str(path))
        loaded = criteo.dlrm_from_checkpoint(data).model.state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in weights.items())

    def test_another_embedding_dim_starts_from_scratch(self, data, weights):
        save_file(weights, data / "checkpoint.safetensors")
        recipe = criteo.dlrm_from_checkpoint(data, embedding_dim=3)
        tables = tables_of(recipe.model)
        assert {config.embedding_dim for config in tables.embedding_bag_configs()} == {3}

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda weights: weights.pop("over_arch.model.1.bias"), r"expected keys over_arch\.model\.1\.bias"),
            (lambda weights: weights.update(extra=torch.zeros(1)), "expected only keys of torchrec's DLRM, got extra"),
            (
                lambda weights: weights.update(
                    {"sparse_arch.embedding_bag_collection.embedding_bags.cat_4.weight": torch.zeros(2, 8)}
                ),
                r"embedding_bags\.cat_4\.weight: \(7, 8\) \(found \(2, 8\)\)",
            ),
            (lambda weights: weights.clear() or weights.update(w=torch.zeros(1)), r"expected a state dict of .*'w'"),
        ],
    )
    def test_what_does_not_fit_is_named(self, data, weights, damage, message):
        damage(weights)
        save_file(weights, data / "checkpoint.safetensors")
        with pytest.raises(ValueError, match=message):
            criteo.dlrm_from_checkpoint(data)

    def test_missing_and_foreign_files(self, data, monkeypatch):
        with pytest.raises(ValueError, match=r"checkpoint\.safetensors: expected a file.*DNIS_CHECKPOINT"):
            criteo.dlrm_from_checkpoint(data)
        (data / "checkpoint.safetensors").write_bytes(b"not safetensors")
        with pytest.raises(ValueError, match="expected a safetensors file"):
            criteo.dlrm_from_checkpoint(data)
        monkeypatch.setenv("DNIS_CHECKPOINT", str(data / "pickled.pt"))
        torch.save(nn.Linear(1, 1), data / "pickled.pt")
        with pytest.raises(ValueError, match="weights_only"):
            criteo.dlrm_from_checkpoint(data)
