"""Does every form give what the exact rows give, on bags that break things?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dnis_torchrec.artifact import load
from dnis_torchrec.forms import form_named
from dnis_torchrec.jobs.verification.findings import FAILED, SKIPPED, Finding, judged
from dnis_torchrec.jobs.verification.served import summed
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme
from dnis_torchrec.serving.logical_tables import torchrec_config

ROW_ERRORS = {"fp32": 1e-6, "codes": 1e-6, "fp16": 2.0**-10, "int8": 0.006, "int4": 0.07}
"""Precision -> largest error of a stored value, as a share of its row's largest magnitude."""
FP32_ROUNDING = 2.0**-24
SMALLEST_ERROR = 1e-7
LONGEST_BAG = 1_000

Bag = list[tuple[int, float]]
FeatureBags = dict[str, list[Bag]]
Row = Callable[[str, int], Tensor]
"""``row(table, id)``: the exact row, ``(D,)`` float32."""


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The tables of one collection, looked up naively."""

    scheme: MixedDimensionScheme
    row: Row

    def expected(
        self, bags: FeatureBags, row_error: float
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Output key -> pooled ``(B, D)`` in float64, and how far a form may be off, ``(B, 1)``."""
        names = get_embedding_names_by_table(
            [torchrec_config(table, table.embedding_dim) for table in self.scheme.tables.values()]
        )
        pooled, allowed = {}, {}
        for table, names_of_table in zip(self.scheme.tables.values(), names, strict=True):
            for feature, name in zip(table.feature_names, names_of_table, strict=True):
                results = [self._pool(table, bag, row_error) for bag in bags[feature]]
                pooled[name] = torch.stack([result for result, _ in results])
                allowed[name] = torch.tensor([[error] for _, error in results], dtype=torch.float64)
        return pooled, allowed

    def _pool(self, table: TableScheme, bag: Bag, row_error: float) -> tuple[Tensor, float]:
        total, magnitude = torch.zeros(table.embedding_dim, dtype=torch.float64), 0.0
        for row_id, weight in bag:
            factor = weight if table.is_weighted else 1.0
            if 0 <= row_id < table.num_embeddings:
                row = self.row(table.name, row_id).double() * factor
                total += row
                magnitude += float(row.abs().max())
        length = len(bag) if table.pooling == "mean" and bag else 1
        rounding = (
            len(bag) * FP32_ROUNDING
        )  # of every addition in float32, which no form does without
        return total / length, ((row_error + rounding) * magnitude + SMALLEST_ERROR) / length


def check_form(
    artifact: Path, form: str, collection: str, oracle: Oracle, *, is_only: bool = True
) -> list[Finding]:
    """Tries one form of one collection on all bags of `bag_cases`, and on unknown ids."""
    place = form if is_only else f"{form}, {collection}"
    try:
        module = summed(load(artifact, form=form, collection=collection))
    except (ValueError, TypeError, NotImplementedError) as error:
        return [Finding("parity", place, FAILED, str(error))]
    findings = []
    for name, bags in bag_cases(oracle.scheme).items():
        findings.append(
            _compare(
                f"{place}: {name}",
                module,
                oracle,
                bags,
                ROW_ERRORS[form_named(form).precision.name],
            )
        )
    unknown = unknown_bags(oracle.scheme)
    findings.append(_check_refusal(f"{place}: refused", module, oracle.scheme, unknown))
    try:
        module = summed(load(artifact, form=form, collection=collection, unknown_ids="zero"))
    except NotImplementedError as error:
        return [*findings, Finding("unknown ids", f"{place}: as zero", SKIPPED, str(error))]
    row_error = ROW_ERRORS[form_named(form).precision.name]
    return [
        *findings,
        _compare(f"{place}: as zero", module, oracle, unknown, row_error, check="unknown ids"),
    ]


def bag_cases(scheme: MixedDimensionScheme) -> dict[str, FeatureBags]:
    """Bags that have broken lookups: name -> feature -> bags. The same at every call."""
    generator = torch.Generator().manual_seed(0)

    def number(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    def weight() -> float:
        return round(4 * float(torch.rand(1, generator=generator)) - 2, 3)

    def bags(make: Callable[[int], list[list[int]]]) -> FeatureBags:
        rows = rows_of_features(scheme)
        return {
            feature: [[(i, weight()) for i in bag] for bag in make(n)]
            for feature, n in rows.items()
        }

    return {
        "one id each": bags(lambda n: [[number(n)] for _ in range(33)]),
        "random bags": bags(lambda n: [[number(n) for _ in range(number(8))] for _ in range(17)]),
        "all empty": bags(lambda n: [[], [], []]),
        "first and last row": bags(lambda n: [[0], [n - 1], [0, n - 1]]),
        "all the same id": bags(lambda n: [[n // 2] * 50] * 5),
        "one long bag": bags(lambda n: [[], [number(n) for _ in range(LONGEST_BAG)], []]),
    }


def unknown_bags(scheme: MixedDimensionScheme) -> FeatureBags:
    """Bags with ids that are no rows, beside ones that are."""
    most: dict[str, int] = {}
    for table in scheme.tables.values():
        for feature in table.feature_names:
            most[feature] = max(most.get(feature, 0), table.num_embeddings)
    return {
        feature: [[(-1, 1.0)], [(0, 1.0), (n, 1.0)], [(2**31, 1.0)]] for feature, n in most.items()
    }


def rows_of_features(scheme: MixedDimensionScheme) -> dict[str, int]:
    """Feature -> rows that every table that it is read from has."""
    rows: dict[str, int] = {}
    for table in scheme.tables.values():
        for feature in table.feature_names:
            rows[feature] = min(rows.get(feature, table.num_embeddings), table.num_embeddings)
    return rows


def keyed_jagged_tensor(bags: FeatureBags, *, is_weighted: bool) -> KeyedJaggedTensor:
    """Bags as TorchRec takes them."""
    entries = [entry for of_feature in bags.values() for bag in of_feature for entry in bag]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([row_id for row_id, _ in entries], dtype=torch.int64),
        weights=torch.tensor([weight for _, weight in entries]) if is_weighted else None,
        lengths=torch.tensor(
            [len(bag) for of_feature in bags.values() for bag in of_feature], dtype=torch.int32
        ),
        stride=len(next(iter(bags.values()))),
    )


def _compare(
    subject: str,
    module: nn.Module,
    oracle: Oracle,
    bags: FeatureBags,
    row_error: float,
    *,
    check: str = "parity",
) -> Finding:
    expected, allowed = oracle.expected(bags, row_error)
    kjt = keyed_jagged_tensor(bags, is_weighted=_is_weighted(oracle.scheme))
    try:
        with torch.inference_mode():
            found: Mapping[str, Tensor] = module(kjt).to_dict()
    except (ValueError, RuntimeError, IndexError) as error:
        return Finding(check, subject, FAILED, f"{type(error).__name__}: {error}")
    if set(found) != set(expected):
        return Finding(
            check, subject, FAILED, f"expected keys {sorted(expected)}, got {sorted(found)}"
        )
    errors = {key: (found[key] - value).abs() for key, value in expected.items()}
    shares = {key: float((error / allowed[key]).max()) for key, error in errors.items()}
    wrong = [
        name for name, share in shares.items() if not share <= 1
    ]  # NaN is not, and compares with nothing
    detail = f"off by at most {max(float(error.max()) for error in errors.values()):.2g}"
    if wrong:
        name = wrong[0]
        detail = f"{name}: off by {float(errors[name].max()):.2g}, {shares[name]:.1f} times what it may be"
    return judged(check, subject, not wrong, detail)


def _check_refusal(
    subject: str, module: nn.Module, scheme: MixedDimensionScheme, bags: FeatureBags
) -> Finding:
    for index in range(3):
        one = {feature: of_feature[index : index + 1] for feature, of_feature in bags.items()}
        try:
            with torch.inference_mode():
                module(keyed_jagged_tensor(one, is_weighted=_is_weighted(scheme)))
        except (ValueError, RuntimeError, IndexError):
            continue
        ids = [row_id for row_id, _ in next(iter(one.values()))[0]]
        return Finding("unknown ids", subject, FAILED, f"ids {ids} were looked up without an error")
    return judged("unknown ids", subject, True, "")


def _is_weighted(scheme: MixedDimensionScheme) -> bool:
    return next(iter(scheme.tables.values())).is_weighted
