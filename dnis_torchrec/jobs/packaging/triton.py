"""TorchScript packages, in the layout that Triton's libtorch backend serves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.export import ExportedProgram

from dnis_torchrec.jobs.packaging.flat_model import Signature
from dnis_torchrec.jobs.packaging.torchscript import to_torchscript

MODEL_FILE = "1/model.pt"
CONFIG_FILE = "config.pbtxt"

_TRITON_DTYPES = {
    "dense": "TYPE_FP32",
    "values": "TYPE_INT64",
    "lengths": "TYPE_INT32",
    "weights": "TYPE_FP32",
}


def write_triton_model(
    program: ExportedProgram, signature: Signature, folder: Path, name: str
) -> None:
    """Writes NAME/1/model.pt and NAME/config.pbtxt into a model repository."""
    file = folder / name / MODEL_FILE
    file.parent.mkdir(parents=True)
    to_torchscript(program).save(str(file))
    output_dims = len(_output_shape(program))
    (folder / name / CONFIG_FILE).write_text(
        triton_config(name, signature, output_dims), encoding="utf-8"
    )


def triton_config(name: str, signature: Signature, output_dims: int) -> str:
    """The text of config.pbtxt."""
    dims = {
        "dense": [-1, signature.num_dense],
        "values": [-1],
        "lengths": [len(signature.feature_names), -1],
        "weights": [-1],
    }
    inputs = [
        f'  {{ name: "{field}__{index}" data_type: {_TRITON_DTYPES[field]} dims: {_list(dims[field])} }}'
        for index, field in enumerate(signature.input_names)
    ]
    output = (
        f'  {{ name: "prediction__0" data_type: TYPE_FP32 dims: {_list([-1, 1][:output_dims])} }}'
    )
    lines = [
        f'name: "{name}"',
        'platform: "pytorch_libtorch"',
        "max_batch_size: 0",
        "input [",
        *",\n".join(inputs).splitlines(),
        "]",
        "output [",
        output,
        "]",
        "instance_group [ { kind: KIND_CPU } ]",
    ]
    return "\n".join(lines) + "\n"


def _list(sizes: list[int]) -> str:
    return f"[ {', '.join(str(size) for size in sizes)} ]"


def _output_shape(program: ExportedProgram) -> torch.Size:
    (output,) = program.graph.find_nodes(op="output")
    return output.args[0][0].meta["val"].shape
