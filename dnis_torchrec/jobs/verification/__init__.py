"""Verification: the checks and measurements of `dnis verify`."""

from dnis_torchrec.jobs.verification.findings import Finding
from dnis_torchrec.jobs.verification.verify import Verification, verify

__all__ = ["Finding", "Verification", "verify"]
