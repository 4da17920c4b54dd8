"""The paper (https://arxiv.org/abs/2006.04466) as published: alpha learns on validation loss, the smallest values go.

``python -m examples.paper examples.movielens:mf --data ml-1m --out paper --compression 8,20`` searches, prunes value by
value and writes the tables as scipy's sparse matrices. Everything runs in plain PyTorch on one device; `dnis search` of
the package is what to use for a model that is to be served.
"""
