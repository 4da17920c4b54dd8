"""What all tests of soft selection share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_weights() -> None:
    """Models are drawn alike in every run: one small DLRM in fifty has a last ReLU that is 0 whatever it is given."""
    torch.manual_seed(0)
