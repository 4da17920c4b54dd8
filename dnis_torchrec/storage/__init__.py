"""Storage: files and folders that are named by an address, wherever fsspec can reach them, with
retries."""
