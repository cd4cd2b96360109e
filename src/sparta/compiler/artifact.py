"""Artifacts: a compiled model in one file, which loads on any machine and in any process, without the model's code.

One checked safetensors file holds the live weights and, as JSON, the graph, the plan, the spec, the provenance and
the certificate. The one idea to know: weights are stored without a kernel's layout, and packed when the file is
loaded; so a kernel that does not fit the machine is chosen anew, or dense runs, and the report says so.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparta.compiler.graph_json import graph_from_json, graph_to_json
from sparta.compiler.int8 import OP, integers_of, row_scales
from sparta.compiler.kernels import Fused, KernelModule
from sparta.compiler.lower import lowering_of
from sparta.compiler.module import CompiledModel
from sparta.compiler.plan import Plan, Whole, choice_from_dict
from sparta.compiler.program import assemble
from sparta.compiler.report import Report
from sparta.compiler.settings import ForgivingStore
from sparta.compiler.signature import Signature
from sparta.errors import FileFormatError, SpartaError, message
from sparta.files import load_tensors, save_tensors
from sparta.specialize.implement import implement_named
from sparta.specialize.kernel_spec import Epilogue, KernelSpec
from sparta.specialize.store import device_name
from sparta.specialize.tuner import DENSE, Choice, build, choose, tune_kernel
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec
from sparta.tesa.state import from_state, to_state

__all__ = ["FORMAT_VERSION", "load", "save"]

FORMAT_VERSION = 1
_KIND = "model"


def save(model: CompiledModel, path: str | os.PathLike[str]) -> None:
    """Write a compiled model to one file; see :meth:`CompiledModel.save`."""
    tensors: dict[str, Tensor] = {}
    kernels = {}
    for name, module in model.kernels.items():
        kernels[name] = _kernel_fields(name, module, tensors)
    held = {id(t) for module in model.kernels.values() for t in module.buffers()}
    for name, value in model.graph.named_buffers():
        if id(value) not in held:
            tensors[f"tensor/{name}"] = value
    payload = {
        "graph": graph_to_json(model.graph.graph),
        "signature": model.signature.to_dict(),
        "kernels": kernels,
        "report": model.report.to_dict(),
        "spec": {name: _tesa_fields(f"spec/{name}", tesa, tensors) for name, tesa in model.spec.items()},
        "provenance": dict(model.provenance),
    }
    save_tensors(path, _KIND, FORMAT_VERSION, tensors, payload)


def load(
    path: str | os.PathLike[str], *, device: str | torch.device | None = None, retune: bool = False
) -> CompiledModel:
    """Return a compiled model from its file.

    Parameters
    ----------
    path
        As given to :meth:`CompiledModel.save`.
    device
        Where to put it; None for the device it was compiled on, or the CPU where that is not here.
    retune
        Measure the kernels anew on this machine, on random activations of the stored sizes.

    Raises
    ------
    sparta.errors.FileFormatError
        If the file is damaged, edited, of another kind, or of a newer format than this version reads.

    Examples
    --------
    >>> import tempfile
    >>> from sparta.compiler import compile_model
    >>> folder = tempfile.mkdtemp()
    >>> compile_model(torch.nn.Linear(4, 2), torch.randn(3, 4), tune="off").save(f"{folder}/model.sparta")
    >>> load(f"{folder}/model.sparta")(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    tensors, payload = load_tensors(path, _KIND, FORMAT_VERSION)
    where = _device(device, payload)
    try:
        return _loaded(tensors, payload, where, retune=retune)
    except FileFormatError as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FileFormatError(
            message(f"{os.fspath(path)} does not fit together ({type(error).__name__}: {error})", fix="save it again")
        ) from error


def _loaded(
    tensors: Mapping[str, Tensor], payload: Mapping[str, Any], where: torch.device, *, retune: bool
) -> CompiledModel:
    graph = graph_from_json(payload["graph"])
    notes: list[str] = []
    plain = {name.removeprefix("tensor/"): t.to(where) for name, t in tensors.items() if name.startswith("tensor/")}
    kernels = {}
    for name, fields in payload["kernels"].items():
        kernels[name] = _kernel(name, fields, tensors, where, notes, retune=retune)
    _check_names(graph, plain, kernels)
    if where.type != payload["provenance"]["device"]:
        graph = _on_device(graph, where)
    machine = payload["provenance"]["machine"]
    here = device_name(where.type)
    if machine != here and not retune and kernels:
        notes.append(f"tuned on another machine ({machine}); load(..., retune=True) measures anew on this one ({here})")
    report = Report.from_dict(payload["report"])
    if machine != here or notes:
        whole = report.plan.whole
        reason = f"loaded; where it was compiled: {whole.reason.removeprefix('loaded; where it was compiled: ')}"
        report = Report(
            Plan(report.plan.layers, Whole(whole.base, whole.host, whole.milliseconds, reason, whole.chosen)),
            report.totals,
            report.certificate,
            (*report.notes, *notes),
        )
    spec = Spec({name: _tesa(f"spec/{name}", meta, tensors) for name, meta in payload["spec"].items()})
    module = assemble(graph, plain, kernels)
    return CompiledModel(module, Signature.from_dict(payload["signature"]), report, spec, payload["provenance"])


def _kernel_fields(name: str, module: KernelModule, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what a kernel module is, as JSON values, with its tensors put among the others."""
    integers = module.fused.op == OP and module.live.dtype == torch.float32
    tensors[f"live/{name}"] = _integers(module) if integers else module.live
    if module.bias is not None:
        tensors[f"bias/{name}"] = module.bias
    return {
        "op": module.fused.op,
        "integers": integers,
        "weight": _tesa_fields(f"mask/{name}", module.fused.weight, tensors),
        "attributes": dict(module.fused.attributes),
        "epilogue": vars(module.fused.epilogue).copy(),
        "choices": {
            str(size): {
                "choice": choice.to_dict(),
                "input": list(spec["input"].shape),
                "version": implement_named(choice.implement, spec.op).version,
            }
            for size, (spec, choice) in module.choices.items()
        },
    }


def _integers(module: KernelModule) -> Tensor:
    """Return the live weights of an int8 layer as integers."""
    return integers_of(module.weight(), row_scales(module.fused.weight))[module.fused.weight.mask(module.live.device)]


def _kernel(
    name: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    where: torch.device,
    notes: list[str],
    *,
    retune: bool,
) -> KernelModule:
    """Return a kernel module whose choices run here."""
    fused = Fused(
        str(fields["op"]),
        _tesa(f"mask/{name}", fields["weight"], tensors),
        dict(fields["attributes"]),
        Epilogue(**fields["epilogue"]),
    )
    live = tensors[f"live/{name}"].to(where)
    if live.dim() != 1 or live.numel() != fused.weight.count("live"):
        raise FileFormatError(message(f"{live.numel()} live weights of {name}", f"{fused.weight.count('live')}"))
    if fields.get("integers"):
        rows = fused.weight.mask(where).nonzero()[:, 0]
        live = live.float() * row_scales(fused.weight).float().to(where)[rows]
    bias = tensors[f"bias/{name}"].to(where) if fused.epilogue.bias else None
    lowering = lowering_of(fused.op)
    choices: dict[int, tuple[KernelSpec, Choice]] = {}
    for size, stored in fields["choices"].items():
        x = torch.empty(tuple(map(int, stored["input"])), dtype=live.dtype, device="meta")
        spec = lowering.spec(fused.weight, x, fused.attributes, fused.epilogue, device=where.type)
        choice = choice_from_dict(stored["choice"])
        if retune:
            dense = KernelModule(fused, live, bias, {int(size): (spec, Choice(DENSE, {}, "loading"))})
            choices[int(size)] = (spec, _retuned(dense, spec))
        else:
            choices[int(size)] = (spec, _fitting(name, spec, choice, int(stored["version"]), notes))
    if not choices:
        raise FileFormatError(message(f"no choice for {name}", "one or more"))
    return KernelModule(fused, live, bias, choices)


def _fitting(name: str, spec: KernelSpec, choice: Choice, version: int, notes: list[str]) -> Choice:
    """Return the stored choice where it runs here, else one of this machine's own, else dense."""
    try:
        if implement_named(choice.implement, spec.op).version != version:
            raise FileFormatError(message(f"another version of {choice.implement} is installed"))
        build(spec, choice.config)
    except SpartaError as error:
        other = choose(spec, ForgivingStore())
        why = str(error).splitlines()[0]
        note = f"{name}: {choice.implement} does not run here ({why}); {other.implement} runs instead"
        notes.append(note)
        warnings.warn(note, stacklevel=5)
        return other
    return choice


def _retuned(module: KernelModule, spec: KernelSpec) -> Choice:
    """Measure the candidates for a kernel on random activations."""
    lowering, weight = module.fused.lowering, module.weight()
    x = lowering.sample(spec).to(weight.dtype)
    y = lowering.dense(weight, x, None, module.fused.attributes)
    residual = torch.randn_like(y) if module.fused.epilogue.residual else None
    return tune_kernel(
        lowering.problem(spec, weight, x, module.bias, residual), max_trials=12, max_seconds=3.0, store=ForgivingStore()
    )


def _check_names(graph: Any, tensors: Mapping[str, Tensor], kernels: Mapping[str, KernelModule]) -> None:  # noqa: ANN401
    """Raise unless every tensor and kernel that the graph names is in the file."""
    for node in graph.nodes:
        known: Mapping[str, Any] = {"get_attr": tensors, "call_module": kernels}.get(node.op, {node.target: None})
        if node.target not in known:
            raise FileFormatError(message(f"the graph uses {node.target!r}, which the file lacks", fix="save it again"))


def _on_device(graph: Any, where: torch.device) -> Any:  # noqa: ANN401 - an fx.Graph
    """Return the graph with the devices that are written into its calls replaced."""
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", where)
    return graph


def _device(device: str | torch.device | None, payload: Mapping[str, Any]) -> torch.device:
    if device is not None:
        return torch.device(device)
    wanted = str(payload.get("provenance", {}).get("device", "cpu"))
    return torch.device(wanted if wanted != "cuda" or torch.cuda.is_available() else "cpu")


def _tesa_fields(prefix: str, tesa: TeSA, tensors: dict[str, Tensor]) -> dict[str, Any]:
    parts, meta = to_state(tesa)
    tensors.update({f"{prefix}/{part}": tensor for part, tensor in parts.items()})
    return {**meta, "parts": sorted(parts)}


def _tesa(prefix: str, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TeSA:
    return from_state({part: tensors[f"{prefix}/{part}"] for part in meta["parts"]}, meta)
