"""`dnis verify`: what is whole passes, every kind of damage is named, wrong values are found."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor, nn
from torchrec.models.dlrm import DLRM
from typer.testing import CliRunner

from dnis_torchrec.artifact import load, load_csr, load_dense_state, read_manifest, read_scheme
from dnis_torchrec.artifact.manifest import describe_file, write_manifest
from dnis_torchrec.cli import app
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.urls import fetch
from dnis_torchrec.jobs.artifact_jobs import drop_in_, run_evaluate
from dnis_torchrec.jobs.verification import Finding, parity, verify
from dnis_torchrec.jobs.verification.findings import OK
from dnis_torchrec.jobs.verification.latency import BATCH_SIZES, measure_latency
from dnis_torchrec.jobs.verification.parity import Oracle, bag_cases, keyed_jagged_tensor, unknown_bags
from dnis_torchrec.jobs.verification.resident import every_row, measure_resident
from dnis_torchrec.jobs.verification.served import UNCOMPRESSED_FORMS, baseline
from dnis_torchrec.scheme import MixedDimensionScheme
from tests import tiny
from tests.serving_reference import PLAIN_FORMS, pool
from tests.tiny_artifact import tables_alone, write_tiny_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tables in every form that there is."""
    return write_tiny_artifact(tmp_path_factory.mktemp("verification") / "artifact", forms=PLAIN_FORMS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in the canonical form alone."""
    return write_tiny_artifact(tmp_path_factory.mktemp("verification") / "small", forms=("csr_fp32", "csr_fp16"))


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(small, tmp_path / "copy"))


def failed(findings: tuple[Finding, ...]) -> dict[str, str]:
    """Subject -> detail of what failed."""
    return {finding.subject: finding.detail for finding in findings if finding.is_failure}


def test_a_whole_artifact_passes_in_every_form(artifact: Path) -> None:
    found = verify(artifact, recipe="tests.tiny:demo", measure=False)
    assert failed(found.findings) == {}
    assert set(found.forms) == set(PLAIN_FORMS)
    tried = {finding.subject for finding in found.findings if finding.check == "parity"}
    cases = bag_cases(read_scheme(artifact))
    assert {"all empty", "all the same id", "one long bag", "random bags"} < set(cases)
    assert tried == {f"{form}: {case}" for form in PLAIN_FORMS for case in cases}
    assert {f.subject for f in found.findings if f.check == "metric"} >= {f"{form}, auc" for form in PLAIN_FORMS}


def test_a_model_of_nothing_but_tables_has_an_empty_state(tmp_path: Path) -> None:
    artifact = write_tiny_artifact(tmp_path / "artifact", recipe="tests.tiny_artifact:tables_alone")
    assert load_dense_state(artifact) == {}
    found = verify(artifact, recipe="tests.tiny_artifact:tables_alone", measure=False).findings
    assert failed(found) == {}
    assert {finding.status for finding in found if finding.check == "metric"} == {OK}
    of_run = read_manifest(artifact)["run"]["metrics"]
    assert run_evaluate(artifact, None)["metrics"]["auc"] == pytest.approx(of_run["auc"], abs=1e-5)
    model = tables_alone(None).model
    model.scale = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="expected the model's own dense weights, got none; export again"):
        drop_in_(model, artifact)


def wider(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """The recipe of tests/tiny.py with another hidden layer: the same names, other shapes."""
    recipe = tiny.demo(data, seed=seed, embedding_dim=embedding_dim)
    model = DLRM(tiny.make_collection(), 4, [16, tiny.EMBEDDING_DIM], [8, 1])
    return replace(recipe, model=model)


def test_another_recipes_dense_weights_are_a_finding_that_names_them(small: Path) -> None:
    found = verify(small, recipe="tests.jobs.test_verification:wider", measure=False)
    metric = {finding.subject: finding.detail for finding in found.findings if finding.check == "metric"}
    assert failed(found.findings) == metric
    assert set(metric) == {"csr_fp32", "csr_fp16"}
    message = r"small, dense_arch\S+weight: expected shape \(16, 4\), got \(8, 4\); use the recipe and data"
    assert all(re.search(message, detail) for detail in metric.values())
    with pytest.raises(ValueError, match=message):
        drop_in_(wider(None).model, small)


def damage_csr(path: Path) -> Path:
    return next(iter(sorted((path / "csr_fp32").iterdir())))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def flip_header(path: Path) -> str:
    file = damage_csr(path)
    flip(file, 12)
    return f"csr_fp32/{file.name}"


def flip_value(path: Path) -> str:
    file = damage_csr(path)
    flip(file, 8 + struct.unpack("<Q", file.read_bytes()[:8])[0] + 2)
    return f"csr_fp32/{file.name}"


def flip_last(path: Path) -> str:
    flip(path / "scheme.safetensors", -1)
    return "scheme.safetensors"


def truncate(path: Path) -> str:
    file = damage_csr(path)
    file.write_bytes(file.read_bytes()[:-3])
    return file.name


def remove(path: Path) -> str:
    file = damage_csr(path)
    file.unlink()
    return file.name


def rename(path: Path) -> str:
    file = damage_csr(path)
    file.rename(file.with_name("other.safetensors"))
    return file.name


def add(path: Path) -> str:
    (path / "notes.txt").write_text("mine")
    return "notes.txt"


def add_a_link(path: Path) -> str:
    (path / "elsewhere").symlink_to(path.parent, target_is_directory=True)
    return "elsewhere"


def add_to_the_list(path: Path, name: str = "notes.txt") -> str:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    manifest = read_manifest(path)
    write_manifest(path, manifest | {"files": manifest["files"] | {name: describe_file(path, name)}})
    return name


def add_code(path: Path) -> str:
    return add_to_the_list(path, "evil/__init__.py")


def add_as_if_for_scipy(path: Path) -> str:
    return add_to_the_list(path, "scipy/000_other.csr.npz")


def flip_manifest(path: Path) -> str:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"num_blocks": 3', '"num_blocks": 4'))
    return "manifest.json"


def newer(path: Path) -> str:
    fields = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(fields | {"format_version": "9.0"}))
    return "9.0"


def foreign(path: Path) -> str:
    (path / "manifest.json").write_text('{"format": "other"}')
    return "other"


@pytest.mark.parametrize(
    "damage",
    [
        flip_header,
        flip_value,
        flip_last,
        truncate,
        remove,
        rename,
        add,
        add_a_link,
        add_to_the_list,
        add_code,
        add_as_if_for_scipy,
        flip_manifest,
        newer,
        foreign,
    ],
)
def test_damage_of_each_kind_is_named(copy: Path, damage: Callable[[Path], str]) -> None:
    name = damage(copy)
    found = verify(copy, measure=False)
    assert [f.check for f in found.failures] == ["checksums"]
    assert name in found.failures[0].subject + found.failures[0].detail
    assert not found.to_json()["ok"]


def test_the_copy_of_a_whole_artifact_on_storage_passes(small: Path, remote: MemoryFileSystem) -> None:
    remote.put(str(small), "/bucket/artifact", recursive=True)
    found = verify(fetch("memory://bucket/artifact"), measure=False)
    assert failed(found.findings) == {}


@pytest.mark.parametrize("wrong", ["value", "zero", "nan"])
def test_wrong_values_are_found(small: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def loaded(path: Path, **options: Any) -> torch.nn.Module:
        module = load(path, **options)
        if options["form"] == "csr_fp32":
            rows = module.tables.get_buffer("user/interleaved_rows")
            pointers = load_csr(path, "user").row_pointers
            row = int(pointers.diff().nonzero()[0])
            values = slice(5 * int(pointers[row]), 5 * int(pointers[row]) + 4 * int(pointers[row + 1] - pointers[row]))
            first = rows[values].view(torch.float32).clone()
            if wrong == "value":
                first[-1] += 1e-3
            elif wrong == "zero":
                first.zero_()
            else:
                first[0] = float("nan")
            rows[values] = first.view(torch.uint8)
        return module

    monkeypatch.setattr(parity, "load", loaded)
    found = verify(small, measure=False)
    assert {subject.split(":")[0] for subject in failed(found.findings)} == {"csr_fp32"}
    assert all("user: off by" in detail for detail in failed(found.findings).values())


@pytest.mark.parametrize("key", ["user", "genre"])
def test_nan_is_found_wherever_it_is(small: Path, key: str) -> None:
    """NaN compares with nothing, so that a maximum may pass over it."""
    scheme = read_scheme(small)
    dense = {name: load_csr(small, name).to_dense() for name in scheme.tables}
    oracle = Oracle(scheme=scheme, row=lambda table, row_id: dense[table][row_id])
    (bags, *_) = bag_cases(scheme).values()
    pooled = {name: value.float() for name, value in oracle.expected(bags, 0.0)[0].items()}
    assert set(pooled) == {"user", "genre"}
    pooled[key][0, 0] = float("nan")
    served = SimpleNamespace(to_dict=lambda: pooled)
    found = parity._compare("form", lambda kjt: served, oracle, bags, 0.0)
    assert failed((found,)) == {"form": f"{key}: off by nan, nan times what it may be"}


def test_an_unknown_id_that_is_looked_up_is_found(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "load", lambda path, **options: load(path, **(options | {"unknown_ids": "zero"})))
    dense = {name: load_csr(small, name).to_dense() for name in read_scheme(small).tables}
    oracle = Oracle(scheme=read_scheme(small), row=lambda table, row_id: dense[table][row_id])
    found = parity.check_form(small, "csr_fp32", "sparse_arch.embedding_bag_collection", oracle)
    assert failed(tuple(found)) == {"csr_fp32: refused": "ids [-1] were looked up without an error"}


def test_the_oracle_is_the_naive_one(small: Path) -> None:
    scheme = read_scheme(small)
    dense = {name: load_csr(small, name).to_dense() for name in scheme.tables}
    oracle = Oracle(scheme=scheme, row=lambda table, row_id: dense[table][row_id])
    for bags in bag_cases(scheme).values():
        pooled, _ = oracle.expected(bags, 0.0)
        for name, table in scheme.tables.items():
            naive: Tensor = pool(dense[name], bags[name], table.pooling, table.is_weighted)
            torch.testing.assert_close(pooled[name].float(), naive)


def test_unknown_bags_hold_ids_on_both_sides(small: Path) -> None:
    kjt = keyed_jagged_tensor(unknown_bags(read_scheme(small)), is_weighted=False)
    assert kjt["user"].values().tolist() == [-1, 0, 40, 2**31]


def test_memory_is_measured_in_a_fresh_process(small: Path) -> None:
    rows = measure_resident(small, ["uncompressed_fp32", "csr_fp32"])
    assert [row.form for row in rows] == ["uncompressed_fp32", "csr_fp32"]
    assert all(row.touched_bytes >= 0 for row in rows)


def test_tables_of_other_features_are_refused_by_name(copy: Path) -> None:
    """A model would look for features that nobody looks up, or take those of one table for another's."""
    for features in (["genre"], ["user", "user"], ["client"]):
        manifest = read_manifest(copy)
        manifest["tables"]["user"]["feature_names"] = features
        write_manifest(copy, manifest)
        message = re.escape(
            f"{copy}, table 'user': expected the features of the model's table, ['user'], got {features}"
        )
        with pytest.raises(ValueError, match=message):
            drop_in_(tiny.demo(None).model, copy)


def test_every_row_is_looked_up_that_all_tables_of_a_feature_have(small: Path) -> None:
    tables = read_scheme(small).tables
    (batch,) = every_row(MixedDimensionScheme(tables))
    assert {key: jagged.values().unique().tolist() for key, jagged in batch.to_dict().items()} == {
        "user": list(range(40)),
        "genre": list(range(12)),
    }
    for order in (tables.items(), reversed(tables.items())):
        shared = {name: replace(table, feature_names=("shared",)) for name, table in order}
        (batch,) = every_row(MixedDimensionScheme(shared))
        assert batch["shared"].values().tolist() == list(range(12))


def test_latency_has_a_row_for_every_form_and_batch(small: Path) -> None:
    rows = measure_latency(small, read_scheme(small), ["uncompressed_fp32", "csr_fp32"], rounds=3)
    assert [(row.form, row.batch_size) for row in rows] == [
        (f, b) for b in BATCH_SIZES for f in ("uncompressed_fp32", "csr_fp32")
    ]
    assert all(0 < row.p50_ms <= row.p99_ms for row in rows)
    assert {row.ratio for row in rows if row.form == "uncompressed_fp32"} == {1.0}


@pytest.mark.parametrize("form", UNCOMPRESSED_FORMS)
def test_the_baselines_serve_all_features(small: Path, form: str) -> None:
    scheme = read_scheme(small)
    kjt = keyed_jagged_tensor(bag_cases(scheme)["random bags"], is_weighted=False)
    assert baseline(form, scheme)(kjt).values().shape == (17, 16)


def test_the_command_says_what_failed_and_exits_with_1(copy: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["verify", str(copy), "--no-measure", "--json", str(tmp_path / "good.json")])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "good.json").read_text())["ok"]
    name = flip_value(copy)
    result = CliRunner().invoke(app, ["verify", str(copy), "--no-measure", "--json", str(tmp_path / "bad.json")])
    assert result.exit_code == 1
    assert f"error: checksums, {name}: expected sha256" in result.output
    bad = json.loads((tmp_path / "bad.json").read_text())
    assert not bad["ok"]
    assert {finding["status"] for finding in bad["findings"] if finding["subject"] == name} == {"failed"}


def test_the_command_prints_names_as_they_are(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets and colons are markup to the library that prints tables."""
    artifact = Path(shutil.copytree(small, tmp_path / "art[v2]:bug:"))
    (artifact / "notes[bold]").write_text("mine")
    monkeypatch.chdir(tmp_path)  # a long path is wrapped
    result = CliRunner().invoke(app, ["verify", artifact.name, "--no-measure"])
    assert "art[v2]:bug:: what was checked" in result.output
    assert "│ notes[bold]" in result.output
