"""The list of all methods."""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.rivals import falling_rates, mde, nis, ours, paper, pep, random_search, rows, shared_rows, single_values
from benchmarks.rivals import product_quantisation as pq
from benchmarks.rivals.cce import cce
from benchmarks.rivals.int4_qat import int4_qat
from benchmarks.rivals.mpe import mpe
from benchmarks.rivals.rows import ROW_PRECISIONS
from benchmarks.rivals.single_values import VALUE_PRECISIONS
from benchmarks.rivals.task import Served, Task


class Method(NamedTuple):
    """A method, and what holds for it."""

    run: Callable[[Task], Served]
    precisions: tuple[str, ...] = ROW_PRECISIONS  # of several the best on the selection split counts
    learns: bool = False  # on the validation split, which then cannot be training data, too
    leaves: bool = False  # tables of `Recipe.leave_alone` alone; others do not apply to such a recipe
    has_size: bool = True


METHODS = {
    "dense": Method(rows.dense, ("fp32",), leaves=True, has_size=False),
    "no-embeddings": Method(rows.no_embeddings, ("fp32",), has_size=False),
    "int8-rows": Method(rows.whole_rows, ("int8",), leaves=True, has_size=False),
    "int4-rows": Method(rows.whole_rows, ("int4",), leaves=True, has_size=False),
    "cut-axes": Method(rows.cut_axes),
    "uniform": Method(rows.uniform),
    "uniform-grid": Method(rows.uniform_grid),
    "low-rank": Method(rows.low_rank),
    "int4-qat": Method(int4_qat, ("int4",)),
    "hash": Method(shared_rows.hash_rows),
    "qr": Method(shared_rows.quotient_remainder),
    "cce": Method(cce),
    "pq": Method(pq.product_quantisation),
    "pq-trained": Method(pq.trained_codewords),
    "mpe": Method(mpe, ("codes",)),
    "random": Method(random_search.random_search),
    "mde": Method(mde.mde),
    "nis-se": Method(nis.nis_se),
    "nis-me": Method(nis.nis_me),
    "magnitude": Method(single_values.magnitude, VALUE_PRECISIONS),
    "magnitude-iterative": Method(single_values.magnitude_iterative, VALUE_PRECISIONS),
    "pep": Method(pep.pep, VALUE_PRECISIONS),
    "dnis-paper": Method(paper.first_order, VALUE_PRECISIONS, learns=True),
    "dnis-unrolled": Method(paper.unrolled, VALUE_PRECISIONS, learns=True),
    "falling-rates": Method(falling_rates.falling_rates, ("fp32",), leaves=True, has_size=False),
    "falling-rates+compress": Method(falling_rates.compressed, ("codes",), learns=True, leaves=True),
    "compress": Method(ours.compress, ("codes",), learns=True, leaves=True),
    "search": Method(ours.search, ("codes",), learns=True, leaves=True),
}
