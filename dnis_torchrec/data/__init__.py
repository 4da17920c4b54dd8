"""Data: what a user brings: recipes, labels, batches, streams; checked, and split over ranks."""
