"""Reports: rows of results, and one page with four charts."""
