"""benchmarks/packaged.py measures models that agree, and gives a row for each; no assertion here looks at a clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import packaged
from dnis_torchrec.artifact.package import FlatModel, Signature
from dnis_torchrec.artifact.write import write_artifact


def test_models_that_agree_are_timed_and_others_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "BATCH_SIZES", (1, 8))
    dense = packaged.made_up(num_embeddings=(50, 7), embedding_dim=24)
    collection = dense.get_submodule(packaged.COLLECTION)
    scheme = packaged.scheme_of(collection)
    tables = {name: bag.weight.detach() for name, bag in collection.embedding_bags.items()}
    artifact = write_artifact(tables, scheme, tmp_path / "artifact", forms=packaged.FORMS)
    signature = Signature.of_batch(packaged.make_batch(scheme, 2))
    models = {"eager_dense_fp32": FlatModel(dense, signature)}
    for form in packaged.FORMS:
        models[f"eager_{form}"] = FlatModel(packaged.serving(dense, artifact, form), signature)
    rows = packaged.rows_of(models, scheme, rounds=9)
    assert [(row["model"], row["batch"]) for row in rows] == [(name, batch) for batch in (1, 8) for name in models]
    assert {row["latency_ratio"] for row in rows if row["model"] == "eager_dense_fp32"} == {1.0}
    with torch.no_grad():
        collection.embedding_bags["t0"].weight.add_(1.0)
    with pytest.raises(AssertionError, match="not close"):
        packaged.rows_of(models, scheme, rounds=9)
