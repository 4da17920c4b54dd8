"""Ops: compiled operators, their substitutes without a compiler, and checks of their inputs."""
