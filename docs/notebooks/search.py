# %% [markdown]
# # Search
#
# A search trains a model for a size. Here it gives a lower loss than compressing the same model after training, at the
# same bytes. It takes less than a minute on one core.

# %%
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
# Every user and every item has four hidden numbers. A click is likely if they agree. There are few samples for each
# user, so a model with 16 columns overfits.

# %%
USERS, ITEMS, BATCH_SIZE, DIM = 250, 400, 512, 16
generator = torch.Generator().manual_seed(0)
user_taste, item_taste = torch.randn(USERS, 4, generator=generator), torch.randn(ITEMS, 4, generator=generator)


def make_batches(number: int) -> list[Batch]:
    """Batches of a click log."""
    batches = []
    for _ in range(number):
        users = (USERS ** torch.rand(BATCH_SIZE, generator=generator)).long() - 1
        items = (ITEMS ** torch.rand(BATCH_SIZE, generator=generator)).long() - 1
        clicks = torch.bernoulli(torch.sigmoid((user_taste[users] * item_taste[items]).sum(1)), generator=generator)
        lengths = torch.ones(2 * BATCH_SIZE, dtype=torch.int64)
        features = KeyedJaggedTensor(keys=["user", "item"], values=torch.cat([users, items]), lengths=lengths)
        batches.append(Batch(torch.zeros(BATCH_SIZE, 1), features, clicks))
    return batches


data = dnis.DataSplits(
    train=make_batches(25), validation=make_batches(10), selection=make_batches(10), test=make_batches(10)
)

# %% [markdown]
# ## A recipe
#
# A recipe is a model, its data and its loss.

# %%
torch.manual_seed(0)
tables = [
    EmbeddingBagConfig(name="user", num_embeddings=USERS, embedding_dim=DIM, feature_names=["user"]),
    EmbeddingBagConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"]),
]
model = DLRM(EmbeddingBagCollection(tables=tables), 1, [DIM], [64, 32, 1])
recipe = dnis.Recipe(model=model, data=data, loss=nn.BCEWithLogitsLoss())

# %% [markdown]
# ## Search
#
# The search trains until the selection loss stops improving. Then it drops columns while the weights adapt, and
# assigns bits. It also compresses the trained model to the same bytes, and returns the better of the two.

# %%
found = dnis.search(recipe, compression=20)
print(found)

# %% [markdown]
# ## Compare
#
# These are losses on the selection split, at the same bytes. The loss of the search is the lower one.

# %%
losses = found.outcome.selection_losses
for name, loss in losses.items():
    print(f"{name}: {loss:.4f}")
assert found.compression >= 20
assert losses["search"] < losses["compress"]
