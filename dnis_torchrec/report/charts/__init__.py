"""Charts of the pages, one function each, as graph objects of Plotly: pointing at a mark tells its
numbers."""

from dnis_torchrec.report.charts.frequency import joint_distribution, retained_dims
from dnis_torchrec.report.charts.quality import (
    bytes_per_form,
    loss_increase,
    pruning_rate,
    quality,
    setting,
)
from dnis_torchrec.report.charts.search import alpha_distribution, alpha_per_block, search_history

__all__ = [
    "alpha_distribution",
    "alpha_per_block",
    "bytes_per_form",
    "joint_distribution",
    "loss_increase",
    "pruning_rate",
    "quality",
    "retained_dims",
    "search_history",
    "setting",
]
