"""Soft selection: alpha, the wrapper that applies it, on shards too; in and out of a user's
model."""
