"""From a frame to an artifact, and in a fresh process from raw rows to predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import dnis_torchrec as dnis
from dnis_torchrec.artifact.manifest import CARD, ENCODER, read_manifest
from dnis_torchrec.artifact.verify import FAILED, verify
from dnis_torchrec.data.frames import MODELS, FrameEncoder


def draw_frame(size: int = 600) -> pd.DataFrame:
    random = np.random.default_rng(0)
    users = random.integers(0, 40, size) * 7 + 3
    return pd.DataFrame(
        {
            "user": users,
            "item": [None if item == 0 else f"item {item}" for item in random.integers(0, 9, size)],
            "tags": [["a", "b", "c"][: user % 4] for user in users],
            "price": random.gamma(2, 10, size),
            "click": (users % 2).astype(float),
        }
    )


def compressed(**columns: Any) -> tuple[dnis.Recipe, Any]:
    roles: dict[str, Any] = {"label": "click", "ids": ["user", "item"], "bags": ["tags"], "dense": ["price"]}
    recipe = dnis.recipe_from_frame(draw_frame(), **roles, embedding_dim=8, **{"model": "dlrm"} | columns)
    for parameter in recipe.model.parameters():  # as if it had learned
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    return recipe, dnis.compress(recipe.model, list(recipe.data.train), loss=recipe.task, compression=4)


def predictions(recipe: dnis.Recipe, frame: Any) -> torch.Tensor:
    with torch.no_grad():
        return recipe.model(*recipe.data.encoder(frame)).flatten()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[dnis.Recipe, Any, Path]:
    recipe, result = compressed()
    path = tmp_path_factory.mktemp("served") / "artifact"
    return recipe, result, dnis.export(recipe.model, result.scheme, path, encoder=recipe.data.encoder)


ROWS = {
    "user": [3, 10.0, "17"],
    "item": ["item 1", None, "item 2"],
    "tags": [["a"], [], ["a", "c"]],
    "price": [1, 2, None],
}


def test_a_fresh_process_predicts_from_raw_rows(exported: Any) -> None:
    recipe, _, path = exported
    program = (
        "import json, sys, dnis_torchrec as dnis\n"
        "predict = dnis.load_predictor(sys.argv[1])\n"
        "print(json.dumps(predict(json.loads(sys.argv[2])).tolist()))"
    )
    call = [sys.executable, "-c", program, str(path), json.dumps(ROWS)]
    output = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert torch.tensor(json.loads(output)).equal(predictions(recipe, ROWS))


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"dlrm"}))
def test_every_model_of_a_frame_is_built_by_its_name(tmp_path: Path, model: str) -> None:
    recipe, result = compressed(model=model)
    dnis.export(recipe.model, result.scheme, tmp_path / "a", encoder=recipe.data.encoder)
    predict = dnis.load_predictor(tmp_path / "a")
    frame = draw_frame().head(50)
    assert predict(frame).equal(predictions(recipe, frame))
    frame.assign(tags=frame["tags"].map("|".join)).to_csv(tmp_path / "f.csv")
    assert predict(tmp_path / "f.csv").equal(predictions(recipe, frame))
    assert predict(frame.head(1)).shape == (1,)


class Two(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense_features: Any, sparse_features: Any) -> dict[str, torch.Tensor]:
        logits = self.model(dense_features, sparse_features)
        return {"logits": logits, "clicks": logits.sigmoid()}


def test_a_model_of_ones_own_is_filled(exported: Any, tmp_path: Path) -> None:
    recipe, result, path = exported
    fresh = dnis.recipe_from_frame(
        draw_frame(), model="dlrm", label="click", ids=["user", "item"], bags=["tags"], dense=["price"], embedding_dim=8
    )
    predict = dnis.load_predictor(path, fresh.model)
    assert predict.model is fresh.model
    assert predict(ROWS).equal(predictions(recipe, ROWS))
    data = dnis.DataSplits.from_frame(draw_frame(), label="click", ids=["user", "item"], bags=["tags"], dense=["price"])
    dnis.export(recipe.model, result.scheme, tmp_path / "own", encoder=data.encoder)
    with pytest.raises(ValueError, match=r"expected a model of recipe_from_frame, .*; pass the model"):
        dnis.load_predictor(tmp_path / "own")


def test_the_encoder_is_a_file_of_the_artifact_as_others_are(exported: Any) -> None:
    recipe, _, path = exported
    manifest = read_manifest(path)
    assert manifest["encoder"] == ENCODER
    assert manifest["files"][ENCODER]["bytes"] == (path / ENCODER).stat().st_size
    with pa.ipc.open_file(path / ENCODER) as file:
        texts = file.read_all()["id"].to_pylist()
    assert texts[:40] == sorted(texts[:40], key=recipe.data.encoder.rows["user"].__getitem__)
    assert not [finding for finding in verify(path).findings if finding.status == FAILED]
    assert "load_predictor" in (path / CARD).read_text()
    assert f"ids are rows that {ENCODER} numbers" in repr(dnis.load(path))


def other_bytes(path: Path) -> None:
    content = bytearray((path / ENCODER).read_bytes())
    content[len(content) // 2] ^= 1
    (path / ENCODER).write_bytes(content)


def cut_off(path: Path) -> None:
    (path / ENCODER).write_bytes((path / ENCODER).read_bytes()[:-8])


def linked(path: Path) -> None:
    (path / ENCODER).rename(path.parent / "elsewhere")
    (path / ENCODER).symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_bytes, f"file '{ENCODER}': expected sha256"),
        (cut_off, f"file '{ENCODER}': expected .* bytes"),
        (linked, f"file '{ENCODER}': expected a plain file"),
        (lambda path: (path / ENCODER).unlink(), f"file '{ENCODER}': expected a file"),
    ],
)
def test_a_damaged_encoder_is_refused(tmp_path: Path, change: Callable[[Path], None], message: str, exported) -> None:
    recipe, result, _ = exported
    path = dnis.export(recipe.model, result.scheme, tmp_path / "a", encoder=recipe.data.encoder)
    change(path)
    with pytest.raises(ValueError, match=message):
        dnis.load_predictor(path)


def table(**settings: Any) -> bytes:
    """The file of an encoder of one feature with two ids, with other settings."""
    plain = {"dense": [], "features": [["user", 2]], "bags": [], "model": None, "embedding_dim": None}
    ids = pa.table({"id": pa.array(settings.pop("id", ["a", None]))})
    ids = ids.replace_schema_metadata({"encoder": json.dumps(plain | settings)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, ids.schema) as file:
        file.write_table(ids)
    return sink.getvalue().to_pybytes()


def test_what_is_no_encoder_is_refused() -> None:
    assert FrameEncoder.from_bytes(table(), "f").rows == {"user": {"a": 1, None: 2}}
    hostile = [b"", b"ARROW1\0\0", table(features=[["user", 3]]), table(features=[["user", 1]]), table(bags="user")]
    hostile += [table(id=["a", "a"]), table(id=[[1], [2]]), table(embedding_dim=0), table(dense=[["x", None, 1]])]
    hostile += [table(dense=[["x", 0.0, 0.0]])]
    for content in hostile:
        with pytest.raises(ValueError, match="^f"):
            FrameEncoder.from_bytes(content, "f")


def test_an_artifact_without_an_encoder_and_an_encoder_of_other_tables_are_refused(exported: Any, tmp_path) -> None:
    recipe, result, _ = exported
    dnis.export(recipe.model, result.scheme, tmp_path / "a")
    with pytest.raises(ValueError, match="expected an encoder of raw rows, got none; export with encoder="):
        dnis.load_predictor(tmp_path / "a")
    assert "encoder" not in (tmp_path / "a" / CARD).read_text() + repr(dnis.load(tmp_path / "a"))
    frame = draw_frame(9000).assign(user=range(9000))
    with pytest.warns(UserWarning, match="an id of its own"):
        other = dnis.DataSplits.from_frame(frame, label="click", ids=["user", "item"], bags=["tags"])
    with pytest.raises(ValueError, match="encoder, feature 'user': expected"):
        dnis.export(recipe.model, result.scheme, tmp_path / "b", encoder=other.encoder)
    assert not (tmp_path / "b").exists()
