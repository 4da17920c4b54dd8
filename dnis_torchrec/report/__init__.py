"""Reports: rows of results as JSON, figures, a self-contained HTML page, and tables for terminal and pandas.

Inside this package, content comes first, then tables, then figures, then page; each file imports only earlier ones.
"""

from dnis_torchrec.report.content import BlockSummary, ReportContent, ReportRow, read_rows, write_rows
from dnis_torchrec.report.figures import (
    alpha_per_block,
    bytes_per_form,
    quality_against_size,
    retained_dims_against_frequency,
    save_png,
    save_svg,
    search_history,
)
from dnis_torchrec.report.page import write_report
from dnis_torchrec.report.tables import rows_frame, rows_table

__all__ = [
    "BlockSummary",
    "ReportContent",
    "ReportRow",
    "alpha_per_block",
    "bytes_per_form",
    "quality_against_size",
    "read_rows",
    "retained_dims_against_frequency",
    "rows_frame",
    "rows_table",
    "save_png",
    "save_svg",
    "search_history",
    "write_report",
    "write_rows",
]
