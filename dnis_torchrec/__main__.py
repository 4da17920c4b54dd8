"""`python -m dnis_torchrec` is `dnis`."""

from dnis_torchrec.cli import main

main()
