"""Comparisons: methods x sizes x seeds under the same rules, one process per cell, resumable.

Inside this package, cells, registry, shared_recipe and streams come first, then worker and processes, plan, summary,
outputs, and run; each file imports only earlier ones.
"""
