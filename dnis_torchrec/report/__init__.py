"""Reports: rows of results as JSON, charts, a self-contained HTML page, and tables for terminal and
pandas."""

from dnis_torchrec.report.content import (
    BlockSummary,
    ReportContent,
    ReportRow,
    read_report_rows,
    write_rows,
)
from dnis_torchrec.report.of_run import block_summaries, count_rows, named_alpha, searched_summaries
from dnis_torchrec.report.page import write_report
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
    "block_summaries",
    "combine",
    "count_rows",
    "named_alpha",
    "pareto_front",
    "pareto_points",
    "read_report_rows",
    "rows_frame",
    "rows_table",
    "searched_summaries",
    "write_report",
    "write_rows",
]
