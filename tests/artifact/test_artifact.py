"""Artifacts: what is written is what is read, in either form and any number of files; whole or not at all."""

import hashlib
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from torch import Tensor

from dnis_torchrec.artifact import manifest as manifests
from dnis_torchrec.artifact import write
from dnis_torchrec.artifact.load import load, read_scheme, serve
from dnis_torchrec.artifact.manifest import CARD, read_manifest
from dnis_torchrec.artifact.write import card_of, write_artifact
from dnis_torchrec.blocks.codes import WIDTHS
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data import files
from dnis_torchrec.scheme import FORMS, MixedDimensionScheme
from dnis_torchrec.serving import PackedEmbeddingBagCollection
from tests import reference
from tests.artifact.reader import DOCUMENT, DTYPES, Reader

MANY = {"suppress_health_check": [HealthCheck.function_scoped_fixture], "deadline": None}


def all_values(path: Path, form: str | None = None) -> Tensor:
    return load(path, form=form)(reference.all_rows()).values()


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def shards_of(path: Path) -> list[dict[str, Any]]:
    tables = read_manifest(path)["tables"].values()
    return [shard for table in tables for of_form in table["shards"].values() for shard in of_form]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemes and dense states do not fit into the smallest files: it is the tables that are tried."""
    group = write.write_group
    monkeypatch.setattr(write, "write_group", lambda folder, stem, tensors, _: group(folder, stem, tensors, 2**31))


# ---- round trips


@settings(max_examples=10, phases=(Phase.explicit, Phase.generate), **MANY)
@given(reference.cases(), st.integers(0, 999), st.sampled_from([280, 420, 700, 2_000_000_000]), st.booleans())
def test_both_forms_serve_the_tables_in_any_number_of_files(
    tmp_path: Path, small_files: None, case: reference.Case, seed: int, max_file_bytes: int, has_codes: bool
) -> None:
    weights = case.tables
    if has_codes:
        case, weights = reference.coded_case(case, seed)
    expected, path = case.expected(), tmp_path / "a"
    try:
        write_artifact(weights, case.scheme, path, forms=FORMS, overwrite=True, max_file_bytes=max_file_bytes)
    except ValueError as error:
        assert "a row within" in str(error)  # noqa: PT017
        return
    sizes = [file.stat().st_size for form in FORMS for file in (path / form).glob("*")]
    assert max(sizes, default=0) <= max_file_bytes
    for form in FORMS:
        out = load(path, form=form)(case.kjt())
        assert out.keys() == list(expected)
        for name, pooled in out.to_dict().items():
            torch.testing.assert_close(pooled, expected[name], rtol=1e-5, atol=2e-5)
        other = write_artifact(weights, case.scheme, tmp_path / "b", forms=[form], overwrite=True)
        for name, table in case.tables.items():
            torch.testing.assert_close(
                reference.whole_table(other, name), table, rtol=1e-6, atol=0 if not has_codes else 1e-6
            )
            assert reference.whole_table(other, name).equal(reference.whole_table(path, name))


def test_each_form_is_made_of_the_other_bit_for_bit(tmp_path: Path) -> None:
    for write_them, tables, scheme in (
        (reference.write_two_tables, *reference.two_tables()),
        (reference.write_coded_tables, *reference.coded_tables()),
    ):
        both = write_artifact(tables, scheme, tmp_path / "both", forms=FORMS, overwrite=True)
        for form in FORMS:
            one = write_artifact(tables, scheme, tmp_path / form, forms=[form], overwrite=True)
            assert read_manifest(one)["forms"] == [form]
            for wanted in (None, *FORMS, "mixed_dimension_fp32"):
                assert all_values(one, wanted).equal(all_values(both))
            assert serve(scheme, tables, form)(reference.all_rows()).values().equal(all_values(both))
            manifest = read_manifest(one)
            for name, table in scheme.tables.items():
                (shard,) = manifest["tables"][name]["shards"][form]
                tensors = manifests.read_artifact_file(one, manifest, shard["file"])
                assert table.file_bytes(form) == sum(tensor.nbytes for tensor in tensors.values())
        assert write_them is not reference.write_two_tables or all_values(both).equal(
            torch.cat([tables["movie/seen"], tables["user"]], dim=1)
        )


def test_scheme_state_and_run_come_back(tmp_path: Path) -> None:
    for path, scheme in (
        (reference.write_two_tables(tmp_path / "a"), reference.two_tables()[1]),
        (reference.write_coded_tables(tmp_path / "b"), reference.coded_tables()[1]),
    ):
        again = read_scheme(path)
        assert (again.to_json(), list(again.tables)) == (scheme.to_json(), list(scheme.tables))
        tensors = again.to_tensors()
        assert tensors.keys() == scheme.to_tensors().keys()
        for name, tensor in scheme.to_tensors().items():
            assert tensors[name].equal(tensor)
            assert tensors[name].dtype == tensor.dtype
        assert reference.load_dense_state(path)["step"].item() == 7
        assert read_manifest(path)["run"] == {"seed": 3}
        assert read_manifest(path)["bytes"] == scheme.exact_bytes()


def test_dense_states(tmp_path: Path) -> None:
    def stored(state: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        path = write_artifact(*reference.two_tables(), tmp_path / "a", dense_state=state, overwrite=True, **options)
        return reference.load_dense_state(path)

    tied = torch.randn(4, 4)
    assert stored({"a": tied, "b": tied.t()})["b"].equal(tied.t())
    assert stored({}) == {}
    state = {f"layer{index}": torch.randn(100) for index in range(5)}
    again = stored(state, max_file_bytes=1400)
    names = ["dense_state.safetensors", "dense_state_1.safetensors", "dense_state_2.safetensors"]
    assert read_manifest(tmp_path / "a")["dense_state"] == names
    assert list(again) == list(state)
    assert all(again[name].equal(tensor) for name, tensor in state.items())


def test_the_manifest_says_what_there_is(tmp_path: Path) -> None:
    path, (_, scheme) = reference.write_two_tables(tmp_path / "a"), reference.two_tables()
    manifest = read_manifest(path)
    assert (manifest["format"], manifest["format_version"]) == ("dnis-torchrec-artifact", "1.4")
    assert manifest["parameters"] == scheme.parameters
    assert {"dnis-torchrec", "torch", "torchrec", "python"} < manifest["versions"].keys()
    movie = manifest["tables"]["movie/seen"]
    assert (movie["collection"], movie["feature_names"], movie["pooling"]) == ("ebc", ["movie"], "mean")
    assert movie["blocks"][1] == {"rows": 3, "embedding_dim": 2, "columns": [1, 3]}
    of_form = {"mixed_dimension": reference.MIXED_FILE, "packed": reference.PACKED_FILE}
    assert movie["shards"] == {form: [{"file": file, "first_row": 0, "num_rows": 10}] for form, file in of_form.items()}
    on_disk = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json", CARD}
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    of_packed = [name for name in on_disk if name.startswith(("packed/", "directories"))]
    sizes = [(path / name).stat().st_size for name in of_packed]
    assert manifest["bytes_on_disk"]["packed"] == sum(sizes)


def test_several_collections(tmp_path: Path) -> None:
    for tables, scheme in (reference.two_tables(), reference.coded_tables()):
        moved = {name: replace(table, collection=name[:4]) for name, table in scheme.tables.items()}
        path = write_artifact(tables, MixedDimensionScheme(moved), tmp_path / "a", overwrite=True)
        whole = write_artifact(tables, scheme, tmp_path / "whole", overwrite=True)
        with pytest.raises(ValueError, match=r"expected collection=.*\['movi', 'user'\]"):
            load(path)
        with pytest.raises(ValueError, match="collection 'usr': expected a known collection"):
            load(path, collection="usr")
        out = load(path, collection="user")(reference.all_rows())
        assert out.keys() == ["user"]
        assert out.values().equal(load(whole)(reference.all_rows()).to_dict()["user"])


def test_names_that_look_alike_as_files(tmp_path: Path) -> None:
    routing, retained = RowRouting(2, 1, boundaries=torch.tensor([0, 2])), torch.ones(1, 2, dtype=torch.bool)
    names = ["a b", "a/b", "a_b", "Ä" * 127]
    schemes = {name: reference.table_scheme(name, routing, retained, feature_names=(f"f{name}",)) for name in names}
    tables = {name: torch.randn(2, 2) for name in names}
    path = write_artifact(tables, MixedDimensionScheme(schemes), tmp_path / "a", forms=FORMS)
    assert names_in(tmp_path) == ["a"]
    assert all(reference.whole_table(path, name).equal(tables[name]) for name in names)


def test_a_table_is_cut_where_its_bytes_are(tmp_path: Path) -> None:
    routing = RowRouting(400, 2, boundaries=torch.tensor([0, 100, 400]))
    retained = torch.tensor([[True] * 8, [True] + [False] * 7])
    weight = torch.randn(400, 8) * retained[routing.all_blocks()]
    scheme = MixedDimensionScheme({"t": reference.table_scheme("t", routing, retained)})
    path = write_artifact({"t": weight}, scheme, tmp_path / "a", max_file_bytes=2000, forms=FORMS)
    for form in FORMS:
        shards = read_manifest(path)["tables"]["t"]["shards"][form]
        assert len({shard["num_rows"] for shard in shards[:-1]}) > 1  # fewer of the long ones
        assert (
            load(path, form=form)(reference.keyed_jagged_tensor({"f": [[(i, 1.0)] for i in range(400)]}))
            .values()
            .equal(weight)
        )
    sizes = [(path / shard["file"]).stat().st_size for shard in shards_of(path)]
    assert max(sizes) <= 2000


# ---- the document is enough


@pytest.mark.parametrize("max_file_bytes", [2_000_000_000, 1500])
@pytest.mark.parametrize("has_codes", [False, True])
def test_a_reader_made_of_the_document_reads_the_same(
    tmp_path: Path, small_files: None, max_file_bytes: int, has_codes: bool
) -> None:
    """Uint8 and uint16 maps, routing by boundaries and by map, rows of no block, single values pruned."""
    torch.manual_seed(0)
    routings = {
        "narrow/table": RowRouting(90, 2, boundaries=torch.tensor([0, 20, 80])),
        "wide": RowRouting.from_map(torch.randint(0, 4, (60,)), 3),
    }
    tables, schemes = {}, {}
    for (name, routing), dim in zip(routings.items(), (16, 40), strict=True):
        retained = torch.rand(routing.num_blocks, dim) < 0.3
        rows = torch.cat([retained, torch.zeros(1, dim, dtype=torch.bool)])[routing.all_blocks()]
        tables[name] = torch.randn(len(rows), dim) * rows * (torch.rand(len(rows), dim) < 0.8)
        schemes[name] = reference.table_scheme(name, routing, retained, feature_names=(name,))
        if has_codes:
            schemes[name], tables[name] = (
                reference.with_codes(schemes[name], widths=WIDTHS),
                torch.randn(len(rows), dim),
            )
    state, scheme = {"layer": torch.arange(3.0).double()}, MixedDimensionScheme(schemes)
    options = {"forms": FORMS, "dense_state": state, "max_file_bytes": max_file_bytes}
    path = write_artifact(tables, scheme, tmp_path / "a", **options)
    reader = Reader(path)
    reader.verify()
    assert list(reader.manifest["tables"]) == list(tables)
    for name, weight in tables.items():
        expected = reference.rounded(schemes[name], weight) if has_codes else weight
        for form in FORMS:
            values = torch.from_numpy(reader.dense(name, form))
            torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6 if has_codes else 0)
    assert (len(shards_of(path)) > 4) == (max_file_bytes == 1500)
    (name,) = reader.manifest["dense_state"]
    assert reader.tensors(name)["layer"].tolist() == [0.0, 1.0, 2.0]
    text, table = DOCUMENT.read_text(encoding="utf-8"), reader.manifest["tables"]["wide"]
    shard, file = table["shards"]["packed"][0], reader.manifest["files"][name]
    fields = [*reader.manifest, *table, *file, *shard, *file["tensors"]["layer"], *table["blocks"][0], *FORMS, *DTYPES]
    assert [field for field in fields if f"`{field}`" not in text and f'"{field}"' not in text] == []


# ---- what loading costs


def test_a_table_in_one_file_stays_in_it(tmp_path: Path) -> None:
    served = load(reference.write_coded_tables(tmp_path / "a"))
    assert isinstance(served, PackedEmbeddingBagCollection)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "packed/" in line]
    for name, buffer in served.tables.named_buffers():
        if name.endswith("/rows"):
            spans = [[int(end, 16) for end in fields[0].split("-")] for fields in mapped]
            assert any(first <= buffer.data_ptr() < last for first, last in spans), name


# ---- writing is refused, or fails, and nothing is left


def changed(row: int, column: int, value: float, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    tables, _ = reference.two_tables()
    tables = {name: weight.to(dtype) for name, weight in tables.items()}
    tables["user"][row, column] = value
    return {"tables": tables}


def wrong_arguments() -> Iterator[tuple[str, type[Exception], dict[str, Any]]]:
    tables, scheme = reference.two_tables()
    fewer = replace(scheme.tables["user"], num_retained=17)
    for value in (float("nan"), float("inf"), float("-inf")):
        yield "table 'user'.* row 3", ValueError, changed(3, 1, value)
    yield "table 'user'.* row 3", ValueError, changed(3, 1, 1e300, torch.float64)  # not finite in float32
    yield "table 'user'.*outside", ValueError, changed(2, 0, 1.0)  # of a dropped column
    yield "table 'user'.*outside", ValueError, changed(9, 0, 1.0)  # of a dropped row
    yield "table 'user'.*num_retained=17", ValueError, {"scheme": MixedDimensionScheme({"user": fewer})}
    yield "table 'user'", ValueError, {"tables": {"movie/seen": tables["movie/seen"], "usr": tables["user"]}}
    yield "table 'user'", ValueError, {"tables": tables | {"user": torch.zeros(10, 4)}}
    yield "table 'user'", TypeError, {"tables": tables | {"user": torch.zeros(10, 5).long()}}
    yield "scheme", ValueError, {"scheme": MixedDimensionScheme()}
    yield "forms", ValueError, {"forms": []}
    yield "forms", ValueError, {"forms": ["packed", "packed"]}
    yield "form 'paked'", ValueError, {"forms": ["paked"]}
    yield r"form 'csr_int8'.*0\.1\.0", ValueError, {"forms": ["csr_int8"]}
    yield "run", ValueError, {"run": {"loss": float("nan")}}
    yield "run", ValueError, {"run": {"path": Path()}}
    yield "run.*seed", ValueError, {"run": {"seed": "three"}}
    yield "dense_state 'epoch'", TypeError, {"dense_state": {"epoch": 3}}
    yield "tensor 'big'", ValueError, {"dense_state": {"big": torch.zeros(400)}, "max_file_bytes": 1300}
    yield "table .*a row within", ValueError, {"max_file_bytes": 100}


WRONG = list(wrong_arguments())


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_arguments_are_refused(tmp_path: Path, number: int) -> None:
    place, error, changes = WRONG[number]
    tables, scheme = reference.two_tables()
    with pytest.raises(error, match=place):
        write_artifact(**{"tables": tables, "scheme": scheme, "path": tmp_path / "parent" / "artifact"} | changes)
    assert names_in(tmp_path) == []


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return reference.write_two_tables(tmp_path / "artifact")


def test_only_an_artifact_is_replaced(artifact: Path, tmp_path: Path) -> None:
    tables, scheme = reference.two_tables()
    with pytest.raises(ValueError, match="overwrite=True"):
        write_artifact(tables, scheme, artifact)
    (tmp_path / "link").symlink_to(artifact)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    for content in (None, "[]", "{}", "not JSON"):
        if content is not None:
            (home / "manifest.json").write_text(content)
        for target in (home, tmp_path / "link"):
            with pytest.raises(ValueError, match="expected an old artifact to overwrite"):
                write_artifact(tables, scheme, target, overwrite=True)
    assert (home / "thesis.txt").read_text() == "years of work"
    assert read_manifest(artifact)["run"] == {"seed": 3}
    (artifact / "mark").touch()
    write_artifact(tables, scheme, artifact, run={"seed": 4}, overwrite=True)
    assert read_manifest(artifact)["run"] == {"seed": 4}
    assert not (artifact / "mark").exists()
    assert names_in(tmp_path) == ["artifact", "home", "link"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("module", "function"),
    [
        *((write, "count_values"), (write, "write_manifest"), (manifests, "save_file")),
        *((files, "_flush"), (files.os, "rename")),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_leaves_nothing_behind(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, module: Any, function: str, error: BaseException, overwrite: bool
) -> None:
    tables, scheme = reference.two_tables()
    calls: list[str] = []
    original = getattr(module, function)

    def fail(*arguments: object, **keywords: object) -> object:
        calls.append(function)
        if len(calls) == 2 or function not in ("count_values", "save_file"):  # half way, where there is a way
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(module, function, fail)
    target = artifact if overwrite else artifact.parent / "other"
    with pytest.raises(type(error)):
        write_artifact(tables, scheme, target, run={"seed": 4}, overwrite=overwrite)
    assert names_in(artifact.parent) == ["artifact"]
    assert read_manifest(artifact)["run"] == {"seed": 3}
    load(artifact)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writes beyond fail in the middle of a file, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("limit", "size"), [(400, 5000), (2000, 5000), (2000, 1)])
def test_a_full_disk_leaves_the_old_artifact_and_nothing_else(tmp_path: Path, limit: int, size: int) -> None:
    """The first file, or one in the middle, or the manifest alone does not fit."""
    tables, scheme = reference.two_tables()
    path = write_artifact(tables, scheme, tmp_path / "artifact", run={"seed": 3})
    for target in (path, tmp_path / "new" / "artifact"):
        with pytest.raises(OSError, match="File too large"), files_of_at_most(limit):
            write_artifact(tables, scheme, target, dense_state={"layer": torch.zeros(size)}, overwrite=True)
        assert names_in(tmp_path) == ["artifact"]
    assert read_manifest(path)["run"] == {"seed": 3}
    load(path, verify=True)


# ---- the model card


def rows_below(heading: str, card: str) -> list[list[str]]:
    """Cells of the table below a heading, its head and ruler left out."""
    section = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]


def test_the_card_says_tables_bytes_metrics_and_origin(tmp_path: Path) -> None:
    tables, scheme = reference.coded_tables()
    run = {"recipe": "shop:recipe", "seed": 3, "metrics": {"auc": 0.8125}}
    card = (write_artifact(tables, scheme, tmp_path / "a", run=run) / CARD).read_text(encoding="utf-8")
    for row, table in zip(rows_below("Tables", card), scheme.tables.values(), strict=True):
        assert row[1:5] == [", ".join(table.feature_names), "10", "5", "4, 3, 0"]
        assert row[5:] == ["11.8, 1.8, 0.0", f"{table.served_bytes('packed'):,}"]
    assert f"{scheme.compression('packed'):.2f} times smaller: {scheme.served_bytes('packed'):,} bytes" in card
    origin = rows_below("Where it comes from", card)
    assert origin[:2] == [["recipe", "shop:recipe"], ["seed", "3"]]
    assert ["auc", "0.8125"] in origin


@pytest.mark.parametrize(
    "name", ["a|b", "![x](http://y)", "<b>", "`x`", "two\nlines", "\x1b[2J", "**x** _y_", "&lt;", "\\|", "~~x~~"]
)
def test_names_of_others_are_text_where_a_browser_shows_the_card(name: str) -> None:
    odd = {name: replace(next(iter(reference.two_tables()[1].tables.values())), name=name)}
    card = card_of(MixedDimensionScheme(odd), {"versions": {}, "run": {}})
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(card)
    (row,) = re.findall("<tr>(.*?)</tr>", page.split("Tables</h2>")[1].split("<h2>")[0], re.DOTALL)[1:]
    cells = re.findall("<td>(.*?)</td>", row, re.DOTALL)
    assert len(cells) == 7
    assert "<" not in cells[0]
    assert unescape(cells[0]) == name.replace("\n", " ").replace("\x1b", "\\u001b")
