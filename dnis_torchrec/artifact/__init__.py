"""Artifacts: tables as they are stored, written, read back, verified and packaged."""
