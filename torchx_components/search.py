"""The search as a TorchX job, on this machine or on a cluster.

    torchx run --scheduler local_cwd torchx_components/search.py:search --recipe examples.movielens:mf --data DIR \
        --compression 5 --out RUN
"""

# TorchX reads the signature and its docstring as the command line: types are str, int, float, bool, Optional, List and
# Dict, spelled out (annotations that are only strings, as under `from __future__ import annotations`, are refused).
from typing import Dict, Optional

import torchx
from torchx import specs
from torchx.components import dist


def search(
    recipe: str,
    data: str,
    compression: float,
    out: str,
    seed: int = 0,
    j: str = "1x1",
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 8192,
    image: str = torchx.IMAGE,
    env: Optional[Dict[str, str]] = None,
) -> specs.AppDef:
    """Runs `dnis search` under torchrun.

    Args:
        recipe: module:function, found from the folder that the job starts in
        data: folder of the data, as every node sees it
        compression: parameters of the uncompressed tables over those wanted
        out: run folder to write, as every node sees it; must not exist
        seed: seed of weights, splits and batch order
        j: nodes x processes per node
        h: named resource of a node; takes precedence over cpu, gpu and memMB
        cpu: CPU cores of a node
        gpu: GPUs of a node
        memMB: memory of a node in MB
        image: container image, for schedulers that run one
        env: environment variables of the job
    """
    return dist.ddp(
        "search",
        recipe,
        "--data",
        data,
        "--compression",
        str(compression),
        "--out",
        out,
        "--seed",
        str(seed),
        m="dnis_torchrec",
        name="dnis-search",
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        j=j,
        env=dict(env or {}),
    )
