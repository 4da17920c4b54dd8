"""What processes of tests need and would each import for themselves, in seconds; the server that forks them has it."""

import gc
from importlib import import_module

MODULES = (
    *("dnis_torchrec.cli.commands", "tests.models"),
    "torch.distributed.optim",  # which TorchRec imports when first a table has a fused optimizer
)

gc.disable()  # what is imported stays: to look for garbage in it takes a fifth of the time
for name in MODULES:
    import_module(name)
gc.freeze()
gc.enable()
