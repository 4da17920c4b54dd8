"""Soft selection: alpha, wrappers, sharding; in and out of a user's model."""
