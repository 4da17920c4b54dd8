"""Artifacts of bit fields are verified, evaluated, packaged and planned for: wrong values are found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dnis_torchrec.artifact import load, load_dense_state, read_scheme
from dnis_torchrec.cli import app
from dnis_torchrec.jobs.artifact_jobs import drop_in_, run_evaluate
from dnis_torchrec.jobs.packaging import Signature, export_graph, load_package, run_package
from dnis_torchrec.jobs.packaging.flat_model import FlatModel
from dnis_torchrec.jobs.packaging.torchscript import to_torchscript
from dnis_torchrec.jobs.stored_tensors import StoredTensor
from dnis_torchrec.jobs.verification import Finding, integrity, parity, resident, verify
from dnis_torchrec.jobs.verification.latency import BATCH_SIZES, measure_latency
from dnis_torchrec.jobs.verification.parity import bag_cases
from dnis_torchrec.ops.native_build import find_compiler
from dnis_torchrec.serving import PackedEmbeddingBagCollection
from tests import tiny
from tests.artifact.test_artifact_damage import restate
from tests.coded_tables import coded_tables, rounded, write_coded_tables
from tests.tiny_artifact import write_tiny_artifact

RECIPE = "tests.tiny:demo"
SIGNATURE = Signature(feature_names=("user", "genre"), num_dense=4, is_weighted=False)
needs_operator = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tables in bit fields alone."""
    return write_tiny_artifact(tmp_path_factory.mktemp("codes") / "artifact", forms=("packed",), codes=True)


def failed(findings: tuple[Finding, ...] | list[Finding]) -> dict[str, str]:
    """Subject -> detail of what failed."""
    return {finding.subject: finding.detail for finding in findings if finding.is_failure}


def test_a_whole_artifact_passes(artifact: Path) -> None:
    found = verify(artifact, recipe=RECIPE, measure=False)
    assert failed(found.findings) == {}
    tried = {finding.subject for finding in found.findings if finding.check == "parity"}
    assert tried == {f"packed: {case}" for case in bag_cases(read_scheme(artifact))}
    assert "packed, auc" in {f.subject for f in found.findings if f.check == "metric"}


def test_all_forms_of_the_same_codes_pass(tmp_path: Path) -> None:
    forms = ("packed", "csr_fp32", "csr_int8", "mixed_dimension_fp32")
    found = verify(write_tiny_artifact(tmp_path / "artifact", forms=forms, codes=True), measure=False)
    assert failed(found.findings) == {}
    assert {subject.split(":")[0] for subject in (f.subject for f in found.findings if f.check == "parity")} == {*forms}


def test_wrong_values_are_found(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(path: Path, **options: Any) -> nn.Module:
        module = load(path, **options)
        module.tables.get_buffer("user/rows")[0] ^= 1
        return module

    monkeypatch.setattr(parity, "load", loaded)
    found = failed(verify(artifact, measure=False).findings)
    assert {subject.split(":")[0] for subject in found} == {"packed"}
    assert all("user: off by" in detail for detail in found.values())


def test_values_are_within_half_a_step_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (tables, scheme) = write_coded_tables(tmp_path / "artifact"), coded_tables()
    run = SimpleNamespace(
        tables=lambda: {name: StoredTensor.of(name, value) for name, value in tables.items()},
        dense_state=lambda: load_dense_state(path),
    )
    monkeypatch.setattr(integrity.RunFolder, "open", lambda folder: run)

    def found() -> Finding:
        findings = verify(path, against=tmp_path, measure=False).findings
        assert "table movie/seen" not in failed(findings)
        return next(finding for finding in findings if finding.subject == "table user")

    assert re.fullmatch(r"off by at most (0\.[5-9]\d?|1) half steps from the run's", found().detail)
    weight, near = tables["user"].clone(), rounded(scheme.tables["user"], tables["user"])
    step = float(scheme.tables["user"].codes.scale[0, 0])
    for row, column, value, is_good in (
        (0, 0, near[0, 0] + 0.49 * step, True),
        (0, 0, near[0, 0] - 0.8 * near[0, 0].sign() * step, False),
        (0, 0, torch.tensor(9.0), False),
        (0, 0, torch.tensor(torch.nan), False),
        (0, 1, near[0, 1] * 1.0001, False),  # float32
        (0, 2, torch.tensor(9.0), True),  # dropped
        (9, 0, torch.tensor(9.0), True),  # of no block
    ):
        tables["user"] = weight.clone()
        tables["user"][row, column] = value
        assert found().is_failure != is_good, (row, column, value)
    tables["user"] = weight[:, :4]
    assert found().detail == "another shape than the run's"
    tables["user"] = weight + 1
    for key, why in (
        ("error_feedback", "error feedback moved its values before they were rounded"),
        ("turned", "it was turned into other axes than the run's"),
    ):
        restate(path, lambda manifest, key=key: manifest["run"].update({key: True}))
        assert (found().status, found().detail) == ("skipped", why)


def test_evaluates_what_it_serves(artifact: Path) -> None:
    found = run_evaluate(artifact, None, recipe=RECIPE)
    stated = json.loads((artifact / "manifest.json").read_text())["run"]["metrics"]
    assert found["metrics"] == pytest.approx(stated, abs=1e-5)
    assert found["bytes"]["packed"] < found["bytes"]["csr_fp32"]
    model = drop_in_(tiny.demo(None).model, artifact)
    assert [type(m) for m in model.modules() if isinstance(m, PackedEmbeddingBagCollection)]


def test_memory_and_latency_are_measured(artifact: Path) -> None:
    resident._warm_up(artifact, "packed")
    assert resident.measure_here(artifact, "packed").form == "packed"
    latency = measure_latency(artifact, read_scheme(artifact), ["uncompressed_fp32", "packed"], rounds=2)
    assert [(row.form, row.batch_size) for row in latency if row.form == "packed"] == [
        ("packed", b) for b in BATCH_SIZES
    ]


@needs_operator
@pytest.mark.parametrize("form", ["packed", "csr_fp32"])
def test_graph_and_torchscript_predict_what_the_model_predicts(artifact: Path, form: str) -> None:
    model = drop_in_(tiny.demo(None).model, artifact, form=form).eval()
    program = export_graph(model, SIGNATURE)
    graph, script, flat = program.module(), to_torchscript(program), FlatModel(model, SIGNATURE)
    with torch.inference_mode():
        for batch_size in (37, 1, 2):
            inputs = SIGNATURE.flatten(tiny.make_batch(batch_size, batch_size))
            torch.testing.assert_close(graph(*inputs), flat(*inputs))
            torch.testing.assert_close(script(*inputs), flat(*inputs))


@needs_operator
def test_a_package_holds_bit_fields_unless_told_otherwise(artifact: Path, tmp_path: Path) -> None:
    path = run_package(artifact, tmp_path / "package", recipe=RECIPE, kind="torchscript", name="model")
    assert json.loads((path / "package.json").read_text())["form"] == "packed"
    inputs = SIGNATURE.flatten(tiny.make_batch(9, 3))
    model = drop_in_(tiny.demo(None).model, artifact).eval()
    with torch.inference_mode():
        torch.testing.assert_close(load_package(path)(*inputs), FlatModel(model, SIGNATURE)(*inputs))


def test_a_cluster_is_planned(artifact: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(artifact), "--json", str(tmp_path / "plan.json"), "--world-size", "1"])
    assert done.exit_code == 0, done.output
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert 0 < plan["after"]["training_bytes"] < plan["before"]["training_bytes"]
