"""Search: both levels in one pipeline, and which columns die while weights train on."""
