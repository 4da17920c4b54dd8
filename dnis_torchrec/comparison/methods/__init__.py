"""Methods that a search is compared with, at the same size, with the same data, early stopping and export."""

from collections.abc import Mapping

from dnis_torchrec.comparison.methods import dnis, low_rank, magnitude, mde, nis, random_search, uniform
from dnis_torchrec.comparison.methods.method import (
    Method,
    MethodResult,
    MethodTask,
    NotApplicableError,
    SizeNotMetError,
    result_row,
)
from dnis_torchrec.comparison.methods.trained_scheme import train_scheme

METHODS: Mapping[str, Method] = {
    "dense": uniform.dense,
    "no-embeddings": uniform.no_embeddings,
    "uniform": uniform.uniform,
    "uniform-grid": uniform.uniform_grid,
    "low-rank": low_rank.low_rank,
    "random": random_search.random_search,
    "mde": mde.mde,
    "magnitude": magnitude.magnitude,
    "magnitude-iterative": magnitude.magnitude_iterative,
    "nis-se": nis.nis_se,
    "nis-me": nis.nis_me,
    "dnis-paper": dnis.dnis_paper,
    "dnis-unrolled": dnis.dnis_unrolled,
    "dnis": dnis.dnis,
    "dnis-tuned": dnis.dnis_tuned,
    "dnis-retrained": dnis.dnis_retrained,
}
"""Every method of a comparison by its name."""

__all__ = [
    "METHODS",
    "Method",
    "MethodResult",
    "MethodTask",
    "NotApplicableError",
    "SizeNotMetError",
    "result_row",
    "train_scheme",
]
