"""dnis_torchrec: what every column of every block of an embedding table is worth, and tables of
just that size."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dnis_torchrec._dependencies import check_dependencies, silence_noise, version

if TYPE_CHECKING:
    from dnis_torchrec.allocation.axes import with_axes_
    from dnis_torchrec.allocation.bits import allocate
    from dnis_torchrec.allocation.compress import compress, measure_, packed_collections
    from dnis_torchrec.allocation.curvature import curvature
    from dnis_torchrec.artifact.export import export
    from dnis_torchrec.artifact.load import load
    from dnis_torchrec.blocks.blocking import blocks_from_counts
    from dnis_torchrec.blocks.counts import count_frequencies
    from dnis_torchrec.data.frames import recipe_from_frame
    from dnis_torchrec.data.recipe import DataSplits, Recipe
    from dnis_torchrec.data.task import Predictions, Task, TrainTask
    from dnis_torchrec.search.loop import SearchLoop
    from dnis_torchrec.search.one_call import search_once as search
    from dnis_torchrec.search.pipeline import BilevelTrainPipeline
    from dnis_torchrec.search.prune import Size, prune
    from dnis_torchrec.search.ramp import Ramp
    from dnis_torchrec.search.schedule import BilevelStream, LevelSchedule
    from dnis_torchrec.selection.plan import (
        CpuEmbeddingBagCollectionSharder,
        make_sharding_plan,
        shard_model,
    )
    from dnis_torchrec.selection.swap import merge_, prepare_
    from dnis_torchrec.selection.torchrec_inputs import remapped
    from dnis_torchrec.selection.wrapper import plain_state_dict
    from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection
    from dnis_torchrec.serving.configs import embedding_configs

__all__ = [
    "BilevelStream",
    "BilevelTrainPipeline",
    "CpuEmbeddingBagCollectionSharder",
    "DataSplits",
    "LevelSchedule",
    "MixedDimensionEmbeddingBagCollection",
    "Predictions",
    "Ramp",
    "Recipe",
    "SearchLoop",
    "Size",
    "Task",
    "TrainTask",
    "allocate",
    "blocks_from_counts",
    "compress",
    "count_frequencies",
    "curvature",
    "embedding_configs",
    "export",
    "load",
    "make_sharding_plan",
    "measure_",
    "merge_",
    "packed_collections",
    "plain_state_dict",
    "prepare_",
    "prune",
    "recipe_from_frame",
    "remapped",
    "search",
    "shard_model",
    "with_axes_",
]

__version__ = version()

_HOME = {
    "with_axes_": "allocation.axes",
    "curvature": "allocation.curvature",
    "allocate": "allocation.bits",
    "compress": "allocation.compress",
    "measure_": "allocation.compress",
    "packed_collections": "allocation.compress",
    "load": "artifact.load",
    "export": "artifact.export",
    "blocks_from_counts": "blocks.blocking",
    "count_frequencies": "blocks.counts",
    "recipe_from_frame": "data.frames",
    "DataSplits": "data.recipe",
    "Recipe": "data.recipe",
    "TrainTask": "data.task",
    "Task": "data.task",
    "Predictions": "data.task",
    "search": "search",
    "Size": "search.prune",
    "BilevelStream": "search.schedule",
    "LevelSchedule": "search.schedule",
    "BilevelTrainPipeline": "search.pipeline",
    "prune": "search.prune",
    "Ramp": "search.ramp",
    "SearchLoop": "search.loop",
    "MixedDimensionEmbeddingBagCollection": "serving",
    "embedding_configs": "serving.configs",
    "remapped": "selection.torchrec_inputs",
    "plain_state_dict": "selection.wrapper",
    "CpuEmbeddingBagCollectionSharder": "selection.plan",
    "make_sharding_plan": "selection.plan",
    "shard_model": "selection.plan",
    "merge_": "selection.swap",
    "prepare_": "selection.swap",
}
"""Public name -> its module, which is imported when the name is first asked for."""

check_dependencies()
silence_noise()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOME[name]}")
    value = (
        home if name == _HOME[name] else getattr(home, name)
    )  # a room that can be called is there under its name
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
