"""A test that fails leaves nothing behind for the tests after it."""

import os

import pytest
import torch

from gpu.state import state_as_before


def fail_in_the_midst_of_changes():
    torch.cuda.set_sync_debug_mode("error")
    torch.set_float32_matmul_precision("high")
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
    torch.set_grad_enabled(False)
    os.environ["SPARTA_LEFT_BEHIND"] = "1"
    raise ZeroDivisionError


def test_a_failure_in_the_midst_of_changes_leaves_nothing_behind():
    deterministic = torch.backends.cudnn.deterministic
    with pytest.raises(ZeroDivisionError), state_as_before():
        fail_in_the_midst_of_changes()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.ones(1, device="cuda").item() == 1.0  # which waits for the device
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    assert torch.get_default_dtype() == torch.float32
    assert torch.backends.cudnn.deterministic == deterministic
    assert torch.is_grad_enabled()
    assert "SPARTA_LEFT_BEHIND" not in os.environ
