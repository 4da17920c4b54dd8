"""Allocation: what every column of every block is worth, and how many bits it gets."""
