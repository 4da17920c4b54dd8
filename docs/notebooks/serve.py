# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Serve the artifact
#
# A model is compressed, its tables are written as an artifact, and another process loads them into a model of its own.
# The artifact is data: opening it runs nothing.

# %%
import tempfile
from pathlib import Path

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dnis_torchrec as dnis
from dnis_torchrec.allocation.axes import with_axes_
from dnis_torchrec.allocation.compress import measure_
from dnis_torchrec.artifact.load import load_dense_state

# %% [markdown]
# ## A model
#
# `make_model` stands for the code that training and serving share.

# %%
ROWS = 2000


def make_model() -> DLRM:
    """The plain model, with weights of its own."""
    tables = [EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=16, feature_names=["item"])]
    return DLRM(EmbeddingBagCollection(tables=tables), 4, [32, 16], [32, 1])


def make_batch(seed: int) -> Batch:
    """Bags of one to three items, and four dense features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4, (256,), generator=generator)
    items = (ROWS ** torch.rand(int(lengths.sum()), generator=generator)).long() - 1
    features = KeyedJaggedTensor(keys=["item"], values=items, lengths=lengths)
    return Batch(torch.rand(256, 4, generator=generator), features, labels=(items[lengths.cumsum(0) - 1] % 2).float())


torch.manual_seed(0)
model, batches = make_model(), [make_batch(seed) for seed in range(8)]
loss, optimizer = nn.BCEWithLogitsLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
for batch in 10 * batches:
    optimizer.zero_grad()
    loss(model(batch.dense_features, batch.sparse_features).squeeze(1), batch.labels).backward()
    optimizer.step()

# %% [markdown]
# ## Write
#
# `measure_` turns the tables into their axes and measures them. `shift_` moves the output bias, so that as many clicks
# are predicted as before. `export` writes tables and dense weights.

# %%
measured = measure_(model, batches, loss=loss)
found = measured.allocate(compression=8)
measured.shift_(found)
artifact = dnis.export(model, found.scheme, Path(tempfile.mkdtemp()) / "artifact")
for file in sorted(path for path in artifact.rglob("*") if path.is_file()):
    print(f"{file.stat().st_size:8,d} bytes  {file.relative_to(artifact)}")

# %% [markdown]
# ## Read
#
# Tables are mapped into memory, and the module drops in where the EmbeddingBagCollection was. Dense weights come from
# the artifact, too. A model that was turned has one buffer more; `with_axes_` gives it to a new one.

# %%
served = with_axes_(make_model())
served.sparse_arch.embedding_bag_collection = dnis.load(artifact)
left_out = served.load_state_dict(load_dense_state(artifact), strict=False)
assert not left_out.unexpected_keys

# %% [markdown]
# ## Serve
#
# Predictions move by what the codes round. `dnis evaluate` says what that does to a metric.

# %%
with torch.inference_mode():
    for batch in batches[:2]:
        exact = model(batch.dense_features, batch.sparse_features)
        answer = served(batch.dense_features, batch.sparse_features)
        print(f"{len(answer)} predictions, off by {float((answer - exact).abs().max()):.4f} at most")

# %% [markdown]
# `dnis package` writes the whole model as one folder that runs without TorchRec, in C++ too.
