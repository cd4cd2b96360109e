"""The compiler interface: a fused sub-graph goes in as JSON, its specialised form and kernels come out.

Any graph compiler can stand on either side: it writes a *request* (calls, kernel spec with the TeSA of every operand,
formats it can take), and gets a *response* (what runs instead, the kernel's source and launch data, packed operands by
name). Both are plain JSON with a schema name and version, and an exchange file holds them for a whole model with the
tensors as safetensors, so that a reader needs nothing of this package (:mod:`sparta.compiler.exchange.reader`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparta.compiler.graph.serialize import graph_to_json
from sparta.compiler.lower import lowering_of
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.run.kernel_module import Fused, KernelModule
from sparta.compiler.session import EFFORT, Tune, checked_tune
from sparta.errors import FileFormatError, message
from sparta.files import save_tensors
from sparta.specialize.cpu.toolchain import sources
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.select import Choice, choose, tune_kernel
from sparta.specialize.tuning.store import TuningStore
from sparta.tesa.attribute import TeSA
from sparta.tesa.state import encode_state

__all__ = ["REQUEST", "RESPONSE", "VERSION", "Specialized", "request_for", "specialize", "write_exchange"]

REQUEST, RESPONSE = "sparta.subgraph.request", "sparta.subgraph.response"
VERSION = 1
_ATEN = {
    "linear": "aten.linear.default",
    "int8_linear": "aten.linear.default",
    "conv2d": "aten.conv2d.default",
    "conv1d": "aten.conv1d.default",
}


@dataclass(frozen=True)
class Specialized:
    """The answer to a request: JSON, and the tensors that it names."""

    response: dict[str, Any]
    tensors: dict[str, Tensor]


def request_for(name: str, spec: KernelSpec) -> dict[str, Any]:
    """Return the request of one fused sub-graph.

    Parameters
    ----------
    name
        Unique in the model.
    spec
        Operation, operands and epilogue.

    Examples
    --------
    >>> from sparta.specialize.linear.spec import linear_spec
    >>> request = request_for("fc", linear_spec(TeSA.dense((8, 4)), 16, torch.float32))
    >>> [call["target"] for call in request["calls"]], request["operands"]["result"]["shape"]
    (['aten.linear.default'], [16, 8])
    """
    epilogue = spec.epilogue
    bias = "bias" if epilogue.bias else None
    calls = [{"target": _ATEN.get(spec.op, spec.op), "args": ["x", "weight", bias], "result": "layer"}]
    last = "layer"
    after = ["activation"] * (epilogue.activation is not None) + ["residual"] * epilogue.residual
    for part in after[::-1] if epilogue.residual_first else after:
        if part == "activation":
            calls.append({"target": f"aten.{epilogue.activation}.default", "args": [last], "result": "activated"})
        else:
            calls.append({"target": "aten.add.Tensor", "args": [last, "residual"], "result": "sum"})
        last = str(calls[-1]["result"])
    shape = _result_shape(spec)
    result = TeSA.dense(
        shape,
        format=spec.attributes.get("output_format") or spec["input"].format or "fp32",
        dynamic=spec["input"].dynamic & {0},
    )
    return {
        "schema": REQUEST,
        "version": VERSION,
        "name": name,
        "calls": calls,
        "result": last,
        "kernel_spec": spec.to_dict(),
        "operands": {
            "x": {"shape": list(spec["input"].shape), "formats": ["dense"], "constant": False},
            "weight": {"shape": list(spec["weight"].shape), "formats": ["any"], "constant": True},
            "bias": {"shape": [spec["weight"].shape[0]], "formats": ["dense"], "constant": True} if bias else None,
            "residual": {"shape": shape, "formats": ["dense"], "constant": False} if epilogue.residual else None,
            "result": {"shape": shape, "formats": ["dense"], "tesa": encode_state(result)},
        },
    }


def specialize(
    request: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    tune: Tune = "quick",
    budget_s: float | None = None,
    store: TuningStore | None = None,
) -> Specialized:
    """Return the specialised form of a requested sub-graph.

    Parameters
    ----------
    request
        As :func:`request_for` writes it.
    tensors
        ``"weight"``, and ``"bias"`` where the request has one.
    tune
        ``"quick"`` measures a few candidates on random activations, ``"full"`` many; ``"off"`` takes the stored
        choice, else dense.
    budget_s
        Seconds for measuring; None takes what `tune` says.
    store
        Where results are looked up and kept; None keeps nothing.
    """
    spec = _spec_of(request)
    name = str(request["name"])
    lowering = lowering_of(spec.op)
    fused = Fused(spec.op, spec["weight"], dict(spec.attributes), spec.epilogue)
    weight = spec["weight"].apply(tensors["weight"])
    bias = tensors["bias"] if spec.epilogue.bias else None
    effort = checked_tune(tune)
    if effort != "off":
        x = lowering.sample(spec).to(weight.dtype)
        residual = torch.randn(_result_shape(spec), dtype=x.dtype, device=x.device) if spec.epilogue.residual else None
        problem = lowering.problem(spec, weight, x, bias, residual)
        trials, seconds = EFFORT[effort]
        choice = tune_kernel(problem, max_trials=trials, max_seconds=budget_s or seconds, store=store)
    else:
        choice = choose(spec, store)
    size = lowering.size(torch.empty(spec["input"].shape, device="meta"))
    live = weight[spec["weight"].mask(weight.device)]
    return _response(name, KernelModule(fused, live, bias, {size: (spec, choice)}), size, choice)


def write_exchange(model: CompiledModel, path: str | os.PathLike[str]) -> None:
    """Write a compiled model for other compilers: graph, sub-graphs, kernels' sources, launch data, packed operands.

    The file is read with JSON and safetensors alone, see :func:`sparta.compiler.exchange.reader.read_exchange`.
    """
    graph = model.general if model.general is not None else model.graph
    held = {id(t) for module in model.kernels.values() for t in module.buffers()}
    tensors = {f"tensor/{name}": t for name, t in graph.named_buffers() if id(t) not in held}
    subgraphs = []
    for name, module in model.kernels.items():
        size, (spec, choice) = next(iter(module.choices.items()))
        found = _response(name, module, size, choice)
        tensors |= found.tensors
        subgraphs.append({"request": request_for(name, spec), "response": found.response})
    payload = {
        "graph": graph_to_json(graph.graph),
        "signature": model.signature.to_dict(),
        "subgraphs": subgraphs,
        "sources": {file.name: file.read_text(encoding="utf-8") for file in sources()},
        "provenance": dict(model.provenance),
    }
    save_tensors(path, "exchange", VERSION, tensors, payload)


def _spec_of(request: Mapping[str, Any]) -> KernelSpec:
    """Return the kernel spec of a request, after looking at its schema and version."""
    if request.get("schema") != REQUEST:
        raise FileFormatError(message(f"the schema {request.get('schema')!r}", f"{REQUEST!r}"))
    version = request.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise FileFormatError(message(f"version {version!r} of {REQUEST}", f"1 to {VERSION}", "upgrade sparta"))
    try:
        return KernelSpec.from_dict(request["kernel_spec"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(
            message(f"a request that does not fit together ({error})", fix="write it again")
        ) from error


def _response(name: str, module: KernelModule, size: int, choice: Choice) -> Specialized:
    kernel, packed = module.built(size)
    tensors = {f"{name}/packed.{number}": tensor for number, tensor in enumerate(packed)}
    if module.bias is not None:
        tensors[f"{name}/bias"] = module.bias
    layout = kernel.layout()
    code: dict[str, Any] = {"language": "pytorch", "files": [], "launch": {}}
    if layout is not None:
        tensors |= {f"{name}/layout.{part}": array for part, array in layout.arrays.items()}
        code = {"language": "c++", "files": [file.name for file in sources()], "launch": dict(layout.launch)}
    entry = choice.entry
    response = {
        "schema": RESPONSE,
        "version": VERSION,
        "name": name,
        "implement": choice.implement,
        "params": dict(choice.params),
        "reason": choice.reason,
        "milliseconds": None if entry is None else entry.milliseconds,
        "dense_milliseconds": None if entry is None else entry.dense_milliseconds,
        "calls": [{"target": "kernel", "args": ["x", "residual" if module.fused.epilogue.residual else None]}],
        "kernel": code,
        "operands": sorted(tensors),
    }
    return Specialized(response, tensors)


def _result_shape(spec: KernelSpec) -> list[int]:
    weight = torch.empty(spec["weight"].shape, device="meta")
    x = torch.empty(spec["input"].shape, device="meta")
    return list(lowering_of(spec.op).dense(weight, x, None, spec.attributes).shape)
