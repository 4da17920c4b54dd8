"""Artifacts: round trips; written as a whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dnis_torchrec.artifact import load, load_dense_state, read_manifest, read_scheme, write_artifact
from dnis_torchrec.artifact import manifest as artifact
from dnis_torchrec.artifact import writing as artifact_writing
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data import files
from dnis_torchrec.scheme import FORMS, MixedDimensionScheme
from tests.serving_reference import (
    MIXED_FILE,
    PACKED_FILE,
    ROUTINGS,
    Case,
    all_rows,
    cases,
    keyed_jagged_tensor,
    table_scheme,
    two_tables,
    whole_table,
    write_two_tables,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_tables(tmp_path_factory.mktemp("original") / "artifact")


@pytest.fixture
def written(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "artifact"))


FORMS_HERE = FORMS


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# Round trips


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_both_forms_give_the_pruned_tables(tmp_path: Path, case: Case) -> None:
    path = write_artifact(case.tables, case.scheme, tmp_path / "artifact", overwrite=True)
    only_csr = write_artifact(case.tables, case.scheme, tmp_path / "packed", forms=["packed"], overwrite=True)
    expected = case.expected()
    for folder in (path, only_csr):
        out = load(folder)(case.kjt())
        assert out.keys() == list(expected)
        for name, pooled in out.to_dict().items():
            torch.testing.assert_close(pooled, expected[name], rtol=1e-6, atol=1e-6)
    for name, table in case.tables.items():
        assert whole_table(path, name).equal(table)


def test_scheme_round_trip(written: Path) -> None:
    _, scheme = two_tables()
    again = read_scheme(written)
    assert again.to_json() == scheme.to_json()
    assert list(again.tables) == list(scheme.tables)
    tensors = again.to_tensors()
    assert tensors.keys() == scheme.to_tensors().keys()
    for name, tensor in scheme.to_tensors().items():
        assert tensors[name].equal(tensor)
        assert tensors[name].dtype == tensor.dtype


def test_dense_state_round_trip(tmp_path: Path, written: Path) -> None:
    state = load_dense_state(written)
    assert state["over_arch.weight"].shape == (3, 2)
    assert state["step"].item() == 7
    tied = torch.randn(4, 4)
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "tied", dense_state={"a": tied, "b": tied.t()})
    assert load_dense_state(path)["b"].equal(tied.t())
    assert load_dense_state(write_artifact(tables, scheme, tmp_path / "none")) == {}


def test_manifest_tells_everything(written: Path) -> None:
    _, scheme = two_tables()
    manifest = read_manifest(written)
    assert (manifest["format"], manifest["format_version"]) == ("dnis-torchrec-artifact", "1.1")
    assert manifest["forms"] == ["packed", "mixed_dimension"]
    assert manifest["run"] == {"seed": 3}
    assert manifest["bytes"] == scheme.exact_bytes()
    assert manifest["parameters"] == scheme.parameters
    assert {"dnis-torchrec", "torch", "torchrec", "python"} < manifest["versions"].keys()
    movie = manifest["tables"]["movie/seen"]
    assert (movie["collection"], movie["feature_names"], movie["pooling"]) == ("ebc", ["movie"], "mean")
    assert (movie["num_embeddings"], movie["embedding_dim"], movie["is_weighted"]) == (10, 5, False)
    assert movie["blocks"][1] == {"rows": 3, "embedding_dim": 2, "columns": [1, 3]}
    whole = {"first_row": 0, "num_rows": 10}
    assert movie["shards"] == {
        "mixed_dimension": [{"file": MIXED_FILE, **whole}],
        "packed": [{"file": PACKED_FILE, **whole}],
    }
    assert (manifest["scheme"], manifest["dense_state"]) == (["scheme.safetensors"], ["dense_state.safetensors"])
    on_disk = {p.relative_to(written).as_posix() for p in written.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json", "MODEL_CARD.md"}
    for name, entry in manifest["files"].items():
        content = (written / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    csr_files = [name for name in on_disk if name.startswith("packed/")]
    assert manifest["bytes_on_disk"]["packed"] == sum((written / name).stat().st_size for name in csr_files)


def test_several_collections(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    schemes = dict(scheme.tables)
    schemes["user"] = replace(schemes["user"], collection="model.other")
    path = write_artifact(tables, MixedDimensionScheme(schemes), tmp_path / "a")
    with pytest.raises(ValueError, match=r"expected collection=.*\['ebc', 'model.other'\]"):
        load(path)
    with pytest.raises(ValueError, match="collection 'othr': expected a known collection"):
        load(path, collection="othr")
    assert load(path, collection="model.other")(all_rows()).keys() == ["user"]
    assert load(path, collection="ebc")(all_rows()).keys() == ["movie"]


def test_tables_are_read_one_at_a_time(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    read = []

    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return tables[name]

        def __iter__(self) -> Iterator[str]:
            return iter(tables)

        def __len__(self) -> int:
            return len(tables)

    write_artifact(Lazy(), scheme, tmp_path / "a")
    assert read == list(scheme.tables)


def test_names_that_look_alike_as_files(tmp_path: Path) -> None:
    routing, retained = RowRouting(2, 1, boundaries=torch.tensor([0, 2])), torch.ones(1, 2, dtype=torch.bool)
    names = ["a b", "a/b", "../a", "Ä" * 300]
    schemes = {name: table_scheme(name, routing, retained, feature_names=(f"f{name}",)) for name in names}
    tables = {name: torch.randn(2, 2) for name in names}
    path = write_artifact(tables, MixedDimensionScheme(schemes), tmp_path / "a")
    assert left_in(tmp_path) == ["a"]
    for name in names:
        assert whole_table(path, name).equal(tables[name])


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from([420, 700, 1200]))
def test_shards_of_rows_serve_the_same(tmp_path: Path, case: Case, max_file_bytes: int) -> None:
    """Files as small as a row allows, in every form; also forms that are made of shards of another."""
    largest = max(artifact.file_bytes(case.scheme.to_tensors()), max_file_bytes)
    written = {"forms": list(FORMS_HERE), "overwrite": True}
    whole = write_artifact(case.tables, case.scheme, tmp_path / "whole", **written)
    path = tmp_path / "cut"
    try:
        write_artifact(case.tables, case.scheme, path, max_file_bytes=max_file_bytes, **written)
    except ValueError as error:
        assert re.search("tensor .*: expected at most|expected a row within", str(error))  # noqa: PT017
        assert largest > 420
        return
    for file in path.rglob("*.safetensors"):
        assert file.stat().st_size <= max_file_bytes
    for name, table in case.tables.items():
        assert whole_table(path, name).equal(table)
    for form in FORMS_HERE:
        torch.testing.assert_close(
            load(path, form=form)(case.kjt()).values(), load(whole, form=form)(case.kjt()).values(), rtol=0, atol=0
        )


def test_what_appears_while_a_folder_is_filled_is_not_replaced(tmp_path: Path) -> None:
    filling = files.new_folder(tmp_path / "out", kind=artifact.ARTIFACT)
    (filling.__enter__() / "new").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ValueError, match="artifact"):
        filling.__exit__(None, None, None)
    assert left_in(tmp_path) == ["out"]
    assert left_in(tmp_path / "out") == ["precious"]


def test_an_old_folder_outlives_a_disk_that_fails_at_the_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_two_tables(tmp_path / "out")

    def fails(folder: Path) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(files, "_flush", lambda folder: fails(folder) if folder == tmp_path else None)
    with (
        pytest.raises(OSError, match="input/output"),
        files.new_folder(tmp_path / "out", overwrite=True, kind=artifact.ARTIFACT) as folder,
    ):
        (folder / "new").touch()
    assert any((entry / "manifest.json").is_file() for entry in tmp_path.iterdir())


def test_a_rank_without_a_row_of_a_table_writes_nothing_of_it(tmp_path: Path) -> None:
    table = next(iter(two_tables()[1].tables.values()))
    for form in FORMS_HERE:
        written = artifact_writing.write_shards(tmp_path, form, 0, table, lambda *_: pytest.fail("read"), (5, 5))
        assert written == ([], {})
    assert left_in(tmp_path) == []


def test_a_table_is_cut_where_its_bytes_are(tmp_path: Path) -> None:
    routing = RowRouting(400, 2, boundaries=torch.tensor([0, 100, 400]))
    retained = torch.tensor([[True] * 8, [True] + [False] * 7])
    weight = torch.randn(400, 8) * retained[routing.all_blocks()]
    scheme = MixedDimensionScheme({"t": table_scheme("t", routing, retained)})
    path = write_artifact(
        {"t": weight}, scheme, tmp_path / "a", max_file_bytes=3000, forms=["packed", "mixed_dimension"]
    )
    manifest = read_manifest(path)
    shards = manifest["tables"]["t"]["shards"]
    assert all(len(of_form) > 1 for of_form in shards.values())
    sizes = [manifest["files"][shard["file"]]["bytes"] for of_form in shards.values() for shard in of_form]
    assert max(sizes) <= 3000
    ids = torch.randint(0, 400, (50,))
    assert load(path, form="packed").lookup(ids, torch.arange(51)).equal(weight[ids])
    kjt = keyed_jagged_tensor({"f": [[(int(i), 1.0)] for i in ids]})
    assert load(path, form="mixed_dimension")(kjt).values().equal(weight[ids])


def test_forms_that_are_not_held_are_made_of_the_other(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    held = write_artifact(tables, scheme, tmp_path / "held", forms=FORMS_HERE)
    made = write_artifact(tables, scheme, tmp_path / "made", forms=["packed"])
    for form in FORMS_HERE:
        assert load(made, form=form)(all_rows()).values().equal(load(held, form=form, verify=True)(all_rows()).values())
    assert read_manifest(held)["bytes_on_disk"].keys() == set(FORMS_HERE)


def test_bytes_of_a_form_are_predicted(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "a", forms=FORMS_HERE)
    manifest = read_manifest(path)
    for name, table in scheme.tables.items():
        for form, shards in manifest["tables"][name]["shards"].items():
            (tensors,) = [artifact.read_artifact_file(path, manifest, shard["file"]) for shard in shards]
            assert table.file_bytes(form) == sum(tensor.nbytes for tensor in tensors.values())


def test_policy_for_unknown_ids(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "a")
    kjt = keyed_jagged_tensor({"user": [[(10, 1.0)]], "movie": [[(-1, 1.0)]]})
    assert load(path, form="packed", unknown_ids="zero")(kjt).values().equal(torch.zeros(1, 10))
    with pytest.raises(ValueError, match=r"expected ids in 0\.\.9"):
        load(path, form="packed")(kjt)
    for form in FORMS:
        assert load(path, form=form, unknown_ids="zero")(kjt).values().equal(torch.zeros(1, 10))


def test_dense_state_in_several_files(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    state = {f"layer{index}": torch.randn(100) for index in range(5)}
    path = write_artifact(tables, scheme, tmp_path / "a", dense_state=state, max_file_bytes=1400)
    names = ["dense_state.safetensors", "dense_state_1.safetensors", "dense_state_2.safetensors"]
    assert read_manifest(path)["dense_state"] == names
    again = load_dense_state(path)
    assert list(again) == list(state)
    assert all(again[name].equal(tensor) for name, tensor in state.items())
    with pytest.raises(ValueError, match="tensor 'big': expected at most 1300 bytes"):
        write_artifact(tables, scheme, tmp_path / "b", dense_state={"big": torch.zeros(400)}, max_file_bytes=1300)


# Writing: bad input, and all or nothing


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_non_finite_values_are_refused(tmp_path: Path, value: float) -> None:
    """One that is not finite in float32, which every form is made from, is none either."""
    tables, scheme = two_tables()
    tables = {name: weight.double() for name, weight in tables.items()} if value == 1e300 else tables
    tables["user"][3, 1] = value
    with pytest.raises(ValueError, match="table 'user': expected finite values, got NaN or infinity in row 3"):
        write_artifact(tables, scheme, tmp_path / "artifact")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("row", [2, 9], ids=["dropped column", "dropped row"])
def test_values_that_were_not_pruned_are_refused(tmp_path: Path, row: int) -> None:
    tables, scheme = two_tables()
    tables["user"][row, 0] = 1.0
    with pytest.raises(ValueError, match="table 'user': expected zeros outside the retained dims, got 1 other"):
        write_artifact(tables, scheme, tmp_path / "artifact")


def test_more_values_than_the_scheme_counts_are_refused(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    fewer = table_scheme("user", ROUTINGS["user"], scheme.tables["user"].retained, num_retained=17)
    with pytest.raises(ValueError, match="table 'user': expected at most num_retained=17 values, got 18"):
        write_artifact(tables, MixedDimensionScheme({"user": fewer}), tmp_path / "artifact")


def test_other_bad_input(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    path = tmp_path / "parent" / "artifact"

    def refused(message: str, error: type[Exception] = ValueError, **changes: object) -> None:
        arguments = {"tables": tables, "scheme": scheme, "path": path} | changes
        with pytest.raises(error, match=message):
            write_artifact(**arguments)
        assert left_in(tmp_path) == []

    refused("table 'user': expected a known table", tables={"movie/seen": tables["movie/seen"], "usr": tables["user"]})
    refused(r"table 'user': expected shape \(10, 5\), got \(10, 4\)", tables=tables | {"user": torch.zeros(10, 4)})
    refused("table 'user': expected floating", TypeError, tables=tables | {"user": torch.zeros(10, 5).long()})
    refused("scheme: expected at least one table", scheme=MixedDimensionScheme())
    refused("forms: expected some of", forms=[])
    refused("forms: expected each once", forms=["packed", "packed"])
    refused("form 'cst': expected a known form, got 'cst'", forms=["cst"])
    refused("run: expected values that JSON can hold", run={"loss": float("nan")})
    refused("run: expected values that JSON can hold", run={"path": tmp_path})
    refused("dense_state 'epoch': expected a tensor, got int", TypeError, dense_state={"epoch": 3})


def test_existing_folder_is_kept(written: Path) -> None:
    tables, scheme = two_tables()
    before = (written / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=r"expected a path that does not exist.*overwrite=True"):
        write_artifact(tables, scheme, written)
    assert (written / "manifest.json").read_bytes() == before
    assert left_in(written.parent) == ["artifact"]


def test_overwrite(written: Path) -> None:
    tables, scheme = two_tables()
    (written / "leftover.txt").write_text("old")
    write_artifact(tables, scheme, written, run={"seed": 4}, overwrite=True)
    assert read_manifest(written)["run"] == {"seed": 4}
    assert not (written / "leftover.txt").exists()
    assert left_in(written.parent) == ["artifact"]


@pytest.mark.parametrize("content", [None, "[]", "{}", "not JSON"])
def test_overwrite_spares_what_is_no_artifact(tmp_path: Path, content: str | None) -> None:
    tables, scheme = two_tables()
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    if content is not None:
        (home / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="expected an old artifact to overwrite, got something else"):
        write_artifact(tables, scheme, home, overwrite=True)
    assert (home / "thesis.txt").read_text() == "years of work"


def test_overwrite_follows_no_link(written: Path) -> None:
    tables, scheme = two_tables()
    link = written.parent / "link"
    link.symlink_to(written)
    with pytest.raises(ValueError, match="expected an old artifact to overwrite"):
        write_artifact(tables, scheme, link, overwrite=True)
    assert read_manifest(written)["run"] == {"seed": 3}


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("module", "function"),
    [
        (artifact_writing, "check_table"),
        (artifact_writing, "write_manifest"),
        (artifact, "save_file"),
        (files, "_flush"),
        (files.os, "rename"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_leaves_nothing_behind(
    written: Path, monkeypatch: pytest.MonkeyPatch, module: object, function: str, error: BaseException, overwrite: bool
) -> None:
    tables, scheme = two_tables()
    calls = []
    original = getattr(module, function)

    def fails(*arguments: object, **keywords: object) -> object:
        calls.append(function)
        if len(calls) == 2 or function not in ("check_table", "save_file"):  # half way, where there is a way
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, function, fails)
    target = written if overwrite else written.parent / "other"
    with pytest.raises(type(error)):
        write_artifact(tables, scheme, target, run={"seed": 4}, overwrite=overwrite)
    assert left_in(written.parent) == ["artifact"]
    assert read_manifest(written)["run"] == {"seed": 3}
    load(written)


def test_failed_swap_in_two_renames_is_undone(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, scheme = two_tables()
    rename = os.rename

    def second_fails(source: Path, target: Path) -> None:
        if Path(target) == written and "artifact" in Path(source).name and (Path(source) / "new").exists():
            raise OSError("disk full")
        rename(source, target)

    original = artifact.write_manifest

    def marked(folder: Path, manifest: dict) -> None:
        original(folder, manifest)
        (folder / "new").touch()

    monkeypatch.setattr(artifact_writing, "write_manifest", marked)
    monkeypatch.setattr(files.os, "rename", second_fails)
    with pytest.raises(OSError, match="disk full"):
        write_artifact(tables, scheme, written, overwrite=True)
    assert left_in(written.parent) == ["artifact"]
    assert read_manifest(written)["run"] == {"seed": 3}
