"""Planning: what tables need on a cluster before and after pruning, from TorchRec's own planner, with no GPU at hand.

Tables exist on the meta device only and the cluster as a `torchrec.distributed.planner.Topology`, so 10^10 rows on
hundreds of devices are planned on a laptop. Storage and step times are estimates of TorchRec's planner, never
measurements; times are lookups and their communication only.
"""

from dnis_torchrec.jobs.planning.cluster import Cluster, parse_bytes
from dnis_torchrec.jobs.planning.placement import Placement
from dnis_torchrec.jobs.planning.plans import PlanComparison, TablesPlan, compare_plans, plan_table
from dnis_torchrec.jobs.planning.tables import PlannedTable, parse_tables, tables_of_scheme

__all__ = [
    "Cluster",
    "Placement",
    "PlanComparison",
    "PlannedTable",
    "TablesPlan",
    "compare_plans",
    "parse_bytes",
    "parse_tables",
    "plan_table",
    "tables_of_scheme",
]
