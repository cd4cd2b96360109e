"""Writing a pruned model as ONNX, for the tools that read it.

The one idea to know: ONNX has no sparse weights that runtimes use, so the zeros are stored as zeros; what gains from
them is the compiler that reads the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparta.errors import FileFormatError, MissingPackageError, message

__all__ = ["export_onnx"]


def export_onnx(
    model: nn.Module,
    dummy_input: Any,  # noqa: ANN401
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
) -> Path:
    """Write `model`, in evaluation mode for the time of the call, to `path`; returns the path with its suffix."""
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise MissingPackageError(
            message(f"writing ONNX needs {' and '.join(missing)}", fix="install them with `pip install sparta[onnx]`")
        )
    target = Path(path)
    if target.suffix != ".onnx":
        target = target.with_name(target.name + ".onnx")
    if not target.parent.is_dir():
        raise FileFormatError(message(f"cannot write {target}: its folder does not exist", fix="create it first"))
    inputs = dummy_input if isinstance(dummy_input, tuple) else (dummy_input,)
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            torch.onnx.export(model, inputs, str(target), **options)
    finally:
        for module, training in was_training.items():
            module.training = training
    return target
