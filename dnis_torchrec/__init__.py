"""dnis_torchrec: what every column of every block of an embedding table is worth, and tables of
just that size."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dnis_torchrec.checks import check_dependencies, silence_noise, version

if TYPE_CHECKING:
    from dnis_torchrec.allocation.compress import compress
    from dnis_torchrec.artifact.delta import apply_delta
    from dnis_torchrec.artifact.export import export, load_model, load_predictor
    from dnis_torchrec.artifact.load import load
    from dnis_torchrec.blocks.blocking import blocks_from_counts
    from dnis_torchrec.blocks.counts import count_frequencies
    from dnis_torchrec.data.frames import recipe_from_frame
    from dnis_torchrec.data.recipe import DataSplits, Recipe
    from dnis_torchrec.data.task import Task, TrainTask
    from dnis_torchrec.search.loop import SearchLoop
    from dnis_torchrec.search.prune import prune
    from dnis_torchrec.search.search import SearchResult
    from dnis_torchrec.search.settings import SearchSettings
    from dnis_torchrec.selection.plan import shard_model
    from dnis_torchrec.selection.swap import merge_, prepare_
    from dnis_torchrec.serving.configs import embedding_configs

__all__ = [
    "DataSplits",
    "Recipe",
    "SearchLoop",
    "Task",
    "TrainTask",
    "apply_delta",
    "blocks_from_counts",
    "compress",
    "count_frequencies",
    "embedding_configs",
    "export",
    "load",
    "load_model",
    "load_predictor",
    "merge_",
    "prepare_",
    "prune",
    "recipe_from_frame",
    "search",
    "shard_model",
]

__version__ = version()

_NAMES = {
    "allocation.compress": ("compress",),
    "artifact.delta": ("apply_delta",),
    "artifact.export": ("export", "load_model", "load_predictor"),
    "artifact.load": ("load",),
    "blocks.blocking": ("blocks_from_counts",),
    "blocks.counts": ("count_frequencies",),
    "data.frames": ("recipe_from_frame",),
    "data.recipe": ("DataSplits", "Recipe"),
    "data.task": ("Task", "TrainTask"),
    "search.loop": ("SearchLoop",),
    "search.pipeline": ("BilevelTrainPipeline",),
    "search.prune": ("Size", "prune"),
    "search.schedule": ("BilevelStream", "LevelSchedule"),
    "selection.plan": ("CpuEmbeddingBagCollectionSharder", "make_sharding_plan", "shard_model"),
    "selection.swap": ("merge_", "prepare_"),
    "serving": ("MixedDimensionEmbeddingBagCollection",),
    "serving.configs": ("embedding_configs",),
}
"""Module -> names of it; it is imported when one is first asked for: a script that serves loads
nothing that trains."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}

check_dependencies()
silence_noise()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


# Python makes a folder an attribute of the package when it is first imported: that is here, and
# behind it the call has the name.
import_module(f"{__name__}.search")


def search(
    recipe: "Recipe", compression: float = 20.0, *, settings: "SearchSettings | None" = None
) -> "SearchResult":
    """Trains a model so that its tables can be served in a fraction of the bytes.

    On one process; several ranks and resuming have ``dnis search``. It makes a process group where
    there is none, and checkpoints that are gone when it returns. A terminal shows progress and the
    time left. Every epoch is logged at level INFO.

    Args:
        recipe: model, data, and loss or task; stays as it is, so the same call gives the same
            result as far as torch's random numbers do.
        compression: bytes of the float32 tables over bytes served, above 1; met from below.
        settings: how to search; the defaults are for every recipe.

    Returns:
        The model, its scheme, and its metrics on the test split.

    Raises:
        ValueError: for bad data or a size that cannot be met, before training.
        NotImplementedError: in a process group of several ranks.
        NonFiniteError: if a loss becomes NaN or infinite.
    """
    from dnis_torchrec.search.search import search_once  # loads torch

    return search_once(recipe, compression, settings=settings)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
