"""TorchX components, one per job: ``torchx run dnis.search --help``. How to launch what where: docs/launching.md."""
