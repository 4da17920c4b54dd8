# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Your own data frame
#
# A frame has a row for each sample: a label, numbers, ids, and lists of ids. From it come the splits, a model, and
# tables that are eight times smaller. It takes seconds on one core.

# %%
import logging
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import dnis_torchrec as dnis

logging.basicConfig(level=logging.INFO, format="%(message)s")

# %% [markdown]
# ## The frame
#
# Put your own in its place, or the path of a Parquet or CSV file. Ids may be of any type.

# %%
random, num_rows = np.random.default_rng(0), 6_000
users, items = random.zipf(1.5, num_rows) % 300, random.zipf(1.3, num_rows) % 500
frame = pd.DataFrame(
    {
        "user": users,
        "item": [f"item-{item}" for item in items],
        "tags": [[f"tag-{item % 7}", f"tag-{item % 3}"] for item in items],
        "price": random.lognormal(3, 1, num_rows),
        "time": pd.date_range("2026-01-01", periods=num_rows, freq="min"),
        "clicked": np.sin(users + items % 5) + random.normal(0, 0.5, num_rows) > 0,
    }
)
frame.head()

# %% [markdown]
# ## Which column is what
#
# `time` splits by time, so that the model is judged on what came after its training. Without it the split is random.

# %%
recipe = dnis.recipe_from_frame(
    frame,
    model="dlrm",
    label="clicked",
    dense=["price"],
    ids=["user", "item"],
    bags=["tags"],
    time="time",
    embedding_dim=16,
)

# %% [markdown]
# ## Train, and make the tables smaller
#
# A search trains the model until the loss on the selection split no longer falls. Then it drops columns and spends bits
# where the loss says that they count. It returns the trained model, compressed, where that is as good.

# %%
found = dnis.search(recipe, compression=8)
print(found)

# %% [markdown]
# ## An artifact to serve
#
# The folder holds tables, weights, a model card, and what turns raw ids and numbers into what the model reads. So any
# process predicts from raw rows. [Serve the artifact](serve.md) shows the other side.

# %%
folder = Path(tempfile.mkdtemp()) / "artifact"
print(dnis.export(found.model, found.scheme, folder, encoder=recipe.data.encoder))
dnis.load_predictor(folder)(frame.tail())
