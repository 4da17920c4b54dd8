"""Verification: what `dnis verify` checks and measures."""

from dnis_torchrec.jobs.verification.findings import Finding
from dnis_torchrec.jobs.verification.verify import Verification, verify

__all__ = ["Finding", "Verification", "verify"]
