"""dnis_torchrec's jobs as TorchX components: the same command on this machine and on a cluster.

    torchx run dnis.search -- examples.synthetic:demo --compression 5 --out RUN
    torchx run --scheduler slurm --dryrun dnis.export -- RUN --out ARTIFACT

Before ``--`` stands what the machines are, after it what the program of the same name takes. TorchX refuses an option
that comes twice: write ``--form=packed --form=mixed_dimension``. Registered as ``dnis.*`` in pyproject.toml.
"""

# TorchX reads the signature and its docstring as the command line: types are str, int, float, bool, Optional, List and
# Dict, spelled out (annotations that are only strings, as under `from __future__ import annotations`, are refused).
from typing import Dict, List, Optional

import torchx
from torchx import specs

from torchx_components import _launch


@_launch.documented
def search(
    *args: str,
    j: str = "1x1",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 8192,
    image: str = torchx.IMAGE,
    mounts: Optional[List[str]] = None,
    env: Optional[Dict[str, str]] = None,
    max_restarts: int = 0,
    max_retries: int = 0,
) -> specs.AppDef:
    """Runs `dnis search`: finds the retained dims, writes a run folder.

    Args:
        args: after `--`: arguments of `dnis search`; `--resume` is added where restarts or retries are asked for
    """
    node = {"h": h, "cpu": cpu, "gpu": gpu, "memMB": memMB, "image": image, "mounts": mounts}
    if (max_restarts or max_retries) and "--overwrite" in args:
        raise ValueError(
            "--overwrite: expected no restarts or retries, which go on with what is there, got some; "
            "remove the older run, or choose another --out"
        )
    again = ["--resume"] if (max_restarts or max_retries) and "--resume" not in args else []
    return _launch.torchrun(
        "search", _launch.MODULE, ["search", *args, *again], j, node, env, max_restarts, max_retries
    )


@_launch.documented
def export(
    *args: str,
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 8192,
    image: str = torchx.IMAGE,
    mounts: Optional[List[str]] = None,
    env: Optional[Dict[str, str]] = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Runs `dnis export` in one process, on the CPU: makes an artifact from a run folder.

    Args:
        args: after `--`: arguments of `dnis export`
    """
    node = {"h": h, "cpu": cpu, "memMB": memMB, "image": image, "mounts": mounts}
    return _launch.one_process("export", args, node, env, max_retries)


@_launch.documented
def benchmark(
    *args: str,
    m: str,
    j: str = "1x1",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 8192,
    image: str = torchx.IMAGE,
    mounts: Optional[List[str]] = None,
    env: Optional[Dict[str, str]] = None,
    max_restarts: int = 0,
    max_retries: int = 0,
) -> specs.AppDef:
    """Runs a benchmark, or any other module.

    Args:
        args: after `--`: arguments of the module
        m: the module, such as benchmarks.step_time
    """
    node = {"h": h, "cpu": cpu, "gpu": gpu, "memMB": memMB, "image": image, "mounts": mounts}
    return _launch.torchrun("benchmark", m, list(args), j, node, env, max_restarts, max_retries)
