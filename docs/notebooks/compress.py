# %% [markdown]
# # Compress a model
#
# We train a small DLRM on generated clicks and make its tables 20 times smaller, without more training. The loss falls.
# It takes seconds on one core.

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

# %% [markdown]
# ## Data
#
# Every user and every item has four hidden numbers. A click is likely if they agree. Few items occur often, and most of
# them rarely.

# %%
USERS, ITEMS, BATCH_SIZE = 200, 300, 512
generator = torch.Generator().manual_seed(0)
user_taste, item_taste = torch.randn(USERS, 4, generator=generator), torch.randn(ITEMS, 4, generator=generator)


def make_batch() -> Batch:
    """Samples of a click log: a user, an item, and whether there was a click."""
    users = torch.randint(USERS, (BATCH_SIZE,), generator=generator)
    items = (ITEMS ** torch.rand(BATCH_SIZE, generator=generator)).long() - 1
    clicks = torch.bernoulli(torch.sigmoid((user_taste[users] * item_taste[items]).sum(1)), generator=generator)
    lengths = torch.ones(2 * BATCH_SIZE, dtype=torch.int64)
    features = KeyedJaggedTensor(keys=["user", "item"], values=torch.cat([users, items]), lengths=lengths)
    return Batch(torch.zeros(BATCH_SIZE, 1), features, clicks)


train, held_out = [make_batch() for _ in range(60)], [make_batch() for _ in range(8)]

# %% [markdown]
# ## A trained model
#
# Any training will do. This one has D = 32, which is more than four hidden numbers need.

# %%
torch.manual_seed(0)
tables = [
    EmbeddingBagConfig(name="user", num_embeddings=USERS, embedding_dim=32, feature_names=["user"]),
    EmbeddingBagConfig(name="item", num_embeddings=ITEMS, embedding_dim=32, feature_names=["item"]),
]
model = DLRM(EmbeddingBagCollection(tables=tables), 1, [32], [32, 1])
loss, optimizer = nn.BCEWithLogitsLoss(), torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(5):
    for batch in train:
        optimizer.zero_grad()
        loss(model(batch.dense_features, batch.sparse_features).squeeze(1), batch.labels).backward()
        optimizer.step()


def held_out_loss(model: nn.Module) -> float:
    """Mean loss on data that the model was not trained on."""
    with torch.no_grad():
        losses = [loss(model(b.dense_features, b.sparse_features).squeeze(1), b.labels) for b in held_out]
    return float(torch.stack(losses).mean())


before = held_out_loss(model)
print(f"uncompressed: loss {before:.4f}")

# %% [markdown]
# ## Twenty times smaller
#
# `compress` measures how much every column of every block of rows matters, assigns bits, and replaces the tables.

# %%
found = dnis.compress(model, train, loss=loss, compression=20, held_out=held_out)
after = held_out_loss(model)
print(found)
print(f"compressed {found.compression:.1f} times: loss {after:.4f}, {after - before:+.4f}")

# %% [markdown]
# The loss falls because the model has overfitted its few samples, and the dropped bits are mostly noise.
#
# ## Where the bits went
#
# There is a row for each block, the most frequent first, and a column for each axis, the strongest first. A column with
# 0 bits is dropped.

# %%
print(found.scheme.tables["item"].bits)

# %% [markdown]
# ## Save, load, predict
#
# `export` writes the tables and all other weights. `load_model` reads them into a new model, in any process. Its loss
# is the same: lower than that of the uncompressed model, with tables 20 times smaller.

# %%
folder = dnis.export(model, found.scheme, Path(tempfile.mkdtemp()) / "artifact")
served = dnis.load_model(DLRM(EmbeddingBagCollection(tables=tables), 1, [32], [32, 1]), folder)
served_loss = held_out_loss(served)
print(f"uncompressed: loss {before:.4f}, served: loss {served_loss:.4f}")
assert found.compression >= 20
assert after - 1e-5 < served_loss < min(after + 1e-5, before)
