"""Jobs: what each `dnis` command does, as a function. The command line only parses; a notebook calls these.

Results are returned; progress goes to the console and TensorBoard through `dnis_torchrec.jobs.progress`.
"""

from dnis_torchrec.jobs.artifact_jobs import drop_in_, recipe_of_artifact, recorded_run, run_evaluate, run_export
from dnis_torchrec.jobs.prune_job import check_prune_out, check_source_kept, run_prune
from dnis_torchrec.jobs.recorded import build_recorded, load_recorded
from dnis_torchrec.jobs.report_job import read_runs, run_report
from dnis_torchrec.jobs.search_job import BASELINES, SearchJob, run_search
from dnis_torchrec.jobs.train_job import TrainJob, run_train

__all__ = [
    "BASELINES",
    "SearchJob",
    "TrainJob",
    "build_recorded",
    "check_prune_out",
    "check_source_kept",
    "drop_in_",
    "load_recorded",
    "read_runs",
    "recipe_of_artifact",
    "recorded_run",
    "run_evaluate",
    "run_export",
    "run_prune",
    "run_report",
    "run_search",
    "run_train",
]
