"""Comparisons: methods x sizes x seeds under the same rules, one process per cell, resumable."""
