"""Memory that an artifact takes: after loading, after one lookup, and after all of its rows were used.

    python -m benchmarks.artifact_memory [--gigabytes 1] [--json FILE]

Writes an artifact of that size per form to a temporary folder (TMPDIR), and loads them in a fresh process, one after
the other. Bytes are the growth of the resident set (VmRSS, Linux), in which pages of mapped files count once they were
touched.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.files import output_file
from dnis_torchrec.artifact.load import load
from dnis_torchrec.artifact.manifest import read_manifest
from dnis_torchrec.artifact.write import write_artifact
from dnis_torchrec.blocks.routing import RowRouting
from dnis_torchrec.data.files import write_json
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme

FORMS = ("packed", "mixed_dimension")
EMBEDDING_DIM, RETAINED = 32, 16
BYTES_PER_ROW = 4 * RETAINED
"""Bytes of a row's values in float32: every form's files take at least these, except int8."""


def write(path: Path, num_rows: int, forms: tuple[str, ...]) -> Path:
    """An artifact of one table of equal rows, which retain every other column; the dense table takes no memory."""
    retained = torch.arange(EMBEDDING_DIM) % 2 == 0
    table = TableScheme(
        name="t",
        collection="ebc",
        num_embeddings=num_rows,
        embedding_dim=EMBEDDING_DIM,
        pooling="sum",
        feature_names=("f",),
        is_weighted=False,
        routing=RowRouting(num_rows, 1, boundaries=torch.tensor([0, num_rows])),
        retained=retained.unsqueeze(0),
        num_retained=RETAINED * num_rows,
    )
    weight = retained.float().expand(num_rows, EMBEDDING_DIM)
    return write_artifact({"t": weight}, MixedDimensionScheme({"t": table}), path, forms=forms)


def resident_bytes() -> int:
    """Resident set of this process."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS"].split()[0])


def grow(path: Path, small: Path, form: str) -> dict[str, Any]:
    """Measures how this process grows when an artifact is loaded, looked up once, and looked up everywhere.

    Args:
        path: the artifact.
        small: another one, used first, so that code and libraries do not count.
        form: form to load.
    """
    one = KeyedJaggedTensor(keys=["f"], values=torch.tensor([3]), lengths=torch.tensor([1]))
    load(small, form=form)(one)
    before, start = resident_bytes(), time.perf_counter()
    module = load(path, form=form)
    seconds, loaded = time.perf_counter() - start, resident_bytes() - before
    module(one)
    looked_up = resident_bytes() - before
    rows_per_page = 4096 // (RETAINED * 4) // 2
    for first in range(0, module.embedding_bag_configs()[0].num_embeddings, 2**20):
        last = min(first + 2**20, module.embedding_bag_configs()[0].num_embeddings)
        rows = torch.arange(first, last, rows_per_page)
        module(KeyedJaggedTensor(keys=["f"], values=rows, lengths=torch.tensor([len(rows)])))
    used = resident_bytes() - before
    return {"load_seconds": seconds, "loaded_bytes": loaded, "looked_up_bytes": looked_up, "used_bytes": used}


def measure(folder: Path, forms: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """`grow` for ``folder/<form>`` beside ``folder/small``, form by form, in a process of its own."""
    code = "import sys; from benchmarks import artifact_memory; artifact_memory.print_growth(*sys.argv[1:])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(folder), *forms]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, check=True)
    return json.loads(done.stdout)


def print_growth(folder: str, *forms: str) -> None:
    """Prints how this process grows with each form; `measure` runs it in a process of its own."""
    print(json.dumps({form: grow(Path(folder) / form, Path(folder) / "small", form) for form in forms}))


def main(argv: list[str] | None = None) -> None:
    """Writes the artifact, measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the values in float32 (default 1)")
    parser.add_argument("--json", type=output_file, help="file to write")
    arguments = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "small", 10, FORMS)
        num_rows = int(arguments.gigabytes * 1e9) // BYTES_PER_ROW
        paths = {form: write(Path(folder) / form, num_rows, (form,)) for form in FORMS}
        for form, growth in measure(Path(folder), FORMS).items():
            row = {"form": form, "artifact_bytes": read_manifest(paths[form])["bytes_on_disk"][form], **growth}
            sizes = "  ".join(f"{name} {value / 1e6:.1f} MB" for name, value in row.items() if name.endswith("_bytes"))
            print(f"{form:>16}  loaded in {row['load_seconds']:.3f} s  {sizes}", flush=True)
            rows.append(row)
    if arguments.json:
        write_json(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
