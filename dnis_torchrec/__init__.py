"""dnis_torchrec: embedding dimensions found by gradient descent on validation loss, for TorchRec models.

counts = count_frequencies(training_kjts, tables)          # how often each row occurs
blocks = blocks_from_counts(counts, tables)                # rows of similar frequency
prepare_(model, blocks)                                    # soft selection in
pipeline = BilevelTrainPipeline(sharded_model, ...)        # search while training
plain = merge_(sharded_model)                              # soft selection out
scheme = prune(plain, blocks, counts, size=Size(...))      # what is retained
export(plain, scheme, "artifact")                          # tables of just that size
collection = load("artifact")                              # drops in for the EmbeddingBagCollection
"""

from dnis_torchrec._dependencies import check_dependencies, silence_noise

check_dependencies()
silence_noise()

from dnis_torchrec.alpha_optimizer import Pressure
from dnis_torchrec.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.budget import Size
from dnis_torchrec.embedding_modules import SoftSelectionEmbeddingBagCollection
from dnis_torchrec.export import load
from dnis_torchrec.export.of_model import export
from dnis_torchrec.frequency import FrequencyCounts, count_frequencies, count_frequencies_in_frame
from dnis_torchrec.level_schedule import BilevelStream, LevelSchedule
from dnis_torchrec.narrow_tables import NarrowEmbeddingBagCollection, embedding_configs
from dnis_torchrec.prefetch_pipeline import PrefetchBilevelTrainPipeline
from dnis_torchrec.pruning import RetainedMask, prune
from dnis_torchrec.recipe import DataSplits, Recipe, TrainTask
from dnis_torchrec.scheme import MixedDimensionScheme
from dnis_torchrec.serving import MixedDimensionEmbeddingBagCollection
from dnis_torchrec.sharding import CpuEmbeddingBagCollectionSharder, make_sharding_plan, shard_model
from dnis_torchrec.swap import merge_, prepare_
from dnis_torchrec.train_pipeline import BilevelTrainPipeline

__all__ = [
    "BilevelStream",
    "BilevelTrainPipeline",
    "CpuEmbeddingBagCollectionSharder",
    "DataSplits",
    "FrequencyCounts",
    "LevelSchedule",
    "MixedDimensionEmbeddingBagCollection",
    "MixedDimensionScheme",
    "NarrowEmbeddingBagCollection",
    "PrefetchBilevelTrainPipeline",
    "Pressure",
    "Recipe",
    "RetainedMask",
    "RowBlocks",
    "Size",
    "SoftSelectionEmbeddingBagCollection",
    "TrainTask",
    "blocks_from_counts",
    "count_frequencies",
    "count_frequencies_in_frame",
    "embedding_configs",
    "export",
    "load",
    "make_sharding_plan",
    "merge_",
    "prepare_",
    "prune",
    "shard_model",
]
