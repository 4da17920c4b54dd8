"""TorchX components, one per job: ``torchx run torchx_components/search.py:search --help``."""
