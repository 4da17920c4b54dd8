"""verify: is an artifact whole, and does every form of it serve what is stored? A finding for each
thing that was checked: hashes, values of bags that break lookups, unknown ids, the metric."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dnis_torchrec.artifact.load import Rows, exact_rows, load, read_scheme
from dnis_torchrec.artifact.manifest import CARD, MANIFEST, describe_file, read_manifest
from dnis_torchrec.ranks import Ranks
from dnis_torchrec.scheme import MixedDimensionScheme, TableScheme, is_gone
from dnis_torchrec.serving.sequences import ServedEmbeddingCollection
from dnis_torchrec.serving.tables import torchrec_config

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
ROW_ERROR = 1e-6
"""Largest error of a stored value, as a share of its row's largest magnitude."""
METRIC_LIMIT = 1e-5
"""Largest difference of an artifact's test metrics from those of its run."""
LONGEST_BAG = 1_000

_FP32_ROUNDING, _SMALLEST_ERROR = 2.0**-24, 1e-7
Bag = list[tuple[int, float]]
FeatureBags = dict[str, list[Bag]]
BagLookup = Callable[[KeyedJaggedTensor], KeyedTensor]


@dataclass(frozen=True)
class Finding:
    """The result of one check of a verification."""

    check: str
    subject: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """Results of a verification."""

    artifact: str
    findings: tuple[Finding, ...]
    forms: tuple[str, ...] = ()

    @property
    def failures(self) -> list[Finding]:
        """Returns the checks that failed."""
        return [item for item in self.findings if item.status == FAILED]

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, and ``"ok"``: true if no check failed."""
        return {"ok": not self.failures, **asdict(self)}


def verify(
    artifact: Path,
    *,
    measure: Callable[[str], Mapping[str, float]] | None = None,
    ranks: Ranks | None = None,
) -> Verification:
    """Checks an artifact on the first rank; on all ranks test metrics of a form, by `measure`."""
    ranks, result = ranks or Ranks(), None
    with ranks.together():
        if ranks.is_first:
            result = _check_content(artifact)
    manifest, findings = ranks.gather(result)[0] or ({}, [])
    if measure is not None and "forms" in manifest:
        findings += _check_metrics(manifest, measure, ranks)
    return Verification(str(artifact), tuple(findings), tuple(manifest.get("forms", ())))


def _check_content(artifact: Path) -> tuple[dict[str, Any], list[Finding]]:
    """Checks files, and each form if they are whole; without a manifest if they are not."""
    manifest, findings = check_files(artifact)
    if any(item.status == FAILED for item in findings):
        return {}, findings
    scheme, rows = read_scheme(artifact), exact_rows(artifact)
    rows = {name: cache(of_table) for name, of_table in rows.items()}
    names = sorted({table.collection for table in scheme.tables.values()})
    for name in names:
        tables = {t: table for t, table in scheme.tables.items() if table.collection == name}
        oracle = Oracle(MixedDimensionScheme(tables), rows)
        for form in manifest["forms"]:
            place = form if len(names) == 1 else f"{form}, {name}"
            findings += check_form(artifact, form, name, oracle, place)
    return manifest, findings


def _judge(check: str, subject: str, good: bool, detail: str) -> Finding:
    return Finding(check, subject, OK if good else FAILED, detail)


def check_files(artifact: Path) -> tuple[dict[str, Any], list[Finding]]:
    """Checks the manifest, then hashes every file that it lists; goes on after a bad one."""
    try:
        manifest = read_manifest(artifact)
    except ValueError as error:
        return {}, [Finding("checksums", MANIFEST, FAILED, str(error))]
    findings = [Finding("checksums", MANIFEST, OK)]
    for name, entry in manifest["files"].items():
        digest = describe_file(artifact, name)["sha256"]
        is_right, detail = digest == entry["sha256"], f"{entry['bytes']} bytes"
        if not is_right:
            detail = f"expected sha256 {entry['sha256']}, got {digest}"
        findings.append(_judge("checksums", name, is_right, detail))
    return manifest, findings + _strangers(artifact, manifest)


def _strangers(artifact: Path, manifest: dict[str, Any]) -> list[Finding]:
    """A finding per file that the manifest does not list, or that nothing in it refers to."""
    fields = ("scheme", "dense_state", "refresh", "directories")
    uses = {manifest.get("encoder"), *(n for field in fields for n in manifest.get(field, ()))}
    for table in manifest["tables"].values():
        uses |= {shard["file"] for shards in table["shards"].values() for shard in shards}
    idle, no_entry = "the manifest lists it, nothing refers to it", "the manifest does not list it"
    strangers = {}
    for name in manifest["files"].keys() - uses:
        folder = name.partition("/")[0]
        if folder != "scipy" and not is_gone(folder):  # which release 0.1.0 wrote
            strangers[name] = idle
    names = {MANIFEST, CARD, *manifest["files"]}
    for file in sorted(artifact.rglob("*")):
        name = file.relative_to(artifact).as_posix()
        if file.is_symlink() or not (file.is_dir() or name in names):
            strangers[name] = no_entry
    return [
        Finding("checksums", name, FAILED, f"no file of the artifact: {why}")
        for name, why in strangers.items()
    ]


@dataclass(frozen=True)
class Oracle:
    """The tables of one collection and their rows, looked up naively."""

    scheme: MixedDimensionScheme
    rows: Mapping[str, Rows]

    def features(self, bags: FeatureBags) -> KeyedJaggedTensor:
        """Bags as TorchRec takes them."""
        is_weighted = next(iter(self.scheme.tables.values())).is_weighted
        flat = [bag for of_feature in bags.values() for bag in of_feature]
        entries = [entry for bag in flat for entry in bag]
        return KeyedJaggedTensor(
            keys=list(bags),
            values=torch.tensor([row_id for row_id, _ in entries], dtype=torch.int64),
            weights=torch.tensor([weight for _, weight in entries]) if is_weighted else None,
            lengths=torch.tensor([len(bag) for bag in flat], dtype=torch.int32),
            stride=len(next(iter(bags.values()))),
        )

    def pool(self, bags: FeatureBags) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Output key -> pooled ``(B, D)`` in float64, and how far a form may be off, ``(B, 1)``."""
        tables = list(self.scheme.tables.values())
        configs = [torchrec_config(table, table.embedding_dim) for table in tables]
        sums, limits = {}, {}
        for table, names in zip(tables, get_embedding_names_by_table(configs), strict=True):
            for feature, name in zip(table.feature_names, names, strict=True):
                results = [self._pool_bag(table, bag) for bag in bags[feature]]
                sums[name] = torch.stack([result for result, _ in results])
                limits[name] = torch.tensor([[error] for _, error in results], dtype=torch.float64)
        return sums, limits

    def _pool_bag(self, table: TableScheme, bag: Bag) -> tuple[Tensor, float]:
        total, magnitude = torch.zeros(table.embedding_dim, dtype=torch.float64), 0.0
        for row_id, weight in bag:
            if 0 <= row_id < table.num_embeddings:
                row = self.rows[table.name](row_id, row_id + 1)[0].double()
                row *= weight if table.is_weighted else 1.0
                total += row
                magnitude += float(row.abs().max())
        length = len(bag) if table.pooling == "mean" and bag else 1
        # every addition in float32 rounds, which no form does without
        rounding_error = len(bag) * _FP32_ROUNDING
        return total / length, ((ROW_ERROR + rounding_error) * magnitude + _SMALLEST_ERROR) / length


def check_form(
    artifact: Path, form: str, collection: str, oracle: Oracle, place: str
) -> list[Finding]:
    """Tries one form of one collection on all bags of `bag_cases`, and on unknown ids."""
    try:
        module = _summed(load(artifact, form=form, collection=collection))
        lenient = _summed(load(artifact, form=form, collection=collection, unknown_ids="zero"))
    except (ValueError, TypeError, NotImplementedError) as error:
        return [Finding("parity", place, FAILED, str(error))]
    findings = [
        compare("parity", f"{place}: {name}", module, oracle, bags)
        for name, bags in bag_cases(oracle.scheme).items()
    ]
    bags = unknown_bags(oracle.scheme)
    findings.append(_check_refusal(f"{place}: refused", module, oracle, bags))
    findings.append(compare("unknown ids", f"{place}: as zero", lenient, oracle, bags))
    return findings


def _summed(module: nn.Module) -> BagLookup:
    """What an EmbeddingCollection looks up, summed over each bag as a pooled one does."""

    def look_up(features: KeyedJaggedTensor) -> KeyedTensor:
        bags: dict[str, JaggedTensor] = module(features)
        sums = [
            torch.segment_reduce(part.values(), "sum", lengths=part.lengths(), initial=0)
            for part in bags.values()
        ]
        return KeyedTensor.from_tensor_list(list(bags), sums)

    return look_up if isinstance(module, ServedEmbeddingCollection) else module


def bag_cases(scheme: MixedDimensionScheme) -> dict[str, FeatureBags]:
    """Bags that have broken lookups: name -> feature -> bags. The same at every call."""
    generator = torch.Generator().manual_seed(0)
    rows = _rows_of_features(scheme, min)

    def number(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    def weight() -> float:
        return round(4 * float(torch.rand(1, generator=generator)) - 2, 3)

    def bags(make: Callable[[int], list[list[int]]]) -> FeatureBags:
        ids = {feature: make(n) for feature, n in rows.items()}
        return {f: [[(i, weight()) for i in bag] for bag in of_f] for f, of_f in ids.items()}

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
    rows = _rows_of_features(scheme, max)
    return {f: [[(-1, 1.0)], [(0, 1.0), (n, 1.0)], [(2**31, 1.0)]] for f, n in rows.items()}


def _rows_of_features(
    scheme: MixedDimensionScheme, choose: Callable[[int, int], int]
) -> dict[str, int]:
    """Feature -> rows that every table that it is read from has, or that any has."""
    rows: dict[str, int] = {}
    for table in scheme.tables.values():
        for feature in table.feature_names:
            rows[feature] = choose(rows.get(feature, table.num_embeddings), table.num_embeddings)
    return rows


def compare(
    check: str, subject: str, module: BagLookup, oracle: Oracle, bags: FeatureBags
) -> Finding:
    """Compares what a module looks up with what the oracle does."""
    targets, limits = oracle.pool(bags)
    try:
        with torch.inference_mode():
            values: Mapping[str, Tensor] = module(oracle.features(bags)).to_dict()
    except (ValueError, RuntimeError, IndexError) as error:
        return Finding(check, subject, FAILED, f"{type(error).__name__}: {error}")
    if set(values) != set(targets):
        detail = f"expected keys {sorted(targets)}, got {sorted(values)}"
        return Finding(check, subject, FAILED, detail)
    errors = {key: (values[key] - value).abs() for key, value in targets.items()}
    shares = {key: float((error / limits[key]).max()) for key, error in errors.items()}
    # NaN is not at most 1, and compares with nothing
    wrong = [name for name, share in shares.items() if not share <= 1]
    largest = {key: float(error.max()) for key, error in errors.items()}
    detail = f"off by at most {max(largest.values()):.2g}"
    if wrong:
        name = wrong[0]
        detail = f"{name}: off by {largest[name]:.2g}, {shares[name]:.1f} times what it may be"
    return _judge(check, subject, not wrong, detail)


def _check_refusal(subject: str, module: BagLookup, oracle: Oracle, bags: FeatureBags) -> Finding:
    for index in range(3):
        one = {feature: of_feature[index : index + 1] for feature, of_feature in bags.items()}
        try:
            with torch.inference_mode():
                module(oracle.features(one))
        except (ValueError, RuntimeError, IndexError):
            continue
        ids = [row_id for row_id, _ in next(iter(one.values()))[0]]
        return Finding("unknown ids", subject, FAILED, f"ids {ids} were looked up without an error")
    return _judge("unknown ids", subject, True, "")


def _check_metrics(
    manifest: dict[str, Any], measure: Callable[[str], Mapping[str, float]], ranks: Ranks
) -> list[Finding]:
    of_run = manifest["run"].get("metrics")
    if of_run is None:
        return [Finding("metric", "all forms", SKIPPED, "the manifest holds no metrics")]
    findings = []
    for form in manifest["forms"]:
        try:
            metrics = measure(form)
        except (ValueError, TypeError, NotImplementedError) as error:
            if ranks.world_size > 1:  # the others may be waiting for this one's samples
                raise
            findings.append(Finding("metric", form, FAILED, str(error)))
            continue
        for name in sorted(set(metrics) & set(of_run)):
            change = metrics[name] - of_run[name]
            detail = f"{metrics[name]:.6f}, {change:+.6f} from the run's (may be {METRIC_LIMIT:g})"
            subject, is_good = f"{form}, {name}", abs(change) <= METRIC_LIMIT
            findings.append(_judge("metric", subject, is_good, detail))
    return findings
