"""Planning: needs of tables on a cluster before and after pruning, from TorchRec's own planner, with no GPU at hand.

Tables exist on the meta device only and the cluster as a `torchrec.distributed.planner.Topology`, so 10^10 rows on
hundreds of devices are planned on a laptop. Storage and step times are estimates of TorchRec's planner, never
measurements; times are lookups and their communication only.
"""
