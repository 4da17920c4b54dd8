"""Planning: needs of tables on a cluster before and after pruning, from TorchRec's own planner,
with no GPU at hand."""
