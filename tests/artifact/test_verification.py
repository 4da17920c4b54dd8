"""verify: what is whole passes, every kind of damage is named, wrong values and unknown ids are found."""

from __future__ import annotations

import copy as copying
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torchrec.models.dlrm import DLRM
from typer.testing import CliRunner

import dnis_torchrec as dnis
from dnis_torchrec.artifact import verify as verification
from dnis_torchrec.artifact.export import export, load_model
from dnis_torchrec.artifact.load import exact_rows, load, load_dense_state, read_scheme
from dnis_torchrec.artifact.manifest import describe_file, read_manifest, write_manifest
from dnis_torchrec.artifact.verify import Finding, Oracle, Verification, bag_cases, compare, unknown_bags, verify
from dnis_torchrec.cli import app
from dnis_torchrec.cli.commands import served_metrics
from dnis_torchrec.data.recipe import Recipe
from dnis_torchrec.data.urls import fetch
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.serving import sequences
from tests import tiny
from tests.models import interest, make_batch
from tests.reference import pool
from tests.tiny import tables_alone, write_tiny_artifact

FORMS = ("packed", "mixed_dimension")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tables in both forms, in codes."""
    return write_tiny_artifact(tmp_path_factory.mktemp("verification") / "artifact", forms=FORMS, codes=True)


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def demo() -> Recipe:
    """The recipe of the artifact."""
    return tiny.demo(None)


def wider() -> Recipe:
    """The same with another hidden layer: the same names, other shapes."""
    model = DLRM(tiny.make_collection(), 4, [16, tiny.EMBEDDING_DIM], [8, 1])
    return replace(demo(), model=model)


def failures(result: Verification) -> dict[str, str]:
    """Subject -> detail of what failed."""
    return {finding.subject: finding.detail for finding in result.failures}


def subjects(result: Verification, check: str) -> set[str]:
    """What one check looked at."""
    return {finding.subject for finding in result.findings if finding.check == check}


def test_a_whole_artifact_passes_in_every_form(artifact: Path, remote: MemoryFileSystem) -> None:
    result = verify(artifact, measure=partial(served_metrics, artifact, demo, Ranks()))
    assert failures(result) == {}
    assert set(result.forms) == set(FORMS)
    cases = bag_cases(read_scheme(artifact))
    assert {"all empty", "all the same id", "one long bag", "random bags"} < set(cases)
    assert subjects(result, "parity") == {f"{form}: {case}" for form in FORMS for case in cases}
    assert subjects(result, "unknown ids") == {f"{form}: {how}" for form in FORMS for how in ("refused", "as zero")}
    assert subjects(result, "metric") >= {f"{form}, auc" for form in FORMS}
    remote.put(str(artifact), "/bucket/artifact", recursive=True)
    assert failures(verify(fetch("memory://bucket/artifact"))) == {}


def test_a_model_of_nothing_but_tables_has_an_empty_state(tmp_path: Path) -> None:
    path = write_tiny_artifact(tmp_path / "artifact", recipe="tests.tiny:tables_alone", forms=FORMS[1:])
    assert load_dense_state(path) == {}
    result = verify(path, measure=partial(served_metrics, path, lambda: tables_alone(None), Ranks()))
    assert failures(result) == {}
    assert len(subjects(result, "metric")) > 0
    model = tables_alone(None).model
    model.scale = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="dense weights"):
        load_model(model, path)


def test_another_models_weights_and_metrics_are_findings(artifact: Path, copy: Path) -> None:
    result = verify(artifact, measure=partial(served_metrics, artifact, wider, Ranks()))
    assert set(failures(result)) == set(FORMS) == subjects(result, "metric")
    assert all("expected shape (16, 4), got (8, 4)" in detail for detail in failures(result).values())
    manifest = read_manifest(copy)
    manifest["run"]["metrics"]["auc"] += 2e-5
    write_manifest(copy, manifest)
    result = verify(copy, measure=partial(served_metrics, copy, demo, Ranks()))
    assert set(failures(result)) == {f"{form}, auc" for form in FORMS}


# ---- damage


def flip(path: Path, position: int) -> str:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
    return path.name


def of_packed(path: Path) -> Path:
    return next(iter(sorted((path / "packed").iterdir())))


def flip_value(path: Path) -> str:
    file = of_packed(path)
    return flip(file, 8 + struct.unpack("<Q", file.read_bytes()[:8])[0] + 2)


def truncate(path: Path) -> str:
    file = of_packed(path)
    file.write_bytes(file.read_bytes()[:-3])
    return file.name


def remove(path: Path) -> str:
    file = of_packed(path)
    file.unlink()
    return file.name


def rename(path: Path) -> str:
    file = of_packed(path)
    file.rename(file.with_name("other.safetensors"))
    return file.name


def add(path: Path) -> str:
    (path / "notes.txt").write_text("mine")
    return "notes.txt"


def add_a_link(path: Path) -> str:
    (path / "elsewhere").symlink_to(path.parent, target_is_directory=True)
    return "elsewhere"


def list_a_stranger(path: Path, name: str = "evil/__init__.py") -> str:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    manifest = read_manifest(path)
    write_manifest(path, manifest | {"files": manifest["files"] | {name: describe_file(path, name)}})
    return name


def edit_manifest(path: Path) -> str:
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


DAMAGE: list[Callable[[Path], str]] = [
    lambda path: flip(of_packed(path), 12),
    lambda path: flip(path / "scheme.safetensors", -1),
    *(flip_value, truncate, remove, rename, add, add_a_link, list_a_stranger, edit_manifest, newer, foreign),
]


@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damage_of_each_kind_is_named(copy: Path, number: int) -> None:
    name = DAMAGE[number](copy)
    result = verify(copy)
    assert [finding.check for finding in result.failures] == ["checksums"]
    assert name in result.failures[0].subject + result.failures[0].detail
    assert not result.to_json()["ok"]


# ---- values


@pytest.mark.parametrize(("form", "wrong"), [("packed", "bit"), *((FORMS[1], w) for w in ("value", "zero", "nan"))])
def test_wrong_values_are_found(artifact: Path, monkeypatch: pytest.MonkeyPatch, form: str, wrong: str) -> None:
    def damage(path: Path, **options: Any) -> nn.Module:
        module = load(path, **options)
        if options["form"] == form == "packed":
            module.tables.get_buffer("user/rows")[0] ^= 1
        elif options["form"] == form:
            bags = module.blocks.embedding_bags
            row = next(bag.weight for name, bag in bags.items() if name.startswith("user/"))[0]
            change = {"value": row[-1] + 1e-3, "zero": torch.zeros(()), "nan": torch.tensor(torch.nan)}[wrong]
            with torch.no_grad():
                row[-1] = change
        return module

    monkeypatch.setattr(verification, "load", damage)
    result = failures(verify(artifact))
    assert {subject.split(":")[0] for subject in result} == {form}
    assert all("user: off by" in detail for detail in result.values())


@pytest.mark.parametrize("key", ["user", "genre"])
def test_nan_is_found_wherever_it_is(artifact: Path, key: str) -> None:
    """NaN compares with nothing, so that a maximum may pass over it."""
    oracle = Oracle(read_scheme(artifact), exact_rows(artifact))
    (bags, *_) = bag_cases(oracle.scheme).values()
    pooled = {name: value.float() for name, value in oracle.pool(bags)[0].items()}
    assert compare("parity", "form", lambda _: SimpleNamespace(to_dict=lambda: pooled), oracle, bags).status == "ok"
    pooled[key][0, 0] = float("nan")
    finding = compare("parity", "form", lambda _: SimpleNamespace(to_dict=lambda: pooled), oracle, bags)
    assert finding == Finding("parity", "form", "failed", f"{key}: off by nan, nan times what it may be")


def test_the_oracle_is_the_naive_one(artifact: Path) -> None:
    scheme, rows = read_scheme(artifact), exact_rows(artifact)
    oracle = Oracle(scheme, rows)
    for bags in bag_cases(scheme).values():
        pooled, _ = oracle.pool(bags)
        for name, table in scheme.tables.items():
            naive = pool(rows[name](0, table.num_embeddings), bags[name], table.pooling, table.is_weighted)
            torch.testing.assert_close(pooled[name].float(), naive)
    assert [[i for i, _ in bag] for bag in unknown_bags(scheme)["user"]] == [[-1], [0, 40], [2**31]]


def test_an_unknown_id_that_is_looked_up_is_found(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "load", lambda path, **options: load(path, **options | {"unknown_ids": "zero"}))
    detail = "ids [-1] were looked up without an error"
    assert failures(verify(artifact)) == {f"{form}: refused": detail for form in FORMS}


def test_sequences_are_verified_and_swapped_rows_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = interest(), [make_batch(seed) for seed in range(12)]
    loss = nn.BCEWithLogitsLoss()
    scheme = dnis.compress(copying.deepcopy(model), batches, loss=loss, compression=2.5).scheme
    path = export(model, scheme, tmp_path / "artifact", forms=FORMS)
    result = verify(path)
    assert failures(result) == {}
    assert {"packed, sequences: random bags", "packed, users: random bags"} <= subjects(result, "parity")
    single = sequences.bags_of_single_ids
    monkeypatch.setattr(sequences, "bags_of_single_ids", lambda key, ids: single(key, ids.roll(1, 0)))
    wrong = set(failures(verify(path)))
    assert "packed, sequences: random bags" in wrong
    assert not [subject for subject in wrong if "users" in subject]


def test_tables_of_other_features_are_refused_by_name(copy: Path) -> None:
    """A model would look for features that nobody looks up, or take those of one table for another's."""
    for features in (["genre"], ["user", "user"], ["client"]):
        manifest = read_manifest(copy)
        manifest["tables"]["user"]["feature_names"] = features
        write_manifest(copy, manifest)
        with pytest.raises(ValueError, match="table 'user': expected the features of the model's table"):
            load_model(demo().model, copy)


# ---- the command


def test_the_command_says_what_failed_and_exits_with_1(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path is wrapped
    copy = Path(shutil.copytree(artifact, "art[v2]:bug:"))  # markup to the library that prints tables
    result = CliRunner().invoke(app, ["evaluate", str(copy), "--verify", "--json", "good.json"])
    assert result.exit_code == 0, result.output
    assert json.loads(Path("good.json").read_text())["ok"]
    assert "art[v2]:bug:: what was checked" in result.output
    (copy / "notes[bold]").write_text("mine")
    name = flip_value(copy)
    result = CliRunner().invoke(app, ["evaluate", str(copy), "--verify", "--json", "bad.json"])
    assert result.exit_code == 1
    assert f"error: checksums, packed/{name}: expected sha256" in result.output
    assert "│ notes[bold]" in result.output
    bad = json.loads(Path("bad.json").read_text())
    wrong = {finding["subject"] for finding in bad["findings"] if finding["status"] == "failed"}
    assert (bad["ok"], wrong) == (False, {f"packed/{name}", "notes[bold]"})
