"""Fixtures shared by the tests of quantization."""

import pytest
import torch

from create.quantize.nets import NETS


@pytest.fixture(params=sorted(NETS))
def net(request):
    """A function that makes a fresh model, always the same, and one that makes a batch from a size and a seed."""
    return NETS[request.param]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
