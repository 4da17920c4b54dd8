"""Words on the report page and their meanings, the same as in docs/glossary.md."""

MEANINGS = {
    "axes": "The directions of a table's columns. Principal axes carry most of the information in "
    "the first columns. Tables are *turned* into them where that changes no prediction.",
    "auc": "The share of pairs of a positive and a negative sample that the predictions put in the "
    "right order.",
    "bits": "The size of a stored value. A column with 0 bits is dropped.",
    "block": "Rows of a table that are looked up about equally often. They share one row of alpha. "
    "A table has S blocks.",
    "bytes": "The size of the tables in the form that is served.",
    "column": "One of the D dimensions of a block. It is the smallest part that a search keeps or "
    "drops.",
    "compress": "A model from dnis compress. Its tables have few bits, and it was not trained "
    "further.",
    "compression": "The bytes of the float32 tables, divided by the served bytes.",
    "cut axes": "A model whose rows keep their first principal axes, in 8 or 4 bits a value.",
    "density": "The share of columns that a search has not dropped yet.",
    "epoch": "One pass over all training data.",
    "finish": "The phase of a search that trains the weights while they are rounded.",
    "given": "The phase of a search in which the optimizers of a trained model see gradients.",
    "int8 rows, int4 rows": "A model whose rows have 8 or 4 bits a value, and a scale each.",
    "loss": "The mean error of the predictions over samples. Training makes it small.",
    "loss increase": "The loss of a model minus the loss of the uncompressed one, on test.",
    "metric": "A number for the quality of predictions.",
    "occurrence": "A lookup of a row in the training data.",
    "plain training, ramp, release": "The phases of a search. Plain training teaches the weights "
    "until their early stop. The ramp drops columns until the tables have the size that you asked "
    "for. The release trains the remaining columns.",
    "predicted": "A loss increase computed from curvature, before any value is rounded.",
    "recent": "The newest samples of a stream. Training has read each of them once.",
    "search": "A model from dnis search. It was trained while columns were dropped.",
    "seed": "The number that fixes first weights, splits and the order of batches.",
    "selection": "The data on which epochs and settings are chosen. It is neither alpha's data nor "
    "the test data.",
    "step": "One update of the weights, on one batch.",
    "test": "The data for the final figures. No epoch, setting or size is chosen on it.",
    "uncompressed": "The trained model with its float32 tables.",
    "window": "The last steps of a stream. The model predicts each batch before it trains on it.",
}
"""Word, or words with commas between them -> meaning."""
