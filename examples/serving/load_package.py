"""Runs a package of `dnis package` with torch and safetensors alone; TorchRec and dnis_torchrec need not be there.

    python examples/serving/load_package.py PACKAGE < REQUEST

A request is numbers between blanks: batch size B, number of dense features, number of features F, number of ids I, then
B rows of dense features, F rows of B bag lengths, I ids and, if bags are weighted, I weights. Prints a prediction per
line. A package holds machine code: run only those that you trust.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def load(package: Path) -> Callable[..., Tensor]:
    """Loads a package of either kind as ``model(dense, values, lengths)``, weights last where bags are weighted.

    Args:
        package: the folder.
    """
    manifest = json.loads((package / "package.json").read_text(encoding="utf-8"))
    for library in manifest["libraries"]:
        torch.ops.load_library(package / library)
    if manifest["kind"] == "torchscript":
        return torch.jit.load(package / manifest["model"] / "1" / "model.pt").eval()
    model = torch._inductor.aoti_load_package(str(package / "model.pt2"))
    constants = load_file(package / "constants.safetensors")  # memory-mapped: pages are read as they are touched
    model.load_constants(constants, check_full_update=True, user_managed=True)

    def predict(*inputs: Tensor, used: dict[str, Tensor] = constants) -> Tensor:
        return model(*inputs)  # which reads `used` where they lie, so they have to live as long

    return predict


def read_request(text: str) -> tuple[Tensor, ...]:
    """The inputs of a package, from a request as the top of this file describes it.

    Example:
        >>> [tensor.tolist() for tensor in read_request("1 2 1 3  0.5 0.25  3  7 8 9")]
        [[[0.5, 0.25]], [7, 8, 9], [[3]]]
    """
    words = text.split()
    batch_size, num_dense, num_features, num_ids = (int(word) for word in words[:4])
    ends = [4, 4 + batch_size * num_dense]
    ends += [ends[-1] + num_features * batch_size]
    ends += [ends[-1] + num_ids]
    dense = torch.tensor([float(word) for word in words[ends[0] : ends[1]]]).view(batch_size, num_dense)
    lengths = torch.tensor([int(word) for word in words[ends[1] : ends[2]]], dtype=torch.int32)
    values = torch.tensor([int(word) for word in words[ends[2] : ends[3]]], dtype=torch.int64)
    weights = torch.tensor([float(word) for word in words[ends[3] :]])
    inputs = (dense, values, lengths.view(num_features, batch_size))
    return (*inputs, weights) if len(weights) else inputs


def main() -> None:
    """Reads a request, prints predictions."""
    with torch.inference_mode():
        predictions = load(Path(sys.argv[1]))(*read_request(sys.stdin.read()))
    for prediction in predictions.flatten().tolist():
        print(f"{prediction:.8g}")


if __name__ == "__main__":
    main()
