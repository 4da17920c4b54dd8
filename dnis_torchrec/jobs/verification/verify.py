"""verify: everything that is checked and measured before an artifact goes into production."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.artifact import exact_rows, read_manifest, read_scheme
from dnis_torchrec.artifact.forms import Rows
from dnis_torchrec.data.over_ranks import check_same, split_over_ranks
from dnis_torchrec.data.recipe import TrainTask
from dnis_torchrec.data.users_code import errors_of_its_code, named_errors
from dnis_torchrec.forms import CANONICAL_FORM, form_named
from dnis_torchrec.jobs.artifact_jobs import drop_in_, recipe_of_artifact
from dnis_torchrec.jobs.recorded import load_recorded
from dnis_torchrec.jobs.verification.findings import (
    FAILED,
    SKIPPED,
    Finding,
    found_by_ranks,
    judged,
)
from dnis_torchrec.jobs.verification.integrity import check_against_run, check_files
from dnis_torchrec.jobs.verification.latency import Latency, measure_latency
from dnis_torchrec.jobs.verification.parity import Oracle, Row, check_form
from dnis_torchrec.jobs.verification.resident import Resident, measure_resident
from dnis_torchrec.jobs.verification.served import UNCOMPRESSED_FORMS, collections_of
from dnis_torchrec.ranks import Ranks, on_rank_zero, together
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.training.evaluate import evaluate
from dnis_torchrec.training.shard import launched_ranks

METRIC_LIMITS = {"fp32": 1e-5, "codes": 1e-5, "fp16": 5e-4, "int8": 5e-4}
"""Precision -> largest difference of a form's test metrics from those of the run; int4 is not
judged."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Results of a verification."""

    artifact: str
    forms: tuple[str, ...] = ()
    findings: tuple[Finding, ...]
    resident: tuple[Resident, ...] = ()
    latency: tuple[Latency, ...] = field(default=())

    @property
    def failures(self) -> list[Finding]:
        """Findings that make the verification fail."""
        return [finding for finding in self.findings if finding.is_failure]

    def to_json(self) -> dict[str, Any]:
        """Everything, and ``"ok"``."""
        return {"ok": not self.failures, **asdict(self)}


def verify(
    artifact: Path,
    *,
    against: Path | None = None,
    recipe: str | None = None,
    data: Path | None = None,
    measure: bool = True,
    rounds: int = 100,
) -> Verification:
    """Checks an artifact: files, values, unknown ids and metric; measures memory and latency."""
    with launched_ranks() as ranks:
        return _verified(artifact, against, (recipe, data), rounds if measure else 0, ranks)


def _verified(
    artifact: Path,
    against: Path | None,
    code: tuple[str | None, Path | None],
    rounds: int,
    ranks: Ranks,
) -> Verification:
    """With a recipe and data that may be given; nothing is measured in no rounds."""
    manifest, findings = check_files(artifact, ranks)
    if manifest is None or any(finding.is_failure for finding in findings):
        return Verification(artifact=str(artifact), findings=tuple(findings))
    with together(ranks.group):
        scheme, forms = read_scheme(artifact), tuple(manifest["forms"])
    if against is not None:
        findings += check_against_run(artifact, manifest, against, ranks)
    findings += _parity(artifact, manifest, scheme, ranks)
    if code != (None, None):
        findings += _metrics(artifact, manifest, *code, ranks)
    resident: list[Resident] = []
    latency: list[Latency] = []
    if rounds:
        measured = on_rank_zero(lambda: _measured(artifact, scheme, forms, rounds), ranks.group)
        resident, latency = measured[1:]
        findings += measured[0]
    return Verification(
        artifact=str(artifact),
        forms=forms,
        findings=tuple(findings),
        resident=tuple(resident),
        latency=tuple(latency),
    )


def _measured(
    artifact: Path, scheme: MixedDimensionScheme, forms: Sequence[str], rounds: int
) -> tuple[list[Finding], list[Resident], list[Latency]]:
    findings, resident, measured = [], [], [*UNCOMPRESSED_FORMS, *forms]
    try:
        resident = measure_resident(artifact, measured)
    except RuntimeError as error:
        findings.append(Finding("memory", "all forms", FAILED, str(error)))
    return findings, resident, measure_latency(artifact, scheme, measured, rounds=rounds)


def _parity(
    artifact: Path, manifest: dict[str, Any], scheme: MixedDimensionScheme, ranks: Ranks
) -> list[Finding]:
    with together(ranks.group):
        exact = exact_rows(artifact)
    if exact is None:
        detail = f"no exact sparse rows to compare with; export with form {CANONICAL_FORM}"
        return [Finding("parity", "all forms", SKIPPED, detail)]
    parts, row = collections_of(scheme), _exact_row(exact)
    checks = [
        partial(
            check_form, artifact, form, fqn, Oracle(scheme=part, row=row), is_only=len(parts) == 1
        )
        for fqn, part in parts.items()
        for form in manifest["forms"]
    ]
    return found_by_ranks(checks, ranks)


def _exact_row(exact: Mapping[str, Rows]) -> Row:
    known: dict[tuple[str, int], Tensor] = {}

    def row(table: str, row_id: int) -> Tensor:
        if (table, row_id) not in known:
            known[table, row_id] = exact[table](row_id, row_id + 1)[0]
        return known[table, row_id]

    return row


def _metrics(
    artifact: Path, manifest: dict[str, Any], recipe: str | None, data: Path | None, ranks: Ranks
) -> list[Finding]:
    run = manifest["run"]
    if "metrics" not in run or (recipe is None and "recipe" not in run):
        return [
            Finding("metric", "all forms", SKIPPED, "the manifest names no recipe or no metrics")
        ]
    findings = []
    for form in manifest["forms"]:
        try:
            with named_errors():
                metrics = _evaluate(artifact, form, recipe, data, ranks)
        except (ValueError, TypeError, NotImplementedError) as error:
            if ranks.world_size > 1:  # the others may be waiting for this one's samples
                raise
            findings.append(Finding("metric", form, FAILED, str(error)))
            continue
        limit = METRIC_LIMITS.get(form_named(form).precision.name)
        judgement = "not judged" if limit is None else f"may be {limit:g}"
        for name in sorted(set(metrics) & set(run["metrics"])):
            change = metrics[name] - run["metrics"][name]
            detail = f"{metrics[name]:.6f}, {change:+.6f} from the run's ({judgement})"
            findings.append(
                judged("metric", f"{form}, {name}", limit is None or abs(change) <= limit, detail)
            )
    return findings


def _evaluate(
    artifact: Path, form: str, recipe: str | None, data: Path | None, ranks: Ranks
) -> dict[str, float]:
    """On the CPU, which every form runs on; the four-bit one cannot be moved elsewhere. Each rank
    has its samples."""
    with together(ranks.group):
        spec = load_recorded(artifact, read_manifest(artifact)["run"], data, recipe)
        built = recipe_of_artifact(artifact, data, recipe=recipe)
        drop_in_(built.model, artifact, form=form)
    with torch.inference_mode(), errors_of_its_code(spec):
        own = split_over_ranks(built.data, ranks)
        metrics = evaluate(
            TrainTask(built.model, built.task), own.test, built.task, torch.device("cpu")
        )
        check_same(own, ranks)
        return metrics
