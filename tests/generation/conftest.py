"""What the tests of language models share."""

import pytest
import torch

pytest.importorskip("transformers")


@pytest.fixture
def ids():
    return torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(3))
