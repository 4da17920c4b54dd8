"""Blocks: how often each row occurs, and rows of similar frequency put together."""

NUM_BLOCKS = 8
"""Blocks of a table, unless the user says otherwise: in `blocks_from_counts`, compress and
search."""
