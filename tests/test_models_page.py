"""docs/models.md: each of its rows is wrapped, searched, merged, compressed and served by its own code, or refused."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torchrec.distributed.test_utils import test_model as of_torchrec
from torchrec.distributed.test_utils.test_model import ModelInput
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.compress import packed_collections
from dnis_torchrec.data.batches import WholeBatch
from dnis_torchrec.selection.shards import table_configs_of, tables_named_apart
from dnis_torchrec.serving import PackedEmbeddingBagCollection, ServedEmbeddingCollection
from examples import models
from examples.models.sequential import DeepInterestNetwork, SelfAttentiveRecommender, build_sequence_table
from tests.clients import DENSE, EASY_REC, GroupBatch, build_script_model, run_script, to_groups
from tests.models import collections, replace_, rounded, shard_densely, table_configs, tables_of, trained, unshard_
from tests.programs import blocks, table_rows
from tests.selection.test_plan import TwoDimensional
from tests.selection.test_shards import model_with
from tests.selection.test_shards import one_blocks as blocks_of_unsupported
from tests.tiny import bag_config

SIZE, LONGEST, DIM, NUM_DENSE = 32, 4, 8, 4
ROWS = {"user": 120, "item": 160, "genre": 20}
BAGS = {"user": (1, 1), "item": (1, 1), "genre": (0, 3), "history": (1, LONGEST), "candidate": (1, 1)}
"""Feature -> ids of a bag, at least and at most."""
READS = {"user": ROWS["user"], "item": ROWS["item"], "genre": ROWS["genre"]} | dict.fromkeys(
    ("history", "candidate"), ROWS["item"]
)


@dataclass
class AnyBatch(WholeBatch):
    """A batch of TorchRec's, and a bag of weighted ids beside it, for models that read a second KeyedJaggedTensor."""

    weighted_features: KeyedJaggedTensor


def make_batch(seed: int, *, is_weighted: bool = False, is_rated: bool = False) -> AnyBatch:
    """Bags of all features; a second column of labels may hold ratings."""
    generator = torch.Generator().manual_seed(seed)
    lengths = {name: torch.randint(low, high + 1, (SIZE,), generator=generator) for name, (low, high) in BAGS.items()}
    ids = [
        (READS[name] * torch.rand(int(own.sum()), generator=generator).square()).long() for name, own in lengths.items()
    ]
    values, bags = torch.cat(ids), torch.cat(list(lengths.values()))
    weights = torch.rand(len(values), generator=generator) + 0.5
    plain = KeyedJaggedTensor(keys=list(BAGS), values=values, lengths=bags)
    weighted = KeyedJaggedTensor(keys=list(BAGS), values=values, lengths=bags, weights=weights)
    scored = KeyedJaggedTensor(
        keys=["scored"], values=ids[-1] % ROWS["genre"], lengths=lengths["candidate"], weights=weights[: len(ids[-1])]
    )
    clicks = torch.randint(0, 2, (SIZE,), generator=generator).float()
    labels = torch.stack([clicks, 3 + clicks], 1) if is_rated else clicks
    dense = torch.rand(SIZE, NUM_DENSE, generator=generator)
    return AnyBatch(dense, weighted if is_weighted else plain, labels, weighted_features=scored)


def table(
    name: str, features: Sequence[str] = (), *, dim: int = DIM, pooling: PoolingType = PoolingType.SUM, rows: str = ""
) -> EmbeddingBagConfig:
    """A pooled table, of the rows of `rows`, read by the feature of its name unless told otherwise."""
    return bag_config(name, ROWS[rows or name], dim, *features, pooling=pooling)


def bags(*tables: EmbeddingBagConfig, is_weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=list(tables) or [table(name) for name in ROWS], is_weighted=is_weighted)


class Pooled(nn.Module):
    """Collections, and a tower over what they pool, side by side."""

    def __init__(self, *collections: nn.Module, width: int) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        self.over = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled = [collection(sparse_features).values() for collection in self.collections]
        return self.over(torch.cat(pooled, dim=1)).squeeze(1)


class TwoTowers(nn.Module):
    """A query tower and a candidate tower, each with a collection of its own, that meet in a dot product."""

    def __init__(self) -> None:
        super().__init__()
        self.query = bags(table("user"), table("genre"))
        self.candidate = bags(table("item", ["candidate"]))
        self.of_query, self.of_candidate = MLP(2 * DIM, [DIM, 6]), MLP(DIM, [DIM, 6])

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        query = self.of_query(self.query(sparse_features).values())
        return (query * self.of_candidate(self.candidate(sparse_features).values())).sum(1)


class FirstOrder(nn.Module):
    """A factorisation machine whose first-order weights are tables of one column."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = bags(table("user"), table("item"))
        self.singles = bags(*(table(f"{name}_weight", [name], dim=1, rows=name) for name in ("user", "item")))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pairs = self.pairs(sparse_features)
        return self.singles(sparse_features).values().sum(1) + (pairs["user"] * pairs["item"]).sum(1)


def feature_processed() -> FeatureProcessedEmbeddingBagCollection:
    """Position weights in front of a table that two features read."""
    processors = PositionWeightedModuleCollection({"history": LONGEST, "candidate": LONGEST})
    return FeatureProcessedEmbeddingBagCollection(
        bags(table("item", ["history", "candidate"]), is_weighted=True), processors
    )


def sparse_nn(**options: object) -> nn.Module:
    """TorchRec's test model on two tables with a third one of weighted bags."""
    scored = [table("scored", rows="genre")]
    return of_torchrec.TestSparseNN([table("user"), table("item")], NUM_DENSE, scored, **options)


def towers(kind: type[nn.Module]) -> nn.Module:
    tables = [table("user"), table("item"), table("history", ["history"], rows="item"), table("genre")]
    return kind(tables, NUM_DENSE, [table("scored", rows="genre")])


def both_kinds() -> nn.Module:
    histories = EmbeddingConfig(name="item", num_embeddings=ROWS["item"], embedding_dim=DIM, feature_names=["history"])
    return of_torchrec.TestMixedEmbeddingSparseArch([table("user"), table("genre"), histories], NUM_DENSE)


def multi_task() -> nn.Module:
    return models.MultiGateMixtureOfExperts(bags(), {"click": 0.0, "rating": 3.5}, num_experts=2, expert_size=6)


@dataclass(frozen=True)
class Kind:
    """A kind of model that goes through."""

    build: Callable[[], nn.Module]
    task: str = ""  # of the page; "" where its loss does
    is_weighted: bool = False
    leave_alone: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # of batches by data group; () where batches are TorchRec's


def _items() -> EmbeddingCollection:
    return build_sequence_table(ROWS["item"], DIM)


OF_MODEL_INPUT, CLICK_AND_RATING, OF_GROUPS = "OfModelInput", "ClickAndRating", "OfGroups"
"""Names of the page's tasks."""
SUPPORTED: Mapping[str, Kind] = {
    "DLRM": Kind(lambda: DLRM(bags(), NUM_DENSE, [8, DIM], [8, 1])),
    "DLRM_Projection": Kind(lambda: DLRM_Projection(bags(), NUM_DENSE, [8, DIM], [8, 1], [8, 2 * DIM], [8, 3 * DIM])),
    "DLRM_DCN": Kind(lambda: DLRM_DCN(bags(), NUM_DENSE, [8, DIM], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4)),
    "SimpleDeepFMNN": Kind(lambda: SimpleDeepFMNN(NUM_DENSE, bags(), 8, 4)),
    "DeepFM": Kind(lambda: models.DeepFM(bags(), tower=(8,))),
    "FM": Kind(lambda: models.FactorizationMachine(bags())),
    "FM, first-order tables of one column": Kind(FirstOrder),
    "Wide & Deep": Kind(lambda: models.WideDeep(bags(), tower=(8,))),
    "MF": Kind(lambda: models.MatrixFactorization(bags(table("user"), table("item")), 0.0)),
    "NeuMF": Kind(
        lambda: models.NeuMF(
            models.build_neumf_tables({name: ROWS[name] for name in ("user", "item")}, 4), tower=models.ncf_tower(4)
        )
    ),
    "Two towers": Kind(TwoTowers),
    "MMoE": Kind(multi_task, CLICK_AND_RATING),
    "DIN": Kind(lambda: DeepInterestNetwork(_items(), longest=LONGEST, attention=4, tower=(8, 4))),
    "SASRec": Kind(lambda: SelfAttentiveRecommender(_items(), longest=LONGEST, num_layers=1)),
    "TestSparseNN, weighted features": Kind(sparse_nn, OF_MODEL_INPUT),
    "TestSparseNN, position weights": Kind(lambda: sparse_nn(max_feature_lengths={"item": LONGEST}), OF_MODEL_INPUT),
    "TestTowerSparseNN": Kind(lambda: towers(of_torchrec.TestTowerSparseNN), OF_MODEL_INPUT),
    "TestTowerCollectionSparseNN": Kind(lambda: towers(of_torchrec.TestTowerCollectionSparseNN), OF_MODEL_INPUT),
    "TestMixedEmbeddingSparseArch": Kind(both_kinds, OF_MODEL_INPUT),
    "Feature processors": Kind(lambda: Pooled(feature_processed(), width=2 * DIM)),
    "Weighted bags": Kind(lambda: Pooled(bags(is_weighted=True), width=3 * DIM), is_weighted=True),
    "MEAN pooling": Kind(
        lambda: Pooled(bags(*(table(name, pooling=PoolingType.MEAN) for name in ROWS)), width=3 * DIM)
    ),
    "Several features on one table": Kind(
        lambda: Pooled(bags(table("item", ["item", "history", "candidate"])), width=3 * DIM)
    ),
    "One feature on several tables": Kind(
        lambda: Pooled(bags(table("item"), table("wide", ["item"], dim=12, rows="item")), width=DIM + 12)
    ),
    "Multi-hot bags": Kind(lambda: Pooled(bags(table("genre"), table("item", ["history"])), width=2 * DIM)),
    "Several collections": Kind(lambda: Pooled(bags(table("user")), bags(table("item")), width=2 * DIM)),
    "A table left alone": Kind(
        lambda: Pooled(bags(table("user"), table("item"), table("genre", dim=4)), width=2 * DIM + 4),
        leave_alone=("genre",),
    ),
} | {name: Kind(build, OF_GROUPS, labels=labels) for name, (build, labels) in EASY_REC.items()}
"""Row of the page -> its model."""


CPU, PAGE = torch.device("cpu"), "docs/models.md"
SCRIPT_MODELS = {"DLRM": DLRM, "DLRM_DCN": DLRM_DCN, "DLRM_Projection": DLRM_Projection}
"""Row of the page -> what torchrec_dlrm's script makes."""
COMPRESSIONS = {"compress": 3, "script": 3, "measure": 3, "loop": 10}
"""Sizes that tiny tables can reach; a search counts no scales."""
CODE = dict(
    zip(
        (
            *("compress", "wrap", "apart", "loop", "step", "merge", OF_MODEL_INPUT, CLICK_AND_RATING),
            *("batches", OF_GROUPS, "script", "serve", "measure"),
        ),
        blocks(PAGE, "python"),
        strict=True,
    )
)
SEARCH = ("wrap", "loop", "step", "merge")
SERVED = {PackedEmbeddingBagCollection: "bags", ServedEmbeddingCollection: "sequences"}


def run(code: str, names: dict[str, Any]) -> None:
    """Runs code of the page, at a size that tiny tables can reach."""
    exec(CODE[code].replace("compression=20", f"compression={COMPRESSIONS.get(code)}"), names)


def num_lines(*names: str) -> int:
    return sum(bool(line.strip()) for name in names for line in CODE[name].splitlines())


def names_for(kind: Kind) -> dict[str, Any]:
    """What stands before the page's code: a model, its data and its loss."""
    torch.manual_seed(0)
    model = kind.build()
    for name, weight in model.named_parameters():
        if "embedding" in name:
            nn.init.normal_(weight, std=0.5)
    batches = [
        make_batch(seed, is_weighted=kind.is_weighted, is_rated=kind.task == CLICK_AND_RATING) for seed in range(4)
    ]
    names: dict[str, Any] = {"dnis": dnis, "ModelInput": ModelInput, "mse_loss": mse_loss}
    names |= {"binary_cross_entropy_with_logits": binary_cross_entropy_with_logits, "loss": nn.BCEWithLogitsLoss()}
    names |= {"torch": torch, "Batch": GroupBatch, "KeyedTensor": KeyedTensor}
    names |= {"keys": list(DENSE), "lengths": [1] * len(DENSE)}
    if kind.task:
        run(kind.task, names)
        names["loss"] = names[kind.task]()
    if kind.labels:
        names["loader"] = [to_groups(batch, kind.labels) for batch in batches]
        run("batches", names)
        batches = names["batches"]
    names |= {"batches": batches[:3], "held_out": batches[3:], "leave_alone": kind.leave_alone}
    return names | {"model": model, "steps": 3}


def wrap(names: dict[str, Any]) -> None:
    """Prepares the model, after tables of one name, if any, got names of their own."""
    tables = [table.name for module in collections(names["model"]).values() for table in table_configs_of(module)]
    if len(set(tables)) < len(tables):
        run("apart", names)
    names["tables"] = table_configs(names["model"])
    run("wrap", names)


@torch.no_grad()
def predictions(task: nn.Module, names: Mapping[str, Any]) -> Tensor:
    """Of the batch that was held out; leaves a `TrainTask`, or what shards it, in evaluation mode."""
    _, (_, found) = task.eval()(names["held_out"][0])
    return torch.cat([part.flatten() for part in found.values()]) if isinstance(found, dict) else found


@torch.no_grad()
def of_nearest_codes(model: nn.Module, names: Mapping[str, Any]) -> Tensor:
    """Predictions of a plain model, value by value in its codes."""
    with tables_named_apart(model):
        nearest = rounded(model, names["found"].scheme)
    return predictions(dnis.TrainTask(nearest, names["loss"]), names)


def test_each_row_has_a_test_and_its_number_of_lines() -> None:
    found = table_rows(PAGE, "What goes through")
    assert list(found) == list(SUPPORTED)
    assert len(found) >= 20
    for name, kind in SUPPORTED.items():
        parts = ["compress", kind.task, "batches" if kind.labels else ""]
        expected = [num_lines(part) for part in parts if part]
        assert [int(lines) for lines in found[name][-1].split(" + ")] == expected, name
        assert sum(expected) <= (15 if kind.labels else 10), name
    assert (num_lines(*SEARCH), num_lines("apart")) == (8, 2)
    scripts = table_rows(PAGE, "Training scripts")
    assert list(scripts) == list(SCRIPT_MODELS)
    assert {row[-1] for row in scripts.values()} == {f"{num_lines('script')} + {num_lines('serve')}"}
    assert list(table_rows(PAGE, "What is refused")) == list(REFUSED)
    (sharded,) = table_rows(PAGE, "What is sharded").values()
    assert sharded[1] == f"yes, {num_lines('measure')} lines"


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_it_is_compressed_and_served(name: str, tmp_path: Path) -> None:
    names = names_for(SUPPORTED[name])
    model, plain = names["model"], collections(names["model"])
    before, values = predictions(dnis.TrainTask(model, names["loss"]), names), tables_of(model)
    run("compress", names)
    served = {fqn: model.get_submodule(fqn) for fqn in plain}
    found = predictions(dnis.TrainTask(model, names["loss"]), names)
    dnis.export(model, names["found"].scheme, tmp_path / "artifact")
    fresh = dnis.load_model(SUPPORTED[name].build(), tmp_path / "artifact")
    torch.testing.assert_close(predictions(dnis.TrainTask(fresh, names["loss"]), names), found, rtol=0, atol=1e-6)
    for fqn, collection in plain.items():
        replace_(model, served[fqn], collection)
    kinds = [SERVED[kind] for kind in SERVED if kind in {type(module) for module in served.values()}]
    assert table_rows(PAGE, "What goes through")[name][-2] == f"packed {' and '.join(kinds)}"
    assert names["found"].compression >= COMPRESSIONS["compress"]
    torch.testing.assert_close(found, of_nearest_codes(model, names), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, before, rtol=1e-5, atol=1e-5)  # the codes are seen
    for table in names["leave_alone"]:
        assert torch.equal(tables_of(model)[table], values[table])
        assert set(names["found"].scheme.tables[table].codes.bits.flatten().tolist()) == {32}


@pytest.mark.parametrize("name", list(SUPPORTED))
def test_it_is_wrapped_searched_and_merged(gloo: dist.ProcessGroup, name: str) -> None:
    names = names_for(SUPPORTED[name])
    task = dnis.TrainTask(names["model"], names["loss"])
    before = predictions(task, names)
    wrap(names)
    values = tables_of(names["model"])
    torch.testing.assert_close(predictions(task, names), before, rtol=1e-5, atol=1e-5)
    names["sharded"] = shard_densely(task.train())
    parameters = dict(names["sharded"].named_parameters())
    names["optimizer"] = KeyedOptimizerWrapper(parameters, lambda own: torch.optim.Adam(own, lr=0.01))
    run("loop", names)
    for _ in range(3):
        run("step", names)
    soft = predictions(names["loop"].detach(), names)
    run("merge", names)
    torch.testing.assert_close(predictions(names["merged"], names), soft, rtol=1e-5, atol=1e-5)
    merged = tables_of(names["merged"].model)
    assert {type(module) for module in collections(names["merged"].model).values()} <= {
        EmbeddingBagCollection,
        EmbeddingCollection,
    }
    searched = [table for table in merged if table not in names["leave_alone"]]
    assert any(bool((merged[table] == 0).any(1).any()) for table in searched)  # columns died
    assert all(bool((merged[table] != 0).all()) for table in names["leave_alone"])
    assert any(not torch.equal(merged[table], values[table]) for table in searched)


@pytest.mark.parametrize("name", list(SCRIPT_MODELS))
def test_a_training_script_compresses_what_it_trained(gloo, name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    batches = [make_batch(seed) for seed in range(4)]
    names: dict[str, Any] = {"torch": torch, "itertools": itertools, "DLRMTrain": DLRMTrain}
    names |= {"train_dataloader": batches[:3], "model": run_script(SCRIPT_MODELS[name], batches[:3])}
    run("script", names)
    assert names["found"].compression >= COMPRESSIONS["script"]
    names["dlrm_model"] = build_script_model(SCRIPT_MODELS[name])
    run("serve", names)
    with torch.no_grad():
        _, (_, expected, _) = names["model"].eval()(batches[3])
        logits = names["served"](batches[3].dense_features, batches[3].sparse_features).flatten()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    kinds = {type(module) for module in names["served"].modules()} & set(SERVED)
    assert table_rows(PAGE, "Training scripts")[name][-2] == f"packed {' and '.join(SERVED[kind] for kind in kinds)}"


def test_batches_by_data_group_are_refused_as_they_are() -> None:
    names = names_for(SUPPORTED["TorchEasyRec DIN"])
    with pytest.raises(TypeError, match="GroupBatch; make torchrec's Batch of it, or a WholeBatch"):
        dnis.compress(names["model"], names["loader"], loss=names["loss"])


def test_what_is_sharded_is_measured_where_it_lies(gloo: dist.ProcessGroup) -> None:
    names = names_for(SUPPORTED["DLRM"])
    names["sharded"] = dnis.shard_model(names["model"], CPU)
    on_one_rank = dnis.shard_model(names_for(SUPPORTED["DLRM"])["model"], CPU)
    assert dnis.compress(on_one_rank, names["batches"], loss=names["loss"]).compression >= 20
    run("measure", names)
    assert names["found"].compression >= COMPRESSIONS["measure"]
    plain = unshard_(names["sharded"])
    expected = of_nearest_codes(plain, names)
    ((fqn, packed),) = packed_collections(plain, names["found"].scheme).items()
    replace_(plain, plain.get_submodule(fqn), packed)
    found = predictions(dnis.TrainTask(plain, names["loss"]), names)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def refuses_collections(kind: str) -> Callable[[], None]:
    """Both ways into the project, with a model of `UNSUPPORTED`."""

    def attempt() -> None:
        model, _ = model_with(kind)
        with pytest.raises(NotImplementedError) as wrapped:
            dnis.prepare_(model, blocks_of_unsupported())
        with pytest.raises(NotImplementedError, match=re.escape(str(wrapped.value))):
            dnis.compress(model, [], loss=nn.MSELoss())
        raise wrapped.value

    return attempt


def sizes_that_vary() -> None:
    """A prepared collection is given two bags of one feature and one of another."""
    names = names_for(SUPPORTED["Weighted bags"])
    wrap(names)
    lengths = torch.ones(4, dtype=torch.int64)
    features = KeyedJaggedTensor(["user", "item", "genre"], lengths, lengths=lengths, stride_per_key_per_rank=STRIDES)
    names["model"](None, features)


def two_dimensional() -> None:
    """The loop is given a model in replicas of shards."""
    names = names_for(SUPPORTED["DLRM"])
    wrap(names)
    names |= {"sharded": TwoDimensional(dnis.TrainTask(names["model"], names["loss"])), "optimizer": None}
    run("loop", names)


def managed_and_sharded() -> None:
    """A model with managed collisions is sharded before it is prepared."""
    dnis.shard_model(trained(), CPU)


STRIDES = [[2], [1], [1]]
REFUSED: Mapping[str, Callable[[], None]] = {
    "Managed collisions, sharded while they learn ids": managed_and_sharded,
    "Rows pruned in training (ITEP)": refuses_collections("pruning in training"),
    "A subclass with a forward of its own": refuses_collections("subclass"),
    "A collection with hooks": refuses_collections("hook"),
    "Batch sizes that vary by feature (VBE)": sizes_that_vary,
    "DMPCollection": two_dimensional,
}
"""Row of the page -> what raises its error."""


@pytest.mark.parametrize("name", list(REFUSED))
def test_it_is_refused(gloo: dist.ProcessGroup, name: str) -> None:
    error = table_rows(PAGE, "What is refused")[name][0].strip("`")
    with pytest.raises(NotImplementedError, match=re.escape(error)):
        REFUSED[name]()
