"""Neural Input Search (Joglekar et al., KDD 2020): a controller learns by reinforcement which
blocks a table keeps."""

from benchmarks.rivals.methods.nis.methods import nis_me, nis_se

__all__ = ["nis_me", "nis_se"]
