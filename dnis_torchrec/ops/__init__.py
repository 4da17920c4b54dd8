"""Ops: compiled operators, what takes their place without a compiler, and checks of what they are given."""
