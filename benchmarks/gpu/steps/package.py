"""A package of the search step's artifact: AOTInductor compiles it in one process, another loads it and predicts.

First no GPU is in sight, then it is. A process that crashes ends the step, and its stack stands in the log.
"""

from pathlib import Path

import torch

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.step import Run
from benchmarks.gpu.steps import search
from dnis_torchrec.artifact.export import load_model
from dnis_torchrec.artifact.package import Signature, load_package
from dnis_torchrec.data.recipe import build_recipe


def run(run: Run) -> None:
    """Notes the seconds of each process, and how far predictions are from the model's."""
    recipe, artifact, package = search.recipe_of(run), str(search.artifact_of(run)), str(run.folder / "package")
    command = ("-m", "dnis_torchrec", "package", artifact, "--recipe", recipe, "--out", package, "--overwrite")
    for gpu, variables in (("hidden", {"CUDA_VISIBLE_DEVICES": ""}), ("in sight", {}))[: 1 if run.is_stand_in else 2]:
        run.python("package", *command, variables=variables, GPU=gpu)
        code = f"from benchmarks.gpu.steps import package; package.compare{str(run.folder), recipe, artifact, gpu}"
        run.python("load and predict", "-c", code, variables=variables, GPU=gpu)


def compare(folder: str, recipe: str, artifact: str, gpu: str) -> None:
    """Notes the largest difference between the predictions of the package and of the model."""
    parts = build_recipe(recipe, None, seed=0)
    batch, model = next(iter(parts.data.test)), load_model(parts.model, artifact, form="packed").eval()
    found = load_package(Path(folder) / "package")(*Signature.of_batch(batch).flatten(batch))
    with torch.inference_mode():
        expected = model(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
    Figures(Path(folder), "package").note("largest difference", float((found - expected).abs().max()), GPU=gpu)
