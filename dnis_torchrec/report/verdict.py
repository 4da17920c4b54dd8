"""What a run has gained, in one sentence, and what is uncertain about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dnis_torchrec.report.content import NO_EMBEDDINGS, SAME_BYTES, UNCOMPRESSED_ROWS, RowGroup
from dnis_torchrec.report.tables import format_count, format_difference, format_metric
from dnis_torchrec.report.test_split import TestSplit

SMALL_TEST_SPLIT = 10_000
"""A test split of fewer is called small."""
ONE_SEED = (
    "one seed: another one may change the last digits, so repeat with --seed before you trust them"
)


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A model that a result is compared with."""

    name: str
    compression: float
    gain: float | None = None

    def has_the_bytes_of(self, compression: float) -> bool:
        """Whether its tables take the bytes of others, within `SAME_BYTES`."""
        low, high = sorted((self.compression, compression))
        return high <= SAME_BYTES * low


def sentence(
    compression: float,
    metric: str,
    value: float | None,
    rivals: Sequence[Rival],
    *,
    higher_is_better: bool,
) -> str:
    """Says how much smaller tables are, and what that costs: against the model as it was, and
    against a rival."""
    told = [f"{format_count(compression)} times smaller"]
    if value is None:
        return f"{told[0]}; {metric} was not measured on the test split."
    values = [f"test {metric} {format_metric(value)}"]
    measured = {rival.name: rival for rival in rivals if rival.gain is not None}
    before = next((measured[name] for name in UNCOMPRESSED_ROWS if name in measured), None)
    if before is not None and before.gain is not None:
        values.append(f"{format_difference(before.gain)} against {before.name}")
    others = [rival for rival in rivals if rival.name not in (*UNCOMPRESSED_ROWS, NO_EMBEDDINGS)]
    rival = _strongest(
        [one for one in others if one.gain is not None], compression, higher_is_better
    )
    if rival is not None and rival.gain is not None:
        same = rival.has_the_bytes_of(compression)
        size = "of the same bytes" if same else f"at {format_count(rival.compression)} times"
        values.append(f"{format_difference(rival.gain)} against {rival.name} {size}")
    return (
        f"{told[0]}: {', '.join(values)} ({'higher' if higher_is_better else 'lower'} is better)."
    )


def _strongest(rivals: Sequence[Rival], compression: float, higher_is_better: bool) -> Rival | None:
    """Of those of the same bytes the best; where there are none, the smallest of all."""
    same = [rival for rival in rivals if rival.has_the_bytes_of(compression)]
    sign = 1 if higher_is_better else -1
    if same:
        return min(same, key=lambda rival: sign * (rival.gain or 0.0))
    return max(rivals, key=lambda rival: rival.compression, default=None)


def group_sentence(
    subject: RowGroup, groups: Sequence[RowGroup], metric: str, *, higher_is_better: bool
) -> str:
    """The `sentence` of rows of a report; differences are means over the seeds that both have."""
    rivals = []
    for group in groups:
        if group.method != subject.method:
            found = subject.difference(group, metric)
            gain = None if found is None else found[0]
            rivals.append(Rival(name=group.method, compression=group.compression, gain=gain))
    return sentence(
        subject.compression, metric, subject.mean(metric), rivals, higher_is_better=higher_is_better
    )


def doubts(
    split: TestSplit | None,
    metrics: Mapping[str, float],
    history: Sequence[Mapping[str, Any]] = (),
    max_epochs: int | None = None,
) -> tuple[str, ...]:
    """What is uncertain about results, beside the number of seeds."""
    found = []
    if split is not None and split.num_samples < SMALL_TEST_SPLIT:
        found.append(f"small test split: {split.num_samples:,} samples")
    if (
        split is not None
        and split.variance is not None
        and metrics.get("mse", 0.0) >= split.variance > 0
    ):
        found.append(
            f"no better than predicting the mean label, whose test mse is {format_metric(split.variance)}"
        )
    if metrics.get("ne", 0.0) >= 1:
        found.append(
            f"no better than predicting the mean label: test ne is {format_metric(metrics['ne'])}"
        )
    plain = [epoch for epoch in history if epoch.get("phase", "plain") == "plain"]
    losses = [float(epoch["selection_loss"]) for epoch in plain if "selection_loss" in epoch]
    if len(losses) > 1 and min(losses) == losses[0]:
        found.append(
            "plain training overfits from its second epoch on: give it more embedding_l2 or smaller rates"
        )
    if losses and len(losses) == max_epochs and (max_epochs == 1 or min(losses) == losses[-1]):
        found.append(
            f"plain training was still improving in its last epoch, {max_epochs}: allow more with --epochs"
        )
    return tuple(found)
