"""Helpers that all jobs share. In the file with the components TorchX would take every function for one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torchx import specs
from torchx.components import dist

Component = TypeVar("Component", bound=Callable[..., specs.AppDef])

MODULE = "dnis_torchrec"

ARGUMENTS = {
    "j": "nodes x processes per node; every process of a search holds one shard of the tables",
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
    """Adds the texts of `ARGUMENTS` to a component's docstring, from which TorchX makes its help.

    Args:
        component: its docstring ends with the arguments of its own.
    """
    shared = [f"    {name}: {ARGUMENTS[name]}" for name in inspect.signature(component).parameters if name in ARGUMENTS]
    component.__doc__ = "\n".join([inspect.cleandoc(component.__doc__ or ""), *shared])
    return component


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
    """Builds one role that runs a module under torchrun, with the settings that a restart there needs.

    Args:
        job: the component's name.
        module: module that ``python -m`` would run.
        args: its arguments.
        j: nodes x processes per node.
        node: resources, image and mounts of a node, as `torchx.components.dist.ddp` names them.
        env: environment variables; they win over those set here.
        max_restarts: times that torchrun restarts the processes.
        max_retries: times that the scheduler starts the job again.
    """
    environment = {
        "PET_MAX_RESTARTS": str(max_restarts),
        # Restarted workers would find the gloo addresses of the dead ones in the agent's store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **(env or {}),
    }
    return dist.ddp(*args, m=module, name=f"dnis-{job}", j=j, env=environment, max_retries=max_retries, **node)


def one_process(
    job: str, args: Sequence[str], node: Mapping[str, Any], env: Mapping[str, str] | None, max_retries: int
) -> specs.AppDef:
    """One role that runs a `dnis` command in one process, which torchrun has nothing to do for.
    Args:
        job: the command, and the component's name.
        args: its arguments.
        node: resources, image and mounts of the node, as `torchrun` takes them.
        env: environment variables.
        max_retries: times that the scheduler starts the job again.
    """
    role = specs.Role(
        name=MODULE,
        image=node["image"],
        entrypoint="python",
        args=["-m", MODULE, job, *args],
        env=dict(env or {}),
        max_retries=max_retries,
        resource=specs.resource(cpu=node["cpu"], gpu=node.get("gpu"), memMB=node["memMB"], h=node["h"]),
        mounts=specs.parse_mounts(node["mounts"] or []),
    )
    return specs.AppDef(name=f"dnis-{job}", roles=[role])
