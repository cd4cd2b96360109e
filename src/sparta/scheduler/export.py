"""Writing a pruned model as ONNX, for the tools that read it.

ONNX has no sparse weights that runtimes use, so the zeros are stored as zeros; what gains from them is the compiler
that reads the file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparta.errors import FileFormatError, MissingPackageError, ShapeError, message
from sparta.modules import unwrapped

__all__ = ["export_onnx"]

_LARGEST_FILE = 2**30  # bytes of weights beyond which they go into a file beside; ONNX itself ends at 2 GiB


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
) -> Path:
    """Write `model`, in evaluation mode for the time of the call, to `path`; returns the path with its suffix.

    One file, unless the weights are too large for one; `options` go to :func:`torch.onnx.export` and may say otherwise.
    """
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise MissingPackageError(
            message(
                f"writing ONNX needs {' and '.join(missing)}",
                fix="install them with `pip install 'sparta-torch[onnx]'`",
            )
        )
    target = Path(path)
    if target.suffix != ".onnx":
        target = target.with_name(target.name + ".onnx")
    if not target.parent.is_dir():
        raise FileFormatError(message(f"cannot write {target}: its folder does not exist", fix="create it first"))
    model = unwrapped(model)
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise ShapeError(
            message("an ONNX file of a sharded model", "a whole model", "load its full state into a plain model first")
        )
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    chosen = {"verbose": False, "external_data": size > _LARGEST_FILE, **options}
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the exporter's own, of the classes it uses
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(model, inputs, str(target), **chosen)
    finally:
        for module, training in was_training.items():
            module.training = training
    return target
