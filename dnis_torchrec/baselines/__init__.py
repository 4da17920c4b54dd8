"""What a search is compared with, at the same size, with the same data, early stopping and export."""

from dnis_torchrec.baselines.magnitude import MagnitudePruning
from dnis_torchrec.baselines.uniform import train_uniform, uniform_dim

__all__ = ["MagnitudePruning", "train_uniform", "uniform_dim"]
