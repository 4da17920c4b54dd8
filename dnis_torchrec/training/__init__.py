"""Training: a model sharded, trained plainly, evaluated and saved."""
