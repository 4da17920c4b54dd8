"""The ramp with curvature by hand: what may be served at every stage, what dies first, and what stays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dnis_torchrec.allocation.curvature import Curvature
from dnis_torchrec.allocation.energies import blocked_tables
from dnis_torchrec.blocks.blocking import RowBlocks, blocks_from_counts
from dnis_torchrec.blocks.counts import FrequencyCounts
from dnis_torchrec.scheme import packed_index_bytes
from dnis_torchrec.search import ramp as ramp_module
from dnis_torchrec.search.pipeline import AlphaOptimizer
from dnis_torchrec.search.prune import SizeOutOfReachError
from dnis_torchrec.search.ramp import COUNTED_BITS, LEAST_STEPS, STAGES, Ramp, check_reachable, num_stages
from dnis_torchrec.selection.alpha import Alpha

SIZES = {"wide": (120, 16), "narrow": (90, 16), "first_order": (120, 1)}
"""table -> N, D."""
LONGEST = STAGES * LEAST_STEPS
"""Steps of a ramp of all stages."""
DENSE_BYTES = 4 * sum(rows * dim for rows, dim in SIZES.values())


class Ramped:
    """A ramp over three tables whose model learns nothing, and whose curvature is given.

    Args:
        worth: table -> ``(S, D)``, what its columns are worth until they die.
        compression: that it leads to.
    """

    def __init__(self, worth: dict[str, Tensor], compression: float, monkeypatch: pytest.MonkeyPatch) -> None:
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for name, (rows, dim) in SIZES.items()
        ]
        counts = {name: torch.arange(rows, 0, -1) for name, (rows, _) in SIZES.items()}
        frequencies = FrequencyCounts(counts, dict.fromkeys(SIZES, 1), 100)
        self.blocks: RowBlocks = blocks_from_counts(frequencies, configs, num_blocks=2)
        self.model = EmbeddingBagCollection(tables=configs)
        alpha = Alpha(self.blocks.alpha_shapes)
        self.optimizer = AlphaOptimizer(alpha, self.blocks)
        self.samples: list[int] = []
        pipeline = SimpleNamespace(alpha=alpha, alpha_optimizer=self.optimizer, detached=self._detached)
        stream = SimpleNamespace(sample=lambda number: self.samples.append(number))
        self._worth, self._alpha, self._is_detached = worth, alpha, False
        monkeypatch.setattr(ramp_module, "curvature", self._curvature)
        self.ramp = Ramp(pipeline, stream, self.blocks, nn.MSELoss(), compression)  # type: ignore[arg-type]

    @contextmanager
    def _detached(self) -> Iterator[nn.Module]:
        self._is_detached = True
        yield self.model
        self._is_detached = False

    def _curvature(self, *_: object, **__: object) -> Curvature:
        """Of a prepared model: a column that died is worth nothing, whatever it was worth before."""
        assert self._is_detached
        worth = {name: own * self.living()[name] for name, own in self._worth.items()}
        return Curvature({}, worth, num_samples=1, relative_error=0.0)

    def living(self) -> dict[str, Tensor]:
        """table -> ``(S, D)`` bool."""
        return {
            name: self._alpha.of(dim)[self.blocks.first_alpha_row(name) :][: len(self._worth[name])] > 0
            for name, (_, dim) in SIZES.items()
        }

    def num_bytes(self) -> int:
        """Of what lives, every value in `COUNTED_BITS` bits."""
        total = 0
        for name, columns in self.living().items():
            routing = self.blocks.routings[name]
            if columns.any():
                rows = routing.row_counts().tolist()
                counts = columns.sum(1).tolist()
                own = [n * math.ceil(k * COUNTED_BITS / 8) + 4 * k for n, k in zip(rows, counts, strict=True)]
                total += sum(own) + packed_index_bytes(routing, columns.shape[1])
        return total


def drawn_worth(seed: int) -> dict[str, Tensor]:
    """Of a few orders of magnitude, as curvature is."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.exp(2 * torch.randn(2, dim, generator=generator, dtype=torch.float64))
        for name, (_, dim) in SIZES.items()
    }


@settings(max_examples=6)
@given(seed=st.integers(0, 100), compression=st.floats(8.5, 20), steps=st.integers(1, 150))
def test_what_lives_fits_the_line_at_every_stage(seed: int, compression: float, steps: int) -> None:
    """Stages are as long as each other and have `LEAST_STEPS`; of every block the best columns live."""
    with pytest.MonkeyPatch.context() as patch:
        worth, start = drawn_worth(seed), 32 / COUNTED_BITS
        ramped = Ramped(worth, compression, patch)
        before, stages = ramped.living(), num_stages(steps)
        assert stages == max(1, min(STAGES, steps // LEAST_STEPS))
        for done in range(1, steps + 1):
            stage = done * stages // steps
            ramped.ramp.follow(done, steps)
            assert ramped.num_bytes() <= DENSE_BYTES / (start * (compression / start) ** (stage / stages)) or stage == 0
            for name, living in ramped.living().items():
                assert not bool((living & ~before[name]).any())
                for kept, values in zip(living, worth[name], strict=True):
                    assert min(values[kept], default=math.inf) >= max(values[~kept], default=-math.inf)
            before = ramped.living()
        assert ramped.samples == list(range(1, stages + 1))
        assert ramped.num_bytes() >= 0.75 * DENSE_BYTES / compression


@pytest.mark.parametrize("compression", [1.5, 4, 8])
def test_sizes_that_bits_alone_lead_to_leave_all_columns(compression: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ramped = Ramped(drawn_worth(0), compression, monkeypatch)
    for done in range(1, LONGEST + 1):
        ramped.ramp.follow(done, LONGEST)
    assert all(bool(living.all()) for living in ramped.living().values())
    assert not ramped.samples  # nothing was measured
    assert ramped.optimizer.density() == 1


def test_nothing_dies_once_nothing_is_worth_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where columns are multiplied by each other, and each has lost its partner."""
    worth = drawn_worth(0)
    ramped = Ramped(worth, 16, monkeypatch)
    for done in range(1, LONGEST + 1):
        if done == 6 * LEAST_STEPS:
            before = ramped.living()
            for own in worth.values():
                own.zero_()
        ramped.ramp.follow(done, LONGEST)
    assert all(torch.equal(own, before[name]) for name, own in ramped.living().items())
    assert any(bool(own.any()) for own in before.values())
    (told,) = [record.message for record in caplog.records]
    assert told.startswith(f"stage 6 of {STAGES} of the ramp drops no column: none moves a prediction")


@pytest.mark.parametrize("worth_of_one", [5.0, 1e-6])
def test_tables_of_one_column_live_beside_wide_ones_if_they_are_worth_it(
    worth_of_one: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they carry for their bytes decides, not that they are few."""
    worth = {name: torch.linspace(1.0, 0.1, dim).double().repeat(2, 1) for name, (_, dim) in SIZES.items()}
    worth["first_order"] = torch.full((2, 1), worth_of_one, dtype=torch.float64)
    ramped = Ramped(worth, 16, monkeypatch)
    for done in range(1, LONGEST + 1):
        ramped.ramp.follow(done, LONGEST)
    assert ramped.living()["first_order"].flatten().tolist() == [worth_of_one > 1] * 2
    assert 0 < int(ramped.living()["wide"].sum()) < 32


def test_a_size_out_of_reach_is_refused_with_the_largest_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ramped = Ramped(drawn_worth(0), 20, monkeypatch)
    tables = blocked_tables(ramped.model, ramped.blocks)
    with pytest.raises(SizeOutOfReachError, match="compression: expected at most ") as caught:
        check_reachable(tables, ramped.blocks, 10_000)
    largest = float(str(caught.value).split("at most ")[1].split(" ")[0])
    check_reachable(tables, ramped.blocks, largest)
    with pytest.raises(SizeOutOfReachError):
        check_reachable(tables, ramped.blocks, largest + 0.02)
