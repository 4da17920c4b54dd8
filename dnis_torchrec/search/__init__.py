"""Search: both levels in one pipeline, which columns die, what is retained. Import from its modules."""
