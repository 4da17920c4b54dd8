"""Your own data frame: ``python examples/own_data.py`` searches on a small one that it draws; put yours in its place.

As a recipe of the command line: ``dnis search examples.own_data:recipe --compression 20 --out run``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

import dnis_torchrec as dnis


def draw_frame(num_rows: int = 20_000) -> pd.DataFrame:
    """Draws clicks of users on items; a user clicks on what has her colours.

    Args:
        num_rows: of the frame.
    """
    random = np.random.default_rng(0)
    colours = np.array(["red", "green", "blue", "white", "black"])
    users = random.zipf(1.3, num_rows) % 2_000
    items = random.zipf(1.2, num_rows) % 5_000
    likes = np.sin(users + items % 5) + random.normal(0, 0.5, num_rows)
    return pd.DataFrame(
        {
            "user": users,
            "item": [f"item-{item}" for item in items],
            "colours": [[colours[item % 5], colours[item % 3]] for item in items],
            "price": random.lognormal(3, 1, num_rows),
            "time": pd.date_range("2026-01-01", periods=num_rows, freq="min"),
            "clicked": likes > 0,
        }
    )


def recipe(data: Path | None, *, seed: int = 0, embedding_dim: int | None = None) -> dnis.Recipe:
    """Makes a recipe of the frame: which column is what, and a model.

    Args:
        data: a folder of Parquet files with the same columns, or None to draw a frame.
        seed: of the split, the order of the batches and the initial weights.
        embedding_dim: D, 64 by default.
    """
    return dnis.recipe_from_frame(
        draw_frame() if data is None else data,
        model="dlrm",
        label="clicked",
        dense=["price"],
        ids=["user", "item"],
        bags=["colours"],
        time="time",
        embedding_dim=embedding_dim,
        seed=seed,
    )


if __name__ == "__main__":
    own = recipe(None)
    found = dnis.search(own, compression=20)
    print(found)
    print(dnis.export(found.model, found.scheme, "own_artifact", encoder=own.data.encoder, overwrite=True))
    print(dnis.load_predictor("own_artifact")(draw_frame(5)))
