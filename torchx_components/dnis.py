"""dnis_torchrec's commands as TorchX components: the same command on this machine and on a cluster.

    torchx run dnis.search -- examples.synthetic:demo --compression 5 --out RUN
    torchx run --scheduler slurm --dryrun dnis.train -h gpu.xlarge -- RECIPE --data DIR --out OUT

Before ``--`` stands what the machines are, after it what the command takes. TorchX refuses an option that comes twice:
write ``--form=packed --form=mixed_dimension``. Registered as ``dnis.*`` in pyproject.toml.
"""

# TorchX reads the signature and its docstring as the command line: types are str, int, float, bool, Optional, List and
# Dict, spelled out (annotations that are only strings, as under `from __future__ import annotations`, are refused).
from typing import Dict, List, Optional

import torchx
from torchx import specs

from torchx_components import _launch


@_launch.documented
def train(
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
    """Runs `dnis train`: trains the plain model, writes a run.

    Args:
        args: after `--`: arguments of `dnis train`; `--resume` is added where restarts or retries are asked for
    """
    node = {"h": h, "cpu": cpu, "gpu": gpu, "memMB": memMB, "image": image, "mounts": mounts}
    return _launch.dnis("train", args, j, node, env, max_restarts, max_retries)


@_launch.documented
def compress(
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
    """Runs `dnis compress`: writes an artifact for each size.

    Args:
        args: after `--`: arguments of `dnis compress`
    """
    node = {"h": h, "cpu": cpu, "gpu": gpu, "memMB": memMB, "image": image, "mounts": mounts}
    return _launch.dnis("compress", args, j, node, env, max_restarts, max_retries)


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
    """Runs `dnis search`: trains a model for its size, writes a run.

    Args:
        args: after `--`: arguments of `dnis search`; `--resume` is added where restarts or retries are asked for
    """
    node = {"h": h, "cpu": cpu, "gpu": gpu, "memMB": memMB, "image": image, "mounts": mounts}
    return _launch.dnis("search", args, j, node, env, max_restarts, max_retries)


@_launch.documented
def export(
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
    """Runs `dnis export`: makes an artifact of a run.

    Args:
        args: after `--`: arguments of `dnis export`
    """
    node = {"h": h, "cpu": cpu, "gpu": gpu, "memMB": memMB, "image": image, "mounts": mounts}
    return _launch.dnis("export", args, j, node, env, max_restarts, max_retries)


@_launch.documented
def evaluate(
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
    """Runs `dnis evaluate`: measures or verifies a run or an artifact.

    Args:
        args: after `--`: arguments of `dnis evaluate`
    """
    node = {"h": h, "cpu": cpu, "gpu": gpu, "memMB": memMB, "image": image, "mounts": mounts}
    return _launch.dnis("evaluate", args, j, node, env, max_restarts, max_retries)


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
    return _launch.torchrun("benchmark", m, args, j, node, env, max_restarts, max_retries)
