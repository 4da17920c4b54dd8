"""Helpers that all jobs share. In the file with the components TorchX would take every function for one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torchx import specs
from torchx.components import dist

Component = TypeVar("Component", bound=Callable[..., specs.AppDef])

ARGUMENTS = {
    "j": "nodes x processes per node; every process holds one shard of the tables",
    "h": "named resource of a node, such as gpu.small or aws_p4d.24xlarge; takes precedence over cpu, gpu and memMB",
    "cpu": "CPU cores of a node",
    "gpu": "GPUs of a node",
    "memMB": "memory of a node in MB",
    "image": "container image, for schedulers that run one",
    "mounts": "storage to mount, as in type=bind,src=/shared,dst=/shared",
    "env": "environment variables of the job, as in OMP_NUM_THREADS=8,LOGLEVEL=INFO",
    "max_restarts": "times that torchrun restarts the processes on their nodes",
    "max_retries": "times that the scheduler starts the job again",
}
"""Help of the components' arguments for machines."""


def documented(component: Component) -> Component:
    """Adds the texts of `ARGUMENTS` to a component's docstring, from which TorchX makes its help."""
    shared = [f"    {name}: {ARGUMENTS[name]}" for name in inspect.signature(component).parameters if name in ARGUMENTS]
    component.__doc__ = "\n".join([inspect.cleandoc(component.__doc__ or ""), *shared])
    return component


def dnis(
    command: str,
    args: Sequence[str],
    j: str,
    node: Mapping[str, Any],
    env: Mapping[str, str] | None,
    max_restarts: int,
    max_retries: int,
) -> specs.AppDef:
    """A `dnis` command under torchrun; one that may be started again goes on with what is there."""
    again = max_restarts > 0 or max_retries > 0
    if again and "--overwrite" in args:
        raise ValueError(
            "--overwrite: expected no restarts or retries, which go on with what is there, got some; "
            "remove the older run, or choose another --out"
        )
    resume = ["--resume"] if again and command in ("train", "search") and "--resume" not in args else []
    words = [command, *args, *resume]
    return torchrun(command, "dnis_torchrec", words, j, node, env, max_restarts, max_retries)


def torchrun(
    job: str,
    module: str,
    args: Sequence[str],
    j: str,
    node: Mapping[str, Any],
    env: Mapping[str, str] | None,
    max_restarts: int,
    max_retries: int,
) -> specs.AppDef:
    """One role that runs a module under torchrun, with the settings that a restart there needs."""
    environment = {
        "PET_MAX_RESTARTS": str(max_restarts),
        # Restarted workers would find the gloo addresses of the dead ones in the agent's store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **(env or {}),
    }
    return dist.ddp(*args, m=module, name=f"dnis-{job}", j=j, env=environment, max_retries=max_retries, **node)
