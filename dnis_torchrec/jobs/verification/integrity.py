"""Is the artifact the one that was written? Every file against its size and sha256, and the run that it came from.

Nothing else may lie in it, listed or not: a file that no part of the manifest refers to has no reason to be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dnis_torchrec.artifact import exact_rows, load_dense_state, read_scheme
from dnis_torchrec.artifact.card import CARD
from dnis_torchrec.artifact.forms import Rows
from dnis_torchrec.artifact.manifest import MANIFEST, describe_file, read_manifest
from dnis_torchrec.artifact.writing import SCIPY_FORMATS, scipy_file
from dnis_torchrec.blocks.bit_fields import FLOAT_BITS, is_coded
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.verification.findings import FAILED, SKIPPED, Finding, judged
from dnis_torchrec.scheme import TableScheme, rows_per_chunk
from dnis_torchrec.storage.fetching import FETCHED

CODE_ROUNDING = 2.0**-22
"""The error that choosing a code in float32 may add, as a share of the largest value that the column's codes say."""


def check_files(artifact: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Checks the manifest, then hashes every file that it lists; goes on after a bad one.

    Args:
        artifact: the folder.

    Returns:
        The manifest, or None if it cannot be relied on, and a finding per file.
    """
    try:
        manifest = read_manifest(artifact)
    except ValueError as error:
        return None, [Finding("checksums", MANIFEST, FAILED, str(error))]
    findings = [judged("checksums", MANIFEST, True, "")]
    for name, entry in manifest["files"].items():
        found = describe_file(artifact, name)["sha256"]
        detail = (
            f"{entry['bytes']} bytes" if found == entry["sha256"] else f"expected sha256 {entry['sha256']}, got {found}"
        )
        findings.append(judged("checksums", name, found == entry["sha256"], detail))
    referred, unwanted = _referred(manifest), "no file of the artifact: the manifest "
    for name in manifest["files"]:
        if name not in referred:
            findings.append(Finding("checksums", name, FAILED, f"{unwanted}lists it, and nothing refers to it"))
    known = {MANIFEST, CARD, FETCHED, *manifest["files"]}  # FETCHED lies in copies of what is on storage
    for file in sorted(artifact.rglob("*")):
        name = file.relative_to(artifact).as_posix()
        if file.is_symlink() or not (file.is_dir() or name in known):
            findings.append(Finding("checksums", name, FAILED, f"{unwanted}does not list it"))
    return manifest, findings


def _referred(manifest: dict[str, Any]) -> set[str]:
    """The files that tables, scheme and dense weights are in, and where those for other programs would be."""
    found = {*manifest["scheme"], *manifest["dense_state"]}
    tables = manifest["tables"] if isinstance(manifest["tables"], dict) else {}
    for index, (name, table) in enumerate(tables.items()):
        found |= {scipy_file(index, name, scipy_format) for scipy_format in SCIPY_FORMATS}
        shards = table.get("shards") if isinstance(table, dict) else None
        for of_form in shards.values() if isinstance(shards, dict) else ():
            described = of_form if isinstance(of_form, list) else []
            found |= {str(shard.get("file")) for shard in described if isinstance(shard, dict)}
    return found


def check_against_run(artifact: Path, manifest: dict[str, Any], run_path: Path) -> list[Finding]:
    """Is the artifact of that run? Tables bit for bit, or as near as their codes come to them, and dense weights.

    Args:
        artifact: the folder.
        manifest: its manifest.
        run_path: a finished run.

    Raises:
        ValueError: if the run is none, or damaged.
    """
    run = RunFolder.open(run_path)
    tables, scheme, dense = run.tables(), read_scheme(artifact), run.dense_state()
    exact = exact_rows(artifact)
    different = sorted(set(tables) ^ set(scheme.tables))
    findings = [judged("run", "tables", not different, f"in one of the two alone: {different}" if different else "")]
    for name in sorted(set(tables) & set(scheme.tables)):
        subject = f"table {name}"
        if exact is None:
            findings.append(Finding("run", subject, SKIPPED, "the artifact holds no exact sparse rows"))
        elif manifest["run"].get("turned"):
            findings.append(Finding("run", subject, SKIPPED, "it was turned into other axes than the run's"))
        else:
            findings.append(_compare_table(subject, scheme.tables[name], exact[name], tables[name]))
    if manifest["run"].get("turned"):
        return [*findings, Finding("run", "dense weights", SKIPPED, "they were turned along with the tables")]
    try:
        held = load_dense_state(artifact)
    except ValueError as error:
        return [*findings, Finding("run", "dense weights", SKIPPED, str(error))]
    if dense and not held:
        return [*findings, Finding("run", "dense weights", SKIPPED, "the artifact holds none; export with dense_state")]
    same = held.keys() == dense.keys() and all(torch.equal(held[name], dense[name]) for name in held)
    return [*findings, judged("run", "dense weights", same, "" if same else "others than the run's")]


def _compare_table(subject: str, table: TableScheme, exact: Rows, weight: Tensor) -> Finding:
    if tuple(weight.shape) != (table.num_embeddings, table.embedding_dim):
        return Finding("run", subject, FAILED, "another shape than the run's")
    furthest, step = 0.0, rows_per_chunk(table.embedding_dim)
    for first in range(0, table.num_embeddings, step):
        last = min(first + step, table.num_embeddings)
        found, of_run = exact(first, last), weight[first:last].float()
        if table.has_codes:
            furthest = max(
                furthest, _half_steps(table, found, of_run, table.routing.block_of(torch.arange(first, last)))
            )
        elif not torch.equal(found, of_run):
            return Finding("run", subject, FAILED, "other values than the run's")
    if not table.has_codes:
        return judged("run", subject, True, "")
    return judged("run", subject, furthest <= 1, f"off by at most {furthest:.2g} half steps from the run's")


def _half_steps(table: TableScheme, found: Tensor, weight: Tensor, blocks: Tensor) -> float:
    """How far values are from those that they were rounded from, in half steps of their codes; NaN compares as far.

    What lies beyond the codes' range is to become its end, what is dropped 0, and float32 stays as it is.
    """
    codes, no_block = table.codes, torch.zeros(1, table.embedding_dim)
    of_codes = is_coded(codes.bits)
    levels = torch.where(of_codes, 2.0 ** codes.bits.clamp(max=16) - 1, 0.0)
    scale = torch.where(of_codes, codes.scale, 0.0)
    low, high = scale * codes.shift / 2, scale * (levels + codes.shift / 2)
    rounding = CODE_ROUNDING * torch.maximum(low.abs(), high.abs())
    allowed = torch.cat([scale / 2 + rounding, no_block])[blocks]
    is_float = torch.cat([codes.bits == FLOAT_BITS, no_block.bool()])[blocks]
    wanted = torch.minimum(
        torch.maximum(weight, torch.cat([low, no_block])[blocks]), torch.cat([high, no_block])[blocks]
    )
    error = (found - torch.where(is_float, weight, wanted)).abs()
    shares = torch.where(error == 0, 0.0, error / allowed)
    return float(shares.nan_to_num(nan=torch.inf).max())
