"""Memory of tables in a process that serves them, measured as resident set size (RSS), not
computed."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact import read_scheme, write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.checks import describe
from dnis_torchrec.forms import CANONICAL_FORM
from dnis_torchrec.jobs.verification.parity import rows_of_features
from dnis_torchrec.jobs.verification.served import UNCOMPRESSED_FORMS, collections_of, served_module
from dnis_torchrec.scheme import MixedDimensionScheme

SAMPLES_AT_A_TIME = 4096


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Memory of one form of all tables."""

    form: str
    loaded_bytes: int
    touched_bytes: int


def measure_resident(artifact: Path, forms: Sequence[str]) -> list[Resident]:
    """Measures forms in a fresh process."""
    command = [sys.executable, "-P", "-m", __name__, str(artifact), *forms]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1"
    }  # a thread pool has no place in a process that forks
    # -P: modules are looked for where this process does, and not in the folder that it happens to
    # stand in.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | {"PYTHONPATH": path}
    )
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RuntimeError(
            describe("resident bytes", "the measuring process to finish", f"\n{words}\n")
        )
    return [Resident(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def resident_bytes() -> int:
    """Returns the RSS of this process, after giving freed memory back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure_here(artifact: Path, form: str) -> Resident:
    """Loads a form in this process, looks every row up, and says by how much RSS grew."""
    parts = collections_of(read_scheme(artifact))
    before = resident_bytes()
    modules = {fqn: served_module(artifact, form, fqn, part) for fqn, part in parts.items()}
    loaded = resident_bytes()
    for fqn, module in modules.items():
        with torch.inference_mode():
            for batch in every_row(parts[fqn]):
                module(batch)
    return Resident(
        form=form, loaded_bytes=loaded - before, touched_bytes=resident_bytes() - before
    )


def every_row(scheme: MixedDimensionScheme) -> Iterator[KeyedJaggedTensor]:
    """Batches that look up every row of every table of a collection, one id a bag."""
    rows = rows_of_features(scheme)
    longest = max(rows.values())
    is_weighted = next(iter(scheme.tables.values())).is_weighted
    for first in range(0, longest, SAMPLES_AT_A_TIME):
        ids = torch.arange(first, min(first + SAMPLES_AT_A_TIME, longest))
        values = torch.cat([ids.clamp(max=count - 1) for count in rows.values()])
        yield KeyedJaggedTensor(
            keys=list(rows),
            values=values,
            weights=torch.ones(values.numel()) if is_weighted else None,
            lengths=torch.ones(values.numel(), dtype=torch.int32),
        )


def _in_child(artifact: Path, form: str) -> dict[str, object]:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _warm_up(artifact, form)
            os.write(write_end, json.dumps(asdict(measure_here(artifact, form))).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if status or not text:
        raise RuntimeError(
            describe(f"form {form!r}", "the measuring process to finish", f"status {status}")
        )
    return json.loads(text)


def _warm_up(artifact: Path, form: str) -> None:
    """Serves a table of a few rows in the same form, so that code and its workspace are not taken
    for tables."""
    first = next(iter(read_scheme(artifact).tables.values()))
    num_blocks = first.routing.num_blocks
    table = replace(
        first,
        num_embeddings=num_blocks,
        routing=RowRouting(num_blocks, num_blocks, boundaries=torch.arange(num_blocks + 1)),
        num_retained=int(first.retained.sum()),
    )
    with tempfile.TemporaryDirectory() as folder:
        small = write_artifact(
            {table.name: table.retained.float()},
            MixedDimensionScheme({table.name: table}),
            Path(folder) / "small",
            forms=(CANONICAL_FORM,) if form in UNCOMPRESSED_FORMS else (form,),
        )
        measure_here(small, form)


def _main() -> None:
    artifact, forms = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    gc.freeze()  # of what is imported, children collect nothing: to look for it takes seconds
    print(json.dumps([_in_child(artifact, form) for form in forms]))


if __name__ == "__main__":
    _main()
