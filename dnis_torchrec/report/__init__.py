"""Reports: rows of results as JSON, figures, a self-contained HTML page, and tables for terminal and pandas.

Inside this package, row_distribution and content come first, then tables, rendering and pareto_points,
then figures, then pareto, of_run and several_runs, then page and search_images; each file imports only earlier ones.
"""

from dnis_torchrec.report.content import BlockSummary, ReportContent, ReportRow, read_report_rows, write_rows
from dnis_torchrec.report.figures import (
    alpha_distribution,
    alpha_per_block,
    bytes_per_form,
    joint_distribution,
    quality_against_pruning_rate,
    quality_against_setting,
    quality_against_size,
    retained_dims_against_frequency,
    save_png,
    save_svg,
    search_history,
)
from dnis_torchrec.report.of_run import (
    block_summaries,
    count_rows,
    count_searched_rows,
    named_alpha,
    searched_summaries,
)
from dnis_torchrec.report.page import write_report
from dnis_torchrec.report.pareto import pareto_chart
from dnis_torchrec.report.pareto_points import ParetoPoint, pareto_front, pareto_points
from dnis_torchrec.report.row_distribution import RowDistribution
from dnis_torchrec.report.search_images import SearchImages
from dnis_torchrec.report.several_runs import RunResults, SeveralRuns, combine
from dnis_torchrec.report.tables import rows_frame, rows_table

__all__ = [
    "BlockSummary",
    "ParetoPoint",
    "ReportContent",
    "ReportRow",
    "RowDistribution",
    "RunResults",
    "SearchImages",
    "SeveralRuns",
    "alpha_distribution",
    "alpha_per_block",
    "block_summaries",
    "bytes_per_form",
    "combine",
    "count_rows",
    "count_searched_rows",
    "joint_distribution",
    "named_alpha",
    "pareto_chart",
    "pareto_front",
    "pareto_points",
    "quality_against_pruning_rate",
    "quality_against_setting",
    "quality_against_size",
    "read_report_rows",
    "retained_dims_against_frequency",
    "rows_frame",
    "rows_table",
    "save_png",
    "save_svg",
    "search_history",
    "searched_summaries",
    "write_report",
    "write_rows",
]
