"""Figures of a report, one function each, on matplotlib's object interface.

Inside this folder, style comes first, then quality, comparison, compression, frequency, search and saving, which know
only style.
"""

from dnis_torchrec.report.figures.comparison import quality_at_the_same_bytes
from dnis_torchrec.report.figures.compression import loss_against_compression, quality_against_compression
from dnis_torchrec.report.figures.frequency import joint_distribution, retained_dims_against_frequency
from dnis_torchrec.report.figures.quality import (
    bytes_per_form,
    quality_against_pruning_rate,
    quality_against_setting,
    quality_against_size,
)
from dnis_torchrec.report.figures.saving import inline_svg, save_png, save_svg
from dnis_torchrec.report.figures.search import COUNTED_BLOCKS, alpha_distribution, alpha_per_block, search_history

__all__ = [
    "COUNTED_BLOCKS",
    "alpha_distribution",
    "alpha_per_block",
    "bytes_per_form",
    "inline_svg",
    "joint_distribution",
    "loss_against_compression",
    "quality_against_compression",
    "quality_against_pruning_rate",
    "quality_against_setting",
    "quality_against_size",
    "quality_at_the_same_bytes",
    "retained_dims_against_frequency",
    "save_png",
    "save_svg",
    "search_history",
]
