"""Streams over ranks: nobody waits for a batch that another lacks, counts add up, an error is everybody's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dnis_torchrec import count_frequencies
from dnis_torchrec.search.search import search
from dnis_torchrec.training.settings import Saving
from tests.distributed.harness import RankResults, run_on_ranks
from tests.distributed.streaming_scenarios import (
    NUM_SAMPLES,
    SIZE,
    STREAMED,
    TABLES,
    count,
    fail_alone,
    make_batches,
    own_batches,
    recipe_of,
    search_stream,
    serve,
    write_clicks,
)

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All scenarios on two ranks."""
    scenarios = {"serve": serve, "count": count, "fail_alone": fail_alone, "search": search_stream}
    return run_on_ranks(WORLD_SIZE, scenarios, tmp_path_factory.mktemp("ranks"))


def test_ranks_serve_every_sample_once_in_equally_many_batches(ranks: RankResults) -> None:
    found = ranks["serve"]
    for drop_last in ("True", "False"):
        assert {len(epoch) for rank in found for epoch in rank[drop_last]} == {found[0][f"length {drop_last}"]}
        for epoch in range(2):
            served = [label for rank in found for batch in rank[drop_last][epoch] for label in batch]
            assert len(set(served)) == len(served)
            lost = NUM_SAMPLES - len(served)
            assert lost == (NUM_SAMPLES % (4 * WORLD_SIZE) if drop_last == "True" else 0)


def test_counts_of_all_ranks_are_those_of_one(ranks: RankResults) -> None:
    batches = [batch for rank in range(WORLD_SIZE) for batch in make_batches(own_batches(rank), seed=rank)]
    wanted = count_frequencies(batches, TABLES)
    for found in ranks["count"]:
        assert found["num_samples"] == wanted.num_samples
        assert found["lengths"] == wanted.max_bag_lengths
        assert all(rows.equal(wanted.counts[name]) for name, rows in found["counts"].items())


def test_an_error_of_one_rank_is_raised_on_all(ranks: RankResults) -> None:
    for found in ranks["fail_alone"]:
        assert "table 'small', feature 'f', batch 1: expected ids in 0..8, got 9" in found["error"]
        assert found["sum"] == sum(range(WORLD_SIZE))


def test_another_number_of_ranks_with_epochs_of_another_length_is_refused(gloo, ranks: RankResults) -> None:
    """Warm-up and ramp are counted in steps: they would end in the midst of an epoch, or twice."""
    folder = ranks.folder / "stopped"
    recipe = recipe_of(ranks.folder / "clicks_0.tsv")
    steps = ranks["search"][0]["whole"][0]["step"]
    message = (
        rf"checkpoint .*stopped/step-\d+: expected one with {2 * steps + 1} lower steps per epoch, as many as now, "
    )
    with pytest.raises(ValueError, match=message + rf"got {steps}; resume with .* splits itself over ranks on 2 of"):
        search(recipe, SIZE, folder, torch.device("cpu"), settings=STREAMED, saving=Saving(resume=True))


def test_a_search_of_a_stream_is_one_search_and_resumes_where_it_was(ranks: RankResults, tmp_path: Path) -> None:
    """Every rank reads its own share: none takes a slice of what is a share already."""
    first, second = ranks["search"]
    assert first["whole"] == second["whole"]
    recipe = recipe_of(write_clicks(tmp_path / "clicks.tsv"))
    train = recipe.data.train
    assert first["whole"][0]["step"] == train.num_samples // (16 * WORLD_SIZE)
    for own in (first, second):
        assert own["resumed"] == own["whole"]
        assert own["stopped"].startswith("epoch 3, lower step 38")
    assert train.num_samples > WORLD_SIZE * 16 * first["whole"][0]["step"]  # an epoch leaves some out, counting none
    assert {int(rows.sum()) for name, rows in first["counts"].items() if name != "tags"} == {train.num_samples}
    assert all(rows.equal(second["counts"][name]) for name, rows in first["counts"].items())
