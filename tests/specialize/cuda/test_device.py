"""The CUDA device: asked in one place, with an answer whose cause tells what is missing."""

from pathlib import Path

import torch

import sparta.specialize
from sparta.specialize.cuda import device
from sparta.specialize.implement import Cause


def test_the_hardware_is_asked_in_one_place():
    root = Path(sparta.specialize.__file__).parent
    asking = {
        path.relative_to(root).as_posix() for path in root.rglob("*.py") if "get_device_capability" in path.read_text()
    }
    assert asking == {"cuda/device.py"}


def test_an_answer_tells_whether_a_device_its_generation_or_triton_is_missing(monkeypatch):
    device.capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.cuda_here().cause is Cause.DEVICE
    assert device.capability() == (0, 0)
    device.capability.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert device.cuda_here(device.AMPERE)
    assert not device.bulk_copies()
    assert device.cuda_here(device.HOPPER).cause is Cause.CAPABILITY
    monkeypatch.setattr(device, "_has_triton", lambda: False)
    assert device.triton_here().cause is Cause.MISSING_TOOL
    device.capability.cache_clear()


def test_formats_have_the_dtypes_and_sizes_of_their_names():
    assert {"bf16": torch.bfloat16, "fp16": torch.float16} == device.HALF_FORMATS
    assert [device.itemsize(name) for name in device.FORMATS] == [4, 2, 2]
