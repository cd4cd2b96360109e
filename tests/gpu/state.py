"""Global state of PyTorch that a test may change, put back when it ends."""

import os
from contextlib import contextmanager

import torch


@contextmanager
def state_as_before():
    """Undo what is changed inside for the whole process, also where that fails; what is started inside ends there."""
    cudnn, dtype = torch.backends.cudnn, torch.get_default_dtype()
    flags = (cudnn.deterministic, cudnn.benchmark)
    precision, gradients = torch.backends.cuda.matmul.fp32_precision, torch.is_grad_enabled()
    variables = dict(os.environ)
    try:
        yield
    finally:
        if torch.cuda.get_sync_debug_mode():
            torch.cuda.set_sync_debug_mode("default")
        if torch.backends.cuda.matmul.fp32_precision != precision:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        cudnn.deterministic, cudnn.benchmark = flags
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        for name in (os.environ.keys() | variables.keys()) - {"PYTEST_CURRENT_TEST"}:
            if name in variables:
                os.environ[name] = variables[name]
            else:
                del os.environ[name]
        torch.cuda.synchronize()
