"""The words of a page and what they mean, as docs/glossary.md has them."""

MEANINGS = {
    "axes": "The directions of a table's columns; principal axes carry most in the first columns, "
    "and tables are *turned* into them where that changes no prediction.",
    "auc": "The share of pairs, one sample of each label, that predictions put in the right order.",
    "bits": "Of a stored value; 0 bits is a dropped column.",
    "block": "Rows that share one row of alpha, because they are looked up about equally often; S "
    "blocks to a table.",
    "bytes": "What the tables take as they are served.",
    "column": "One of the D dimensions of a block: the least that the search keeps or drops.",
    "compress": "A model of dnis compress: tables of few bits, without a training step.",
    "compression": "Bytes of the float32 tables over served bytes.",
    "cut axes": "A model whose rows keep their first principal axes, in 8 or 4 bits a value.",
    "density": "The share of columns that a search has not dropped yet.",
    "epoch": "One pass over all training data.",
    "finish": "The phase of a search that trains through the rounding.",
    "given": "The phase of a search in which the optimizers of a trained model see gradients.",
    "int8 rows, int4 rows": "A model whose rows have 8 or 4 bits a value, and a scale each.",
    "loss": "What training makes small: the mean over samples of how wrong predictions are.",
    "loss increase": "The loss of a model minus the loss of the uncompressed one, on test.",
    "metric": "A number that says how good predictions are.",
    "occurrence": "A lookup of a row in the training data.",
    "plain training, ramp, release": "The phases of a search: weights alone, to their early stop; "
    "columns die down to the size asked for; what is left trains on.",
    "predicted": "A loss increase that is worked out from curvature, before any value is rounded.",
    "recent": "The newest samples of a stream, which training has read once.",
    "search": "A model of dnis search: trained on while its columns were dropped.",
    "seed": "The number that fixes first weights, splits and the order of batches.",
    "selection": "The data on which epochs and settings are chosen; never that of alpha, never "
    "test.",
    "step": "One update of the weights, on one batch.",
    "test": "The data that only judge: no epoch, setting or size is chosen on them.",
    "uncompressed": "The trained model with its float32 tables.",
    "window": "The last steps of a stream; each batch is predicted before it is trained on.",
}
"""Word, or words with commas between them -> meaning."""
