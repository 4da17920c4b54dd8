"""Is the artifact the one that was written? Every file against its size and sha256, and the run
that it came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.artifact import exact_rows, load_dense_state, read_scheme
from dnis_torchrec.artifact.card import CARD
from dnis_torchrec.artifact.forms import Rows
from dnis_torchrec.artifact.manifest import MANIFEST, describe_file, read_manifest
from dnis_torchrec.artifact.writing import SCIPY_FORMATS, scipy_file
from dnis_torchrec.blocks.codes import FLOAT_BITS, is_coded
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.stored_tensors import StoredTensor
from dnis_torchrec.jobs.verification.findings import (
    FAILED,
    SKIPPED,
    Finding,
    found_by_ranks,
    judged,
)
from dnis_torchrec.ranks import Ranks, together
from dnis_torchrec.scheme import TableScheme, rows_per_chunk

CODE_ROUNDING = 2.0**-22
"""The error that choosing a code in float32 may add, as a share of the largest value that the
column's codes say."""


def check_files(
    artifact: Path, ranks: Ranks | None = None
) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Checks the manifest, then hashes every file that it lists; goes on after a bad one."""
    ranks, told = ranks or Ranks(), ""
    with together(ranks.group):
        try:
            manifest = read_manifest(artifact)
        except ValueError as error:
            told = str(error)
    told = next(filter(None, ranks.gather_texts(told)), "")
    if told:
        return None, [Finding("checksums", MANIFEST, FAILED, told)]
    files = [partial(_hashed, artifact, name, entry) for name, entry in manifest["files"].items()]
    findings = found_by_ranks([*files, partial(_unwanted, artifact, manifest)], ranks)
    return manifest, [judged("checksums", MANIFEST, True, ""), *findings]


def _hashed(artifact: Path, name: str, entry: dict[str, Any]) -> list[Finding]:
    found, expected = describe_file(artifact, name)["sha256"], entry["sha256"]
    detail = (
        f"{entry['bytes']} bytes"
        if found == expected
        else f"expected sha256 {expected}, got {found}"
    )
    return [judged("checksums", name, found == expected, detail)]


def _unwanted(artifact: Path, manifest: dict[str, Any]) -> list[Finding]:
    """A finding per file that the manifest does not list, or that nothing in it refers to."""
    findings, referred, unwanted = [], _referred(manifest), "no file of the artifact: the manifest "
    for name in manifest["files"]:
        if name not in referred:
            findings.append(
                Finding("checksums", name, FAILED, f"{unwanted}lists it, and nothing refers to it")
            )
    known = {MANIFEST, CARD, *manifest["files"]}
    for file in sorted(artifact.rglob("*")):
        name = file.relative_to(artifact).as_posix()
        if file.is_symlink() or not (file.is_dir() or name in known):
            findings.append(Finding("checksums", name, FAILED, f"{unwanted}does not list it"))
    return findings


def _referred(manifest: dict[str, Any]) -> set[str]:
    """The files that tables, scheme and dense weights are in, and where those for other programs
    would be."""
    found = {*manifest["scheme"], *manifest["dense_state"]}
    tables = manifest["tables"] if isinstance(manifest["tables"], dict) else {}
    for index, (name, table) in enumerate(tables.items()):
        found |= {scipy_file(index, name, scipy_format) for scipy_format in SCIPY_FORMATS}
        shards = table.get("shards") if isinstance(table, dict) else None
        for of_form in shards.values() if isinstance(shards, dict) else ():
            described = of_form if isinstance(of_form, list) else []
            found |= {str(shard.get("file")) for shard in described if isinstance(shard, dict)}
    return found


def check_against_run(
    artifact: Path, manifest: dict[str, Any], run_path: Path, ranks: Ranks
) -> list[Finding]:
    """Is the artifact of that run? Tables bit for bit, or as near as their codes come to them, and
    dense weights."""
    with together(ranks.group):
        run = RunFolder.open(run_path)
        tables, scheme, exact = run.tables(), read_scheme(artifact), exact_rows(artifact)
    different = sorted(set(tables) ^ set(scheme.tables))
    findings = [
        judged(
            "run",
            "tables",
            not different,
            f"in one of the two alone: {different}" if different else "",
        )
    ]
    in_both = sorted(set(tables) & set(scheme.tables))
    of_run = manifest["run"]
    if exact is None or _moved_on_purpose(of_run):
        why = _moved_on_purpose(of_run) or "the artifact holds no exact sparse rows"
        findings += [Finding("run", f"table {name}", SKIPPED, why) for name in in_both]
    else:
        with together(ranks.group):
            apart = [
                _apart(scheme.tables[name], exact[name], tables[name], ranks) for name in in_both
            ]
        furthest = ranks.max_(torch.tensor(apart, dtype=torch.float64)).tolist()
        findings += [
            _judged_table(scheme.tables[n], tables[n], far)
            for n, far in zip(in_both, furthest, strict=True)
        ]
    return findings + found_by_ranks(
        [partial(_compare_dense, artifact, run, bool(of_run.get("turned")))], ranks
    )


def _moved_on_purpose(of_run: Mapping[str, Any]) -> str:
    """Says why the values of an artifact are not those of its run, rounded; empty if they are."""
    if of_run.get("turned"):
        return "it was turned into other axes than the run's"
    return (
        "error feedback moved its values before they were rounded"
        if of_run.get("error_feedback")
        else ""
    )


def _compare_dense(artifact: Path, run: RunFolder, is_turned: bool) -> list[Finding]:
    if is_turned:
        return [Finding("run", "dense weights", SKIPPED, "they were turned along with the tables")]
    dense = run.dense_state()
    try:
        held = load_dense_state(artifact)
    except ValueError as error:
        return [Finding("run", "dense weights", SKIPPED, str(error))]
    if dense and not held:
        return [
            Finding(
                "run", "dense weights", SKIPPED, "the artifact holds none; export with dense_state"
            )
        ]
    same = held.keys() == dense.keys() and all(
        torch.equal(held[name], dense[name]) for name in held
    )
    return [judged("run", "dense weights", same, "" if same else "others than the run's")]


def _has_shape(table: TableScheme, stored: StoredTensor) -> bool:
    return tuple(stored.shape) == (table.num_embeddings, table.embedding_dim)


def _apart(table: TableScheme, exact: Rows, stored: StoredTensor, ranks: Ranks) -> float:
    """How far this rank's part of the rows is from the run's: in half steps of codes, else 0 or
    infinitely."""
    if not _has_shape(table, stored):
        return math.inf
    begin, end = ranks.share(table.num_embeddings)
    furthest, step = 0.0, rows_per_chunk(table.embedding_dim)
    for first in range(begin, end, step):
        last = min(first + step, end)
        found, of_run = exact(first, last), stored.rows(first, last).float()
        if table.has_codes:
            blocks = table.routing.block_of(torch.arange(first, last))
            furthest = max(furthest, _half_steps(table, found, of_run, blocks))
        elif not torch.equal(found, of_run):
            return math.inf
    return furthest


def _judged_table(table: TableScheme, stored: StoredTensor, furthest: float) -> Finding:
    subject = f"table {table.name}"
    if not _has_shape(table, stored):
        return Finding("run", subject, FAILED, "another shape than the run's")
    if table.has_codes:
        return judged(
            "run",
            subject,
            furthest <= 1,
            f"off by at most {furthest:.2g} half steps from the run's",
        )
    return judged(
        "run", subject, furthest == 0, "" if furthest == 0 else "other values than the run's"
    )


def _half_steps(table: TableScheme, found: Tensor, weight: Tensor, blocks: Tensor) -> float:
    """How far values are from those that they were rounded from, in half steps of their codes; NaN
    compares as far."""
    codes, no_block = table.codes, torch.zeros(1, table.embedding_dim)
    of_codes = is_coded(codes.bits)
    levels = torch.where(of_codes, 2.0 ** codes.bits.clamp(max=16) - 1, 0.0)
    scale = torch.where(of_codes, codes.scale, 0.0)
    low, high = scale * codes.shift / 2, scale * (levels + codes.shift / 2)
    rounding = CODE_ROUNDING * torch.maximum(low.abs(), high.abs())
    allowed = torch.cat([scale / 2 + rounding, no_block])[blocks]
    is_float = torch.cat([codes.bits == FLOAT_BITS, no_block.bool()])[blocks]
    wanted = torch.minimum(
        torch.maximum(weight, torch.cat([low, no_block])[blocks]),
        torch.cat([high, no_block])[blocks],
    )
    error = (found - torch.where(is_float, weight, wanted)).abs()
    shares = torch.where(error == 0, 0.0, error / allowed)
    return float(shares.nan_to_num(nan=torch.inf).max())
