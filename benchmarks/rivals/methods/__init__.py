"""Methods that a search is compared with, at the same size, with the same data, early stopping and
export."""

from collections.abc import Mapping

from benchmarks.rivals.methods import (
    compressed,
    dnis,
    int4_aware,
    low_rank,
    magnitude,
    mde,
    nis,
    pep,
    random_search,
    shared_rows,
    uniform,
)
from benchmarks.rivals.methods.method import (
    Method,
    MethodResult,
    MethodTask,
    NotApplicableError,
    SizeNotMetError,
    result_row,
)
from benchmarks.rivals.methods.trained_scheme import train_scheme

METHODS: Mapping[str, Method] = {
    "dense": uniform.dense,
    "no-embeddings": uniform.no_embeddings,
    "uniform": uniform.uniform,
    "uniform-grid": uniform.uniform_grid,
    "low-rank": low_rank.low_rank,
    "int4-qat": int4_aware.int4_aware,
    "hash": shared_rows.hashed,
    "qr": shared_rows.quotient_remainder,
    "pep": pep.pep,
    "compress": compressed.compressed,
    "random": random_search.random_search,
    "mde": mde.mde,
    "magnitude": magnitude.magnitude,
    "magnitude-iterative": magnitude.magnitude_iterative,
    "nis-se": nis.nis_se,
    "nis-me": nis.nis_me,
    "dnis-paper": dnis.dnis_paper,
    "dnis-unrolled": dnis.dnis_unrolled,
    "dnis": dnis.dnis,
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
