"""What else could run a model: PyTorch as it is, its compiler, ONNX Runtime and OpenVINO, each as a call to time."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparta.errors import MissingPackageError, message

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RIVALS", "call_of", "rival"]


def call_of(model: Any, given: Any) -> Callable[[], Any]:
    """Return a call of a model with its inputs: a dict of keyword arguments, a tuple of arguments, or one."""
    if isinstance(given, dict):
        return lambda: model(**given)
    arguments = given if isinstance(given, tuple) else (given,)
    return lambda: model(*arguments)


def rival(name: str, model: nn.Module, given: Any) -> Callable[[], Any]:
    """Return the call of a model as one of :data:`RIVALS` runs it."""
    return RIVALS[name](model, given)


def _leaves(given: Any) -> list[Any]:
    return list(given.values()) if isinstance(given, dict) else list(given) if isinstance(given, tuple) else [given]


def _inductor(model: nn.Module, given: Any) -> Callable[[], Any]:
    import torch

    return call_of(torch.compile(model), given)


def _onnx(model: nn.Module, given: Any, folder: str) -> str:
    import torch

    path = f"{folder}/model.onnx"
    arguments, named = ((), given) if isinstance(given, dict) else (given if isinstance(given, tuple) else (given,), {})
    try:
        with _quietly():
            torch.onnx.export(model, arguments, path, kwargs=named, dynamo=True, verbose=False)
    except ImportError as error:
        raise MissingPackageError(message(f"ONNX needs {error.name}", fix=f"pip install {error.name}")) from error
    return path


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what an exporter says about itself from people who only want to compare."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _onnxruntime(model: nn.Module, given: Any) -> Callable[[], Any]:
    runtime = _needed("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        session = runtime.InferenceSession(_onnx(model, given, folder), providers=["CPUExecutionProvider"])
    feed = {slot.name: leaf.numpy() for slot, leaf in zip(session.get_inputs(), _leaves(given), strict=False)}
    return lambda: session.run(None, feed)


def _openvino(model: nn.Module, given: Any) -> Callable[[], Any]:
    runtime = _needed("openvino")
    with tempfile.TemporaryDirectory() as folder:
        compiled = runtime.Core().compile_model(_onnx(model, given, folder), "CPU")
    arrays = [leaf.numpy() for leaf in _leaves(given)]
    return lambda: compiled(arrays)


def _needed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingPackageError(message(f"{package} is not installed", fix=f"pip install {package}")) from error


RIVALS: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    "eager": call_of,
    "compile": _inductor,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
"""By name, as ``sparta bench --against`` takes them."""
