"""Measurements: one module per question; each prints a table and writes JSON.

Results: `<theme>_<hardware>_<date>.md`.
"""
