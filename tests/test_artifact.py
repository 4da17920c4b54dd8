"""Artifacts: round trips; written as a whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from scipy import sparse as scipy_sparse

from dnis_torchrec.export import (
    artifact,
    exporting,
    load,
    load_csr,
    load_dense_state,
    read_manifest,
    read_scheme,
    write_artifact,
)
from dnis_torchrec.row_routing import RowRouting
from dnis_torchrec.scheme import MixedDimensionScheme
from tests.serving_reference import (
    CSR_FILE,
    MIXED_FILE,
    ROUTINGS,
    Case,
    all_rows,
    cases,
    table_scheme,
    two_tables,
    write_two_tables,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two_tables(tmp_path_factory.mktemp("original") / "artifact")


@pytest.fixture
def written(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "artifact"))


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# Round trips


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases())
def test_both_forms_give_the_pruned_tables(tmp_path: Path, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact, "_flush", lambda folder: None)  # the disk's time, fifty times over
        path = write_artifact(case.tables, case.scheme, tmp_path / "artifact", overwrite=True)
        only_csr = write_artifact(case.tables, case.scheme, tmp_path / "csr", forms=["csr"], overwrite=True)
    expected = case.expected()
    for folder in (path, only_csr):
        out = load(folder)(case.kjt())
        assert out.keys() == list(expected)
        for name, pooled in out.to_dict().items():
            torch.testing.assert_close(pooled, expected[name], rtol=1e-6, atol=1e-6)
    for name, table in case.tables.items():
        assert load_csr(path, name).to_dense().equal(table)


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
    with pytest.raises(ValueError, match="expected the model's dense state, got none"):
        load_dense_state(write_artifact(tables, scheme, tmp_path / "none"))


def test_manifest_tells_everything(written: Path) -> None:
    _, scheme = two_tables()
    manifest = read_manifest(written)
    assert (manifest["format"], manifest["format_version"]) == ("dnis-torchrec-artifact", "1.0")
    assert manifest["forms"] == ["mixed_dimension", "csr"]
    assert manifest["run"] == {"seed": 3}
    assert manifest["bytes"] == scheme.form_bytes()
    assert manifest["parameters"] == scheme.parameters
    assert set(manifest["versions"]) == {"dnis_torchrec", "torch", "torchrec", "fbgemm_gpu", "python"}
    movie = manifest["tables"]["movie/seen"]
    assert (movie["collection"], movie["feature_names"], movie["pooling"]) == ("ebc", ["movie"], "mean")
    assert (movie["num_embeddings"], movie["embedding_dim"], movie["is_weighted"]) == (10, 5, False)
    assert movie["blocks"][1] == {"rows": 3, "embedding_dim": 2, "columns": [1, 3]}
    assert movie["files"] == {"mixed_dimension": MIXED_FILE, "csr": CSR_FILE}
    on_disk = {p.relative_to(written).as_posix() for p in written.rglob("*") if p.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json"}
    for name, entry in manifest["files"].items():
        content = (written / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    csr_files = [name for name in on_disk if name.startswith("csr/")]
    assert manifest["bytes_on_disk"]["csr"] == sum((written / name).stat().st_size for name in csr_files)


def test_scipy_files_on_request(tmp_path: Path) -> None:
    tables, scheme = two_tables()
    path = write_artifact(tables, scheme, tmp_path / "a", forms=["mixed_dimension"], scipy_formats=["coo", "csr"])
    for scipy_format in ("coo", "csr"):
        name = read_manifest(path)["tables"]["user"]["files"][f"scipy_{scipy_format}"]
        matrix = scipy_sparse.load_npz(path / name)
        assert matrix.format == scipy_format
        assert torch.from_numpy(matrix.toarray()).equal(tables["user"])
    torch.testing.assert_close(load(path)(all_rows()).to_dict()["user"], tables["user"])
    with pytest.raises(ValueError, match="table 'user': expected form 'csr'"):
        load_csr(path, "user")


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
        assert load_csr(path, name).to_dense().equal(tables[name])


# Writing: bad input, and all or nothing


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused(tmp_path: Path, value: float) -> None:
    tables, scheme = two_tables()
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
    refused("form 'cst': expected a known form, got 'cst'; did you mean 'csr'", forms=["cst"])
    refused("scipy format 'npz': expected a known scipy format", scipy_formats=["npz"])
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


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite(written: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(artifact, "_exchange", lambda first, second: False)
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
    with pytest.raises(ValueError, match="expected an artifact to overwrite, got something else"):
        write_artifact(tables, scheme, home, overwrite=True)
    assert (home / "thesis.txt").read_text() == "years of work"


def test_overwrite_follows_no_link(written: Path) -> None:
    tables, scheme = two_tables()
    link = written.parent / "link"
    link.symlink_to(written)
    with pytest.raises(ValueError, match="expected an artifact to overwrite"):
        write_artifact(tables, scheme, link, overwrite=True)
    assert read_manifest(written)["run"] == {"seed": 3}


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("module", "function"),
    [
        (exporting, "sparse_table"),
        (exporting, "write_manifest"),
        (artifact, "save_file"),
        (artifact, "_flush"),
        (artifact, "_move_into_place"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_leaves_nothing_behind(
    written: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    function: str,
    error: BaseException,
    overwrite: bool,
) -> None:
    tables, scheme = two_tables()
    calls = []
    original = getattr(module, function)

    def fails(*arguments: object, **keywords: object) -> object:
        calls.append(function)
        if len(calls) == 2 or function not in ("sparse_table", "save_file"):  # half way, where there is a way
            raise error
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, function, fails)
    target = written if overwrite else written.parent / "deep" / "er" / "artifact"
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

    monkeypatch.setattr(exporting, "write_manifest", marked)
    monkeypatch.setattr(artifact, "_exchange", lambda first, second: False)
    monkeypatch.setattr(artifact.os, "rename", second_fails)
    with pytest.raises(OSError, match="disk full"):
        write_artifact(tables, scheme, written, overwrite=True)
    assert left_in(written.parent) == ["artifact"]
    assert read_manifest(written)["run"] == {"seed": 3}


def test_whoever_serves_may_read_the_files(written: Path) -> None:
    files = [file for file in written.rglob("*") if file.suffix == ".safetensors"]
    assert files
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in files)
