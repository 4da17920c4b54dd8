"""Recipes on Criteo Kaggle: FM, Wide & Deep and DeepFM as their papers have them, torchrec's DLRM and SimpleDeepFMNN.

A further DLRM starts from somebody's checkpoint.

The 13 scalars reach the first three as ids of buckets, or (`fm_weighted`) as bags weighted by the value; torchrec's
models take them as dense features.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchrec.datasets.criteo import DEFAULT_INT_NAMES
from torchrec.models.deepfm import SimpleDeepFMNN

from dnis_torchrec.checks import check, describe
from dnis_torchrec.data.batches import split_rows
from dnis_torchrec.data.recipe import Recipe
from examples.datasets.criteo import PUBLISHER, load_criteo
from examples.datasets.in_memory import Samples
from examples.datasets.scalars import bucketised, weighted
from examples.datasets.text_files import require_folder
from examples.models import DeepFM, FactorizationMachine, WideDeep, build_dlrm, build_tables, log_odds, network_of_seed

BATCH_SIZE = 4096
EMBEDDING_DIM = 64
DENSE_LAYERS = [512, 256]
OVER_LAYERS = [512, 256]
TOWER = (256, 128)
FIRST_ORDER = ("first_order.weights",)
"""They learn at the tables' rate: at the tower's they hardly move, and uniform tables have .490 instead of .487."""
FM_ON_SAMPLE = {"table_learning_rate": 3.33e-4, "dense_learning_rate": 3e-3}
"""Rates of FM on the sample of 137,139 lines, chosen as those of DeepFM."""
DEEPFM_ON_SAMPLE = {"table_learning_rate": 3.33e-4, "dense_learning_rate": 3.33e-5}
"""Rates of DeepFM on the sample of 137,139 lines, which a tower overfits within an epoch at 1e-3. They and no L2 were
chosen at D = 64 on `selection` of seed 0 by `python -m benchmarks.plain_grid examples.criteo:deepfm`
(benchmarks/plain_grid_2cpu_2026-11-27.md). The same for every method and D."""
WIDE_DEEP_ON_SAMPLE = {"table_learning_rate": 2e-3, "dense_learning_rate": 1.11e-6}
"""Rates of Wide & Deep on the sample, chosen as those of DeepFM: its tower is best left nearly as it is drawn."""
DLRM_ON_SAMPLE = {"table_learning_rate": 1e-3, "dense_learning_rate": 9e-4}
"""Rates of DLRM on the sample, chosen in the same way. The same for every method and D."""
CHECKPOINT_VARIABLE = "DNIS_CHECKPOINT"
CHECKPOINT_FILE = "checkpoint.safetensors"

_WHOLE_DATA_SET = 40_000_000
_TABLE_KEY = "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"


def fm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A factorisation machine on Criteo Kaggle, its scalars bucketised to ids.

    Args:
        data: folder with Criteo's ``train.txt``, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    return _of_fields(data, "fm", FactorizationMachine, embedding_dim, seed, on_sample=FM_ON_SAMPLE)


def fm_weighted(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A factorisation machine on Criteo Kaggle, its scalars as weighted bags: one row each, times the value.

    Args:
        data: see `fm`.
        seed: see `fm`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    return _of_fields(data, "fm_weighted", FactorizationMachine, embedding_dim, seed, is_weighted=True)


def wide_deep(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """Wide & Deep on Criteo Kaggle, its scalars bucketised to ids.

    Args:
        data: see `fm`.
        seed: see `fm`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    build = partial(WideDeep, tower=TOWER)
    recipe = _of_fields(data, "wide_deep", build, embedding_dim, seed, on_sample=WIDE_DEEP_ON_SAMPLE)
    return replace(recipe, row_weights=FIRST_ORDER)


def deepfm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """DeepFM on Criteo Kaggle as its paper has it, its scalars bucketised to ids; `simple_deepfm` is torchrec's.

    Args:
        data: see `fm`.
        seed: see `fm`.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    build = partial(DeepFM, tower=TOWER)
    recipe = _of_fields(data, "deepfm", build, embedding_dim, seed, on_sample=DEEPFM_ON_SAMPLE)
    return replace(recipe, row_weights=FIRST_ORDER)


def simple_deepfm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's SimpleDeepFMNN on Criteo Kaggle, which has no first-order weights; `deepfm` is the paper's.

    Args:
        data: folder with Criteo's ``train.txt``, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    samples = load_criteo(require_folder(data, "examples.criteo:simple_deepfm", PUBLISHER), seed=seed)

    def build() -> nn.Module:
        model = SimpleDeepFMNN(
            num_dense_features=samples.dense.shape[1],
            embedding_bag_collection=build_tables(samples.num_embeddings, embedding_dim or EMBEDDING_DIM),
            hidden_layer_size=128,
            deep_fm_dimension=64,
        )
        # SimpleDeepFMNN ends with a sigmoid, although it documents logits; BCEWithLogitsLoss applies its own.
        model.over_arch.model = model.over_arch.model[:1]
        return model

    # Its second-order term adds all D products of all fields into one number, so at D=64 tables learning at 1e-3 throw
    # the logits about: their best logloss on `selection` of the 137,139-line sample is .536, and .492 with 1e-4.
    return replace(_recipe(network_of_seed(build, seed), samples, seed), table_learning_rate=1e-4)


def dlrm(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """torchrec's DLRM on Criteo Kaggle.

    Args:
        data: folder with Criteo's ``train.txt``, plain or ``.gz``.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if `data` is None or does not hold the file.
    """
    samples = load_criteo(require_folder(data, "examples.criteo:dlrm", PUBLISHER), seed=seed)
    network = _dlrm_network(samples, embedding_dim or EMBEDDING_DIM, DENSE_LAYERS, OVER_LAYERS, seed)
    return _suited(_recipe(network, samples, seed), samples, DLRM_ON_SAMPLE)


def dlrm_from_checkpoint(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> Recipe:
    """A DLRM on Criteo Kaggle that starts from the weights of an existing checkpoint.

    The checkpoint is a state dict of torchrec's DLRM (or of a wrapper such as DLRMTrain: a common prefix is removed) in
    a safetensors file, or one that ``torch.load(weights_only=True)`` reads. The sizes of its layers and its D are taken
    from it. Its row numbers must be those of `load_criteo` with the same seed, as those of a model of `dlrm` are.

    Args:
        data: folder with Criteo's ``train.txt``, plain or ``.gz``, and with ``checkpoint.safetensors`` unless the
            environment variable ``DNIS_CHECKPOINT`` names another file.
        seed: of the split and the order of the batches.
        embedding_dim: D of the checkpoint by default. Any other D means a uniform baseline: the weights do not fit, so
            that model keeps the layer sizes and starts from scratch.

    Returns:
        The recipe; the splits depend on `seed` only.

    Raises:
        ValueError: if a file is missing, or keys of the checkpoint are missing, unknown or of another shape, with their
            names.
    """
    folder = require_folder(data, "examples.criteo:dlrm_from_checkpoint", PUBLISHER)
    path = Path(os.environ.get(CHECKPOINT_VARIABLE) or folder / CHECKPOINT_FILE)
    weights = _read_checkpoint(path)
    samples = load_criteo(folder, seed=seed)
    first_table = _TABLE_KEY.format(samples.feature_names[0])
    dense_layers, over_layers = _layer_sizes(weights, "dense_arch"), _layer_sizes(weights, "over_arch")
    place = f"checkpoint {path.name}"
    complete = bool(dense_layers and over_layers) and first_table in weights
    check(complete, place, "a state dict of torchrec's DLRM", f"keys {sorted(weights)[:4]}")
    checkpoint_dim = weights[first_table].shape[-1]
    network = _dlrm_network(samples, embedding_dim or checkpoint_dim, dense_layers[:-1], over_layers, seed)
    recipe = _suited(_recipe(network, samples, seed), samples, DLRM_ON_SAMPLE)
    if (embedding_dim or checkpoint_dim) == checkpoint_dim:
        _check_fits(weights, recipe.model.state_dict(), place)
        recipe.model.load_state_dict(weights)
    return recipe


def _of_fields(
    data: Path | None,
    name: str,
    build: Callable[..., nn.Module],
    embedding_dim: int | None,
    seed: int,
    *,
    is_weighted: bool = False,
    on_sample: Mapping[str, Any] | None = None,
) -> Recipe:
    """The recipe of a model of fields alone, to which the scalars are fields like any other.

    Args:
        on_sample: what a sample of the data set, soon overfitted, wants instead of what the whole one takes.
    """
    samples = load_criteo(require_folder(data, f"examples.criteo:{name}", PUBLISHER), seed=seed)
    train_rows = split_rows(samples.labels.numel(), seed=seed)[0]
    if is_weighted:
        samples = weighted(samples, DEFAULT_INT_NAMES)
    else:
        samples = bucketised(samples, DEFAULT_INT_NAMES, train_rows)

    def make() -> nn.Module:
        dim, scalar_names = embedding_dim or EMBEDDING_DIM, samples.scalar_names
        tables = build_tables(samples.num_embeddings, dim, scalar_names=scalar_names)
        return build(tables, initial_bias=log_odds(samples.labels[train_rows]))

    return _suited(_recipe(network_of_seed(make, seed), samples, seed), samples, on_sample or {})


def _dlrm_network(
    samples: Samples, embedding_dim: int, dense_layers: list[int], over_layers: list[int], seed: int
) -> nn.Module:
    def build() -> nn.Module:
        tables, num_dense = build_tables(samples.num_embeddings, embedding_dim), samples.dense.shape[1]
        return build_dlrm(tables, dense_in_features=num_dense, dense_layers=dense_layers, over_layers=over_layers)

    return network_of_seed(build, seed)


def _recipe(network: nn.Module, samples: Samples, seed: int) -> Recipe:
    return Recipe(model=network, data=samples.split(batch_size=BATCH_SIZE, seed=seed), loss=nn.BCEWithLogitsLoss())


def _suited(recipe: Recipe, samples: Samples, on_sample: Mapping[str, Any]) -> Recipe:
    return replace(recipe, **on_sample) if _is_sample(samples) else recipe


def _is_sample(samples: Samples) -> bool:
    return samples.labels.numel() < _WHOLE_DATA_SET


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, the prefix of a wrapper removed."""
    place = f"checkpoint {path}"
    check(path.is_file(), place, "a file", "none", f"put it there or name it in {CHECKPOINT_VARIABLE}")
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except Exception as error:
        reading = "a safetensors file" if path.suffix == ".safetensors" else "a file for torch.load(weights_only=True)"
        raise ValueError(describe(place, f"{reading}", error, "save model.state_dict() again")) from error
    is_state_dict = isinstance(weights, Mapping) and all(isinstance(value, Tensor) for value in weights.values())
    check(is_state_dict, place, "a flat state dict of tensors", type(weights).__name__)
    prefixes = {key[: key.index("sparse_arch.")] for key in weights if "sparse_arch." in key}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    return {key.removeprefix(prefix): value for key, value in weights.items()}


def _layer_sizes(weights: Mapping[str, Tensor], arch: str) -> list[int]:
    """Output sizes of an arch's perceptrons, in order; the over arch's last, plain layer is not one of them."""
    perceptron = re.compile(rf"{arch}\.model\.(?:0\.)?_mlp\.(\d+)\._linear\.weight")
    found = {int(match[1]): value.shape[0] for key, value in weights.items() if (match := perceptron.fullmatch(key))}
    return [found[index] for index in sorted(found)]


def _check_fits(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], place: str) -> None:
    missing = sorted(set(expected) - set(weights))
    remedy = "is it a DLRM on the 26 Criteo features?"
    check(not missing, place, f"keys {_some(missing)}", "none of them", remedy)
    unknown = sorted(set(weights) - set(expected))
    check(not unknown, place, "only keys of torchrec's DLRM", _some(unknown), "leave them out of the file")
    shapes = {key: (tuple(value.shape), tuple(weights[key].shape)) for key, value in expected.items()}
    wrong = [f"{key}: {want} (found {got})" for key, (want, got) in shapes.items() if want != got]
    remedy = "use the data, seed and dictionaries it was trained with"
    check(not wrong, place, f"the shapes {_some(wrong)}", f"{len(wrong)} mismatched", remedy)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
