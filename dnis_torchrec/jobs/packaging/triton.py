"""TorchScript packages, in the layout that Triton's libtorch backend serves.

    PACKAGE/
      package.json
      NAME/config.pbtxt       inputs and outputs
      NAME/1/model.pt         TorchScript, weights within
      NAME/lib/               the operator that compressed sparse rows need, if the form has them

PACKAGE is a model repository: ``tritonserver --model-repository=PACKAGE``, with ``LD_PRELOAD`` naming what lib/ holds.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.export import ExportedProgram

from dnis_torchrec.jobs.packaging.flat_model import Signature
from dnis_torchrec.jobs.packaging.torchscript import to_torchscript

MODEL_FILE = "1/model.pt"
CONFIG_FILE = "config.pbtxt"

_TRITON_DTYPES = {"dense": "TYPE_FP32", "values": "TYPE_INT64", "lengths": "TYPE_INT32", "weights": "TYPE_FP32"}


def write_triton_model(program: ExportedProgram, signature: Signature, folder: Path, name: str) -> None:
    """Writes NAME/1/model.pt and NAME/config.pbtxt into a model repository.

    Args:
        program: result of `export_graph`.
        signature: its inputs.
        folder: the repository.
        name: of the model.
    """
    file = folder / name / MODEL_FILE
    file.parent.mkdir(parents=True)
    to_torchscript(program).save(str(file))
    output_dims = len(_output_shape(program))
    (folder / name / CONFIG_FILE).write_text(triton_config(name, signature, output_dims), encoding="utf-8")


def triton_config(name: str, signature: Signature, output_dims: int) -> str:
    """The text of config.pbtxt.

    Bags are ragged, so Triton's own batching is off (``max_batch_size: 0``) and every request brings its batch.

    Args:
        name: of the model, and of its folder.
        signature: its inputs.
        output_dims: 1 for predictions ``(B,)``, 2 for ``(B, 1)``.

    Example:
        >>> signature = Signature(feature_names=("user",), num_dense=4, is_weighted=False)
        >>> print(triton_config("dlrm", signature, 1).splitlines()[4])
          { name: "dense__0" data_type: TYPE_FP32 dims: [ -1, 4 ] },
    """
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
    output = f'  {{ name: "prediction__0" data_type: TYPE_FP32 dims: {_list([-1, 1][:output_dims])} }}'
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
