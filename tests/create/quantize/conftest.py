"""Fixtures shared by the tests of quantization."""

import pytest

from create.quantize.nets import NETS


@pytest.fixture(params=sorted(NETS))
def net(request):
    """A function that makes a fresh model, always the same, and one that makes a batch from a size and a seed."""
    return NETS[request.param]
