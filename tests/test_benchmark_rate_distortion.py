"""The benchmark of rate and distortion: what it measures, what it keeps, and how it judges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks import rate_compress, rate_distortion, rate_memory, rate_methods, rate_models, rate_summary
from benchmarks.rate_methods import Wanted
from benchmarks.rate_models import Case, Trained
from benchmarks.rate_summary import Differences, Row
from dnis_torchrec.allocation.bits import Allocation
from dnis_torchrec.blocks.codes import decode_rows, encode_rows
from dnis_torchrec.data.recipe import Recipe
from examples.models import NeuMF, build_neumf_tables
from tests import tiny

RECIPE = "tests.tiny:demo"


def run(path: Path, *options: str) -> list[dict[str, Any]]:
    rate_distortion.main(["--recipes", RECIPE, "--seeds", "0", "--sizes", "3", "--json", str(path), *options])
    return cast(list[dict[str, Any]], json.loads(path.read_text())["rows"])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    cache = tmp_path_factory.mktemp("cache")
    return Case(recipe=RECIPE, data=None, seed=0, embedding_l2=0.0, cache=cache)


@pytest.fixture(autouse=True)
def short_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_models, "MAX_EPOCHS", 2)


def row(method: str, size: float | str | None, metrics: dict[str, float], **fields: Any) -> Row:
    """A row of seed 0 as the benchmark writes it, where nothing else is said."""
    given = {"recipe": "examples.movielens:mf", "seed": 0, "embedding_l2": 0.03, "precision": "mixed", "bytes": 1}
    given |= {"method": method, "size": size, "compression": 1.0, "metrics": metrics, "selection": {"loss": 0.5}}
    return cast(Row, given | {"predicted_loss_increase": None, "seconds": 1.0} | fields)


def test_every_method_is_measured_in_the_bytes_that_it_serves(case: Case, tmp_path: Path) -> None:
    rows = run(tmp_path / "rates.json", "--cache", str(case.cache), "--ablations", "--search")
    measured = {(row["method"], row["precision"], row["size"]) for row in rows}
    wanted = {(w.method, w.precision, w.size) for w in rate_methods.wanted_rows([3.0], ablations=True, searches=True)}
    assert wanted - measured == {(method, "fp16", 3.0) for method in ("cut axes", "uniform")}
    dense = 4 * tiny.EMBEDDING_DIM * sum(tiny.ROWS.values())
    for found in rows:
        assert {"loss", "auc", "logloss"} <= set(found["metrics"])
        assert {"loss", "auc"} <= set(found["selection"])
        assert found["compression"] == dense / found["bytes"]
        assert isinstance(found["size"], str) or found["compression"] >= (found["size"] or 1)
        predicts = found["method"].startswith(("compress", "search"))
        assert (found["predicted_loss_increase"] is not None) == predicts
    int8_bytes = sum(tiny.ROWS.values()) * (tiny.EMBEDDING_DIM + 4)
    assert next(row["bytes"] for row in rows if row["method"] == "row-wise") == int8_bytes
    assert all(row["bytes"] <= int8_bytes for row in rows if row["size"] == "int8 rows")


def test_a_second_run_measures_what_the_first_has_left_out(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.json"
    first = run(path, "--cache", str(case.cache))
    kept = [found for found in first if found["method"] != "row-wise"]
    memory = {"rows": 9, "dim": 64, "table_bytes": 2304, "peak_bytes": 1152, "ratio": 0.5, "seconds": 1.0}
    path.write_text(json.dumps({"rows": kept, "memory": memory}))
    monkeypatch.setattr(rate_models, "_train", lambda *_: pytest.fail("the weights are in the cache"))
    capsys.readouterr()
    second = run(path, "--cache", str(case.cache))
    assert second[: len(kept)] == kept
    for again, before in zip(second[len(kept) :], first[1:3], strict=True):
        assert again | {"seconds": 0} == before | {"seconds": 0}
    assert json.loads(path.read_text())["memory"] == memory
    printed = capsys.readouterr().out
    assert "compress mixed" not in printed.split("\n\n")[0]
    assert printed.endswith("a table of 9 x 64: 0.50 of it, wanted 1.2: met\n")


def test_packed_tables_look_up_the_codes_of_the_turned_model(case: Case) -> None:
    trained = Trained(case)
    wanted = Wanted(method="compress", precision="mixed", size=3.0)
    made = rate_methods.METHODS["compress"](trained, wanted).made
    bags = cast(EmbeddingBagCollection, trained.turned.model.sparse_arch.embedding_bag_collection).embedding_bags
    decoded = EmbeddingBagCollection(tables=trained.configs)
    for name, table in made.scheme.tables.items():
        blocks = table.routing.all_blocks()
        rows = decode_rows(encode_rows(bags[name].weight.detach(), blocks, table.codes), blocks, table.codes)
        decoded.embedding_bags[name].weight.data.copy_(rows)
    features = tiny.make_batch(64, 0).sparse_features
    with made.served(torch.device("cpu")) as model:
        served = model.sparse_arch.embedding_bag_collection
        assert served(features).values().allclose(decoded(features).values(), atol=1e-6)
        assert made.embedding_bytes() == served.table_bytes() <= trained.dense_bytes // 3


def test_tables_that_may_not_be_turned_are_not_cut(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_methods, "rotation_groups", lambda model: [])
    with pytest.raises(rate_compress.UnmetError, match="may not be turned"):
        rate_methods.METHODS["cut axes"](Trained(case), Wanted(method="cut axes", precision="int8", size=3.0))


def neumf(data: Path | None, *, seed: int, embedding_dim: int | None = None) -> Recipe:
    """A recipe two of whose tables are four times as wide as its D."""
    tables = build_neumf_tables(tiny.ROWS, embedding_dim or 32)
    return replace(tiny.demo(data, seed=seed), model=NeuMF(tables, tower=(8, 4)))


@pytest.mark.parametrize(("precision", "size", "dim"), [("int8", 4.5, 26), ("int4", 8, 28)])
def test_a_smaller_d_meets_the_size_where_tables_differ_in_width(
    precision: str, size: float, dim: int, tmp_path: Path
) -> None:
    case = Case(recipe=f"{__name__}:neumf", data=None, seed=0, embedding_l2=0.0, cache=tmp_path)
    trained = Trained(case)
    served = rate_methods.METHODS["uniform"](trained, Wanted(method="uniform", precision=precision, size=size))
    assert served.extra["embedding_dim"] == dim
    assert served.made.embedding_bytes() <= trained.dense_bytes / size
    with pytest.raises(rate_compress.UnmetError, match="no D in int8 fits"):
        rate_methods.METHODS["uniform"](trained, Wanted(method="uniform", precision="int8", size=40.0))


def test_bytes_of_rows_are_spent_on_as_many_columns_as_fit() -> None:
    (table,) = tiny.make_collection(64).embedding_bag_configs()[:1]
    dense = table.num_embeddings * 256

    def fitting(precision: str, size: float) -> int:
        return rate_methods.columns_that_fit([table], precision, int(dense / size))

    assert [fitting("int8", size) for size in (8, 20, 40)] == [28, 8, 2]
    assert [fitting("int4", size) for size in (8, 20, 40)] == [56, 16, 4]
    assert fitting("fp16", 64) == 2
    for precision, size in (("int8", 64), ("int4", 64), ("fp16", 40), ("fp16", 400)):
        with pytest.raises(rate_compress.UnmetError):
            fitting(precision, size)


def test_costs_are_judged_within_each_seed() -> None:
    rows = []
    for seed, plain, own in ((0, 0.70, 0.7004), (1, 0.75, 0.7508)):
        rows += [row("uncompressed", None, {"mse": plain, "loss": plain}, seed=seed, precision="fp32")]
        rows += [row("compress", 8.0, {"mse": own, "loss": own}, seed=seed, predicted_loss_increase=0.0009)]
        rows += [row("cut axes", 8.0, {"mse": own + 0.001, "loss": own}, seed=seed, precision="int8")]
    rows.append(row("compress", 8.0, {"mse": 9.0, "loss": 9.0}, seed=2))  # its uncompressed model is not there yet
    own = Differences(rows)
    (cost,) = rate_summary.cost_lines("examples.movielens:mf", own)
    assert cost == "examples.movielens:mf at 8: mse worse by +0.00060, wanted 0.0005: MISSED by 0.0001"
    (rival,) = rate_summary.rival_lines("examples.movielens:mf", own)
    assert rival.endswith("ahead of the best of 1 rivals (cut axes, int8) by +0.00100: met")
    (prediction,) = rate_summary.prediction_lines("examples.movielens:mf", own)
    assert prediction.endswith("loss +0.00060, predicted over measured 1.50, wanted 0.5 to 2: met")


def test_a_rival_that_is_ahead_is_told_where_higher_is_better() -> None:
    rows = [
        row("uncompressed", None, {"auc": 0.8, "loss": 0.5}, precision="fp32"),
        row("compress", "int4 rows", {"auc": 0.79, "loss": 0.5}),
        row("row-wise", "int4 rows", {"auc": 0.792, "loss": 0.5}, precision="int4"),
    ]
    (rival,) = rate_summary.rival_lines("examples.movielens:ctr_fm", Differences(rows))
    assert rival.endswith("(row-wise, int4) by -0.00200: MISSED")
    rows[2]["metrics"]["auc"] = 0.790004
    (rival,) = rate_summary.rival_lines("examples.movielens:ctr_fm", Differences(rows))
    assert rival.endswith("(row-wise, int4) by -0.00000: level")
    of_seed_1 = [row("uncompressed", None, {"auc": 0.7}, seed=1), row("compress", "int4 rows", {"auc": 0.6}, seed=1)]
    (same,) = rate_summary.rival_lines("examples.movielens:ctr_fm", Differences([*rows, *of_seed_1]))
    assert same == rival, "a seed that the rival lacks does not count"


def test_time_is_what_sizes_share_once_and_their_own() -> None:
    plain = row("uncompressed", None, {"mse": 0.7, "loss": 0.7}, precision="fp32", epoch_seconds=4.0)
    sizes = [
        row("compress", size, {"mse": 0.7, "loss": 0.7}, seconds=3.0, shared_seconds=2.0) for size in (8.0, 20.0, 40.0)
    ]
    (line,) = rate_summary.time_lines("r:f", Differences([plain, *sizes]))
    assert line == "r:f: 3 sizes take 1.25 plain epochs, wanted 2: met"
    assert rate_summary.time_lines("r:f", Differences([plain, *sizes[:2]])) == []


def test_the_selection_split_chooses_the_precision_that_is_marked() -> None:
    rows = [row("uncompressed", None, {"mse": 0.7, "loss": 0.7}, precision="fp32")]
    rows += [
        row("cut axes", 8.0, {"mse": test, "loss": test}, precision=precision, selection={"loss": selection})
        for precision, selection, test in (("int8", 0.71, 0.9), ("int4", 0.72, 0.8))
    ]
    own = Differences(rows)
    assert own.chosen() == {("cut axes", "int8", 8.0)}
    marked = [line for line in rate_summary.table_lines("r:f", own) if "*" in line]
    assert [line.split(" | ")[1] for line in marked] == ["int8*"]


def test_memory_is_that_of_what_is_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def compress(prepared: rate_compress.Prepared, num_bytes: int) -> Allocation:
        budgets.append((prepared.measured.counts.counts["t"].numel(), num_bytes))
        return rate_compress.compress(prepared, num_bytes)

    monkeypatch.setattr(rate_memory, "compress", compress)
    rate_memory.measure_here(0, 20_000, str(tmp_path / "measured.json"))
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert budgets[-1] == (20_000, 20_000 * 256 // 20)
    assert measured["ratio"] == measured["peak_bytes"] / (20_000 * 256)
    assert "MISSED by" in rate_summary.memory_line(measured | {"ratio": 1.5})


def test_who_leads_is_counted_and_the_worst_case_is_named() -> None:
    def rows(recipe: str, *, search: float, compress: float) -> list[Row]:
        origin = "search" if search < compress else "compress"
        found = [row("uncompressed", None, {"mse": 1.0}), row("search", 20.0, {"mse": search}, origin=origin)]
        found += [row("compress", 20.0, {"mse": compress}), row("compress", 20.0, {"mse": 9.0}, seed=1)]
        found += [row("uncompressed", None, {"mse": 1.0}, seed=1)]
        for method, precision, mse, loss in (("uniform", "int4", 1.5, 0.4), ("cut axes", "int8", 1.1, 0.6)):
            found.append(row(method, 20.0, {"mse": mse}, precision=precision, selection={"loss": loss}))
        return found

    lines = rate_summary.search_lines(
        {
            "a": Differences(rows("a", search=0.9, compress=1.2)),
            "b": Differences(rows("b", search=1.7, compress=1.6)),
            "c": Differences(rows("c", search=1.4, compress=1.45)),
            "not searched": Differences([row("uncompressed", None, {"mse": 1.0})]),
        }
    )
    assert (
        lines[1]
        == "a at 20, mse: search worse by -0.10000; compress worse by +0.20000; uniform, int4 worse by +0.50000"
    )
    assert "search worse by +0.70000 (compress returned)" in lines[2]
    assert "search returned more than compress: 2 of 3, ahead on test: 2; " in lines[-1]
    assert "; ahead of the best rival: search in 2, compress in 2 of 3; " in lines[-1]
    assert "worst case: b at 20, -0.20000 ahead" in lines[-1]
    assert rate_summary.search_lines({}) == []


def test_quick_takes_few_and_what_is_named_stays() -> None:
    arguments = rate_distortion.parse(["--quick", "--recipes", "anime:fm,my:own", "--json", "x.json"])
    assert (arguments.recipes, arguments.seeds, arguments.sizes) == (["examples.anime:fm", "my:own"], [0], [8.0, 20.0])
    arguments = rate_distortion.parse(["--json", "x.json"])
    assert arguments.recipes == list(rate_distortion.RECIPES)
    with pytest.raises(SystemExit):
        rate_distortion.parse(["--sizes", "1", "--json", "x.json"])
