"""Is the artifact the one that was written? Every file against its size and sha256, and the run that it came from.

Nothing else may lie in it, listed or not: a file that no part of the manifest refers to has no reason to be there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dnis_torchrec.artifact import load_csr, load_dense_state, read_scheme
from dnis_torchrec.artifact.manifest import MANIFEST, describe_file, read_manifest
from dnis_torchrec.artifact.writing import SCIPY_FORMATS, scipy_file
from dnis_torchrec.forms import CANONICAL_FORM
from dnis_torchrec.jobs.run_folder import RunFolder
from dnis_torchrec.jobs.verification.findings import FAILED, SKIPPED, Finding, judged
from dnis_torchrec.storage.fetching import FETCHED


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
    known = {MANIFEST, FETCHED, *manifest["files"]}  # FETCHED lies in copies of what is on storage
    for file in sorted(artifact.rglob("*")):
        name = file.relative_to(artifact).as_posix()
        if (file.is_symlink() or not file.is_dir()) and name not in known:
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
    """Is the artifact of that run? Tables bit for bit, and dense weights.

    Args:
        artifact: the folder.
        manifest: its manifest.
        run_path: a finished run.

    Raises:
        ValueError: if the run is none, or damaged.
    """
    run = RunFolder.open(run_path)
    tables, scheme, dense = run.tables(), read_scheme(artifact), run.dense_state()
    different = sorted(set(tables) ^ set(scheme.tables))
    findings = [judged("run", "tables", not different, f"in one of the two alone: {different}" if different else "")]
    for name in sorted(set(tables) & set(scheme.tables)):
        if CANONICAL_FORM not in manifest["forms"]:
            findings.append(Finding("run", f"table {name}", SKIPPED, "the artifact holds no exact sparse rows"))
            continue
        exact = load_csr(artifact, name).to_dense()
        same = exact.shape == tables[name].shape and torch.equal(exact, tables[name].float())
        findings.append(judged("run", f"table {name}", same, "" if same else "other values than the run's"))
    try:
        held = load_dense_state(artifact)
    except ValueError as error:
        return [*findings, Finding("run", "dense weights", SKIPPED, str(error))]
    if dense and not held:
        return [*findings, Finding("run", "dense weights", SKIPPED, "the artifact holds none; export with dense_state")]
    same = held.keys() == dense.keys() and all(torch.equal(held[name], dense[name]) for name in held)
    return [*findings, judged("run", "dense weights", same, "" if same else "others than the run's")]
