"""Runs a package of `dnis package` with torch and safetensors alone; TorchRec and dnis_torchrec need not be there.

    python examples/serving/load_package.py PACKAGE < REQUEST

A request is numbers between blanks: batch size B, number of dense features, number of features F, number of ids I, then
B rows of dense features, F rows of B bag lengths, I ids and, if bags are weighted, I weights. Prints a prediction per
line. A package holds machine code: run only those that you trust.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def read_manifest(package: Path) -> dict[str, Any]:
    """Reads the manifest of a package.

    Args:
        package: the folder.
    """
    return json.loads((package / "package.json").read_text(encoding="utf-8"))


def own_file(package: Path, manifest: dict[str, Any], name: str) -> Path:
    """A file of the package: one that package.json lists, in the folder. Its content is not compared with the hash.

    Args:
        package: the folder.
        manifest: result of `read_manifest`.
        name: of the file, from the folder on.

    Raises:
        ValueError: if it is none.
    """
    file = package / name
    if name not in manifest["files"] or not file.resolve().is_relative_to(package.resolve()):
        raise ValueError(f"package.json: expected one of the package's files, got {name!r}")
    return file


def load(package: Path) -> Callable[..., Tensor]:
    """Loads a package as ``model(dense, values, lengths)``, weights last where bags are weighted.

    Args:
        package: the folder.

    Raises:
        ValueError: if package.json names a file that is none of the package's.
    """
    manifest = read_manifest(package)
    for library in manifest["libraries"]:
        torch.ops.load_library(own_file(package, manifest, library))
    model = torch._inductor.aoti_load_package(str(own_file(package, manifest, "model.pt2")))
    # memory-mapped: pages are read as they are touched
    constants = load_file(own_file(package, manifest, "constants.safetensors"))
    model.load_constants(constants, check_full_update=True, user_managed=True)

    def predict(*inputs: Tensor, used: dict[str, Tensor] = constants) -> Tensor:
        # It reads `used` where they lie, so they have to live as long, and its inputs without looking at strides.
        return model(*(tensor.contiguous() for tensor in inputs))

    return predict


def read_request(text: str, *, is_weighted: bool) -> tuple[Tensor, ...]:
    """The inputs of a package, from a request as the top of this file describes it.

    Args:
        text: the request.
        is_weighted: whether bags are weighted, as package.json says.

    Raises:
        ValueError: if these are fewer or more numbers than the first four ask for.

    Example:
        >>> [tensor.tolist() for tensor in read_request("1 2 1 3  0.5 0.25  3  7 8 9", is_weighted=False)]
        [[[0.5, 0.25]], [7, 8, 9], [[3]]]
    """
    words = iter(text.split())
    batch_size, num_dense, num_features, num_ids = (int(word) for word in _take(words, 4))
    dense = torch.tensor([float(word) for word in _take(words, batch_size * num_dense)]).view(batch_size, num_dense)
    lengths = torch.tensor([int(word) for word in _take(words, num_features * batch_size)], dtype=torch.int32)
    values = torch.tensor([int(word) for word in _take(words, num_ids)], dtype=torch.int64)
    weights = [torch.tensor([float(word) for word in _take(words, num_ids)])] if is_weighted else []
    if next(words, None) is not None:
        raise ValueError("request: too long")
    return (dense, values, lengths.view(num_features, batch_size), *weights)


def _take(words: Iterator[str], count: int) -> list[str]:
    taken = list(islice(words, count))
    if len(taken) < count:
        raise ValueError("request: too short")
    return taken


def main() -> None:
    """Reads a request, prints predictions."""
    package = Path(sys.argv[1])
    inputs = read_request(sys.stdin.read(), is_weighted=read_manifest(package)["is_weighted"])
    with torch.inference_mode():
        predictions = load(package)(*inputs)
    for prediction in predictions.flatten().tolist():
        print(f"{prediction:.8g}")


if __name__ == "__main__":
    main()
