"""Blocks: how often each row occurs, and rows of similar frequency put together."""
