"""Conversion of an exported program to TorchScript."""

from __future__ import annotations

import warnings
from functools import reduce
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram


def to_torchscript(program: ExportedProgram) -> torch.jit.ScriptModule:
    """Scripts an exported program."""
    source = program.module(check_guards=False)
    root, graph = nn.Module(), fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in source.graph.nodes:
        if node.op == "call_module" or _is_dead(node):
            continue
        if node.op == "output":
            (outputs,) = node.args
            graph.output(copies[outputs[0]])
            continue
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
        if node.op == "get_attr":
            name = f"constant_{len(root._buffers)}"
            tensor: Any = reduce(getattr, node.target.split("."), source)
            root.register_buffer(name, tensor.detach())
            copies[node].target = name
        elif node.target == torch.ops.aten.item.default and isinstance(
            node.meta["val"], torch.SymInt
        ):
            copies[node].target = int  # TorchScript takes an item for a number of any kind
        elif isinstance(node.target, torch._ops.OpOverload):
            copies[node].target = node.target.overloadpacket
    with warnings.catch_warnings():
        # about an annotation in the __init__ of torch's own GraphModule
        warnings.filterwarnings(
            "ignore", message="The TorchScript type system doesn't support instance-level"
        )
        return torch.jit.script(fx.GraphModule(root, graph))


def _is_dead(node: fx.Node) -> bool:
    """Returns whether nobody reads a pure result, as of operators that return several."""
    return node.op == "call_function" and not node.users and not node.is_impure()
