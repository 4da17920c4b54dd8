# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Search and compare
#
# A search trains a model for its size. Is it better than compressing the same model after its training? Both are one
# command; here they run from Python, as they would in a shell.
#
# `ML_1M` is the folder of GroupLens' MovieLens-1M. On two cores the whole takes about a quarter of an hour.

# %%
import json
import os
import subprocess
import sys
from pathlib import Path

RECIPE = os.environ.get("RECIPE", "examples.movielens:ctr_dlrm")
DATA = ["--data", os.environ["ML_1M"]] if "ML_1M" in os.environ else []
SIZE = float(os.environ.get("COMPRESSION", "20"))
OUT = Path(os.environ.get("OUT", "notebook_search"))


def dnis(*arguments: object) -> None:
    """Runs one command of dnis."""
    subprocess.run([sys.executable, "-m", "dnis_torchrec", *map(str, arguments)], check=True)


# %% [markdown]
# ## Train, and compress
#
# The plain model first. Compress takes it as it is.

# %%
dnis("train", RECIPE, *DATA, "--out", OUT / "trained")
dnis("compress", RECIPE, "--from", OUT / "trained", *DATA, "--compression", SIZE, "--out", OUT / "small")

# %% [markdown]
# ## Search
#
# The same recipe, the same seed, the same bytes.

# %%
dnis("search", RECIPE, *DATA, "--compression", SIZE, "--out", OUT / "run")
dnis("export", OUT / "run", "--out", OUT / "artifact")

# %% [markdown]
# ## Compare
#
# Metrics are on the test split, of the modules that serve.

# %%
results = {}
for name, artifact in (("compressed", OUT / "small" / f"x{SIZE:g}"), ("searched", OUT / "artifact")):
    dnis("evaluate", artifact, "--recipe", RECIPE, *DATA, "--json", OUT / f"{name}.json")
    results[name] = json.loads((OUT / f"{name}.json").read_text(encoding="utf-8"))
    print(name, results[name])

# %% [markdown]
# `python -m benchmarks.rivals` does this for many methods and sizes.
