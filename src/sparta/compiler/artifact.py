"""Artifacts: a compiled model in one file, which loads on any machine and in any process, without the model's code.

One checked safetensors file holds the live weights and, as JSON, the graph, the plan, the spec, the provenance and
the certificate. Weights are stored without a kernel's layout and packed when the file is loaded, so where a kernel does
not fit the machine another one is chosen, or dense runs, and the report says so. A file is trusted in nothing: it can
describe a computation of bounded size over its own tensors (see :mod:`sparta.compiler.graph.serialize`), and nothing
else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from sparta.common.tuning import includes
from sparta.compiler.copying import model_copy
from sparta.compiler.graph.bounds import check_sizes
from sparta.compiler.graph.program import assemble
from sparta.compiler.graph.serialize import graph_from_json, graph_to_json
from sparta.compiler.graph.signature import Signature
from sparta.compiler.numbers import a_whole_number
from sparta.compiler.plan import Plan, choice_from_dict
from sparta.compiler.report import Report
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.run.kernel_module import Fused, KernelModule
from sparta.compiler.run.partial_model import PartialModel
from sparta.compiler.session import EFFORT, ForgivingStore, Tune, checked_tune
from sparta.compiler.stored import put_tensor, read_tensors
from sparta.errors import FileFormatError, SpartaError, ValueRangeError, message
from sparta.files import Budget, kind_of, load_tensors, reading, save_tensors
from sparta.memory import give_back
from sparta.modules import replace_module
from sparta.signing import PublicKey, SigningKey, signer, verifier
from sparta.specialize.conv.int8 import CONV_OPS
from sparta.specialize.implement import implement_named
from sparta.specialize.int8_linear.quantized import INT8_IMPLEMENTS, OP, integers_of, row_scales
from sparta.specialize.kernel_spec import Epilogue, KernelSpec, operation_named
from sparta.specialize.tuning.select import DENSE, Choice, build, choose, tune_kernel
from sparta.specialize.tuning.store import device_name
from sparta.spelling import also
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec
from sparta.tesa.state import from_state, to_state

__all__ = ["FORMAT_VERSION", "load", "save"]

Sign = SigningKey | str | os.PathLike[str] | None
"""A key that signs a file, or where it lies."""

FORMAT_VERSION = 3
_KIND, _LANGUAGE_MODEL = "model", "language model"


def save(model: CompiledModel, path: str | os.PathLike[str], sign: Sign = None) -> None:
    """Write a compiled model to one file; see :meth:`CompiledModel.save`."""
    written = signer(path, sign)
    tensors: dict[str, Tensor] = {}
    payload = _payload(model, tensors)
    save_tensors(path, _KIND, FORMAT_VERSION, tensors, payload, written=written)


def save_parts(model: PartialModel, path: str | os.PathLike[str], sign: Sign = None) -> None:
    """Write a partly compiled model to one file; see :meth:`PartialModel.save`."""
    written = signer(path, sign)
    tensors: dict[str, Tensor] = {}
    parts = {}
    for number, (name, part) in enumerate(model.parts.items()):
        own: dict[str, Tensor] = {}
        parts[name] = {**_payload(part, own), "number": number}  # the file does not keep the order of names
        tensors.update({f"{number}/{key}": tensor for key, tensor in own.items()})
    for name, tensor in _rest(model.model, model.names).items():
        tensors[f"rest/{name}"] = tensor
    spec = {name: _tesa_fields(f"spec/{name}", tesa, tensors) for name, tesa in model.spec.items()}
    payload = {"parts": parts, "report": model.report.to_dict(), "provenance": dict(model.provenance), "spec": spec}
    save_tensors(path, _KIND, FORMAT_VERSION, tensors, payload, written=written)


def _rest(model: nn.Module, parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of a model that are in none of its parts."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in named if not any(name.startswith(f"{part}.") for part in parts)}


def _payload(model: CompiledModel, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what describes a compiled model, as JSON values, with its tensors put among the others."""
    kernels = {name: _kernel_fields(name, module, tensors) for name, module in model.kernels.items()}
    held = {id(t) for module in model.kernels.values() for t in module.buffers()}
    general = None if model.general is model.graph else model.general
    for graph in (general, model.graph):
        for name, value in graph.named_buffers() if graph is not None else ():
            if id(value) not in held:
                put_tensor(tensors, name, value, model.spec.get(name))
    stored: dict[int, str] = {}
    for name, value in tensors.items():  # a file holds no two tensors in one memory, as a mask and a view of it are
        if value.numel() and stored.setdefault(value.untyped_storage().data_ptr(), name) != name:
            tensors[name] = value.clone()
    return {
        "graph": graph_to_json(model.graph.graph),
        "general": None if general is None else graph_to_json(general.graph),
        "any_size": model.general is not None,
        "signature": model.signature.to_dict(),
        "kernels": kernels,
        "report": model.report.to_dict(),
        "spec": {name: _tesa_fields(f"spec/{name}", tesa, tensors) for name, tesa in model.spec.items()},
        "provenance": dict(model.provenance),
    }


@also(retune="tune")
def load(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    tune: Tune | bool = "off",
    max_bytes: int | None = None,
    model: nn.Module | None = None,
    key: PublicKey | str | os.PathLike[str] | None = None,
) -> CompiledModel | PartialModel:
    """Return a compiled model from its file.

    Parameters
    ----------
    path
        As given to :meth:`CompiledModel.save`.
    device
        Where to put it; None for the device it was compiled on, or the CPU where that is not here.
    tune
        ``"off"`` runs the kernels that the file names; ``"quick"`` and ``"full"`` measure again on this machine, on
        random activations of the stored sizes. ``retune=True`` is ``tune="quick"``.
    max_bytes
        How much memory the weights together, and each tensor of a call, may take. By default a file may describe what
        is 64 times as large as itself or its inputs, so that a small file of a stranger cannot take all memory.
    model
        For a model that was compiled in part: the model as it was given, or one of the same class and sizes, since a
        file holds no code. It is copied, and all its tensors come from the file.
    key
        Load only what the owner of this key has signed: a public key, its text, or its file
        (:class:`sparta.signing.PublicKey`). Every byte is checked against ``PATH.minisig`` before any is looked at.

    Raises
    ------
    sparta.errors.FileFormatError
        If the file is damaged, edited, of another kind, of a newer format than this version reads, or describes
        anything but a computation.
    sparta.errors.SignatureError
        With `key`, if the file is not signed, not by it, or not as it is now.

    Examples
    --------
    >>> import tempfile
    >>> from sparta.compiler import compile_model
    >>> folder = tempfile.mkdtemp()
    >>> compile_model(torch.nn.Linear(4, 2), torch.randn(3, 4), tune="off").save(f"{folder}/model.sparta")
    >>> load(f"{folder}/model.sparta")(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    trusted = verifier(path, key)
    if kind_of(path) == _LANGUAGE_MODEL:
        generation = import_module("sparta.generation")  # it stands above this room, and is found when it is needed
        found = generation.load_generator(path, device=device, max_bytes=max_bytes, key=key)
    else:
        tensors, payload = load_tensors(path, _KIND, FORMAT_VERSION, trusted=trusted)
        if "parts" in payload:
            found = _with_parts(path, model, tensors, payload, device, checked_tune(tune), max_bytes)
        else:
            with reading(path):
                budget = Budget.of_file(path, max_bytes)
                found = _Reader(tensors, payload, budget, device).model(tune=checked_tune(tune), most=max_bytes)
        del tensors, payload
    give_back()
    return cast("CompiledModel", found)


def _with_parts(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    tensors: Mapping[str, Tensor],
    payload: Mapping[str, Any],
    device: str | torch.device | None,
    tune: Tune,
    most: int | None,
) -> PartialModel:
    """Return a copy of a model with the compiled modules and the tensors of a file."""
    with reading(path):
        provenance, parts = dict(payload["provenance"]), dict(payload["parts"])
        kind = str(provenance["model"])[:100]
    if not isinstance(model, nn.Module):
        given = f"{os.fspath(path)} holds modules of a {kind} that was compiled in part"
        raise ValueRangeError(message(given, "such a model beside it", "pass load(path, model=...)"))
    copy = model_copy(model)
    known = dict(copy.named_modules())
    missing = [name for name in parts if name not in known]
    if missing:
        raise ValueRangeError(message(f"a model without {missing[0]!r}", "the model that was compiled"))
    with reading(path):
        budget = Budget.of_file(path, most)
        for number, name, fields in _numbered(parts, list(known)):
            own = {key.removeprefix(f"{number}/"): t for key, t in tensors.items() if key.startswith(f"{number}/")}
            replace_module(copy, name, _Reader(own, fields, budget, device).model(tune=tune, most=most))
        reader = _Reader(tensors, payload, budget, device)
        spec = Spec({str(name): reader.tesa(f"spec/{name}", meta) for name, meta in payload["spec"].items()})
        found = PartialModel(copy, tuple(parts), Report.from_dict(payload["report"]), spec, provenance)
    stored = {key.removeprefix("rest/"): t for key, t in tensors.items() if key.startswith("rest/")}
    rest = _rest(copy, tuple(parts))
    if {n: t.shape for n, t in rest.items()} != {n: t.shape for n, t in stored.items()}:
        raise ValueRangeError(message("a model with other tensors", "the model that was compiled, with these sizes"))
    with torch.no_grad():
        for name, tensor in rest.items():
            tensor.copy_(stored[name])
    return found if device is None else found.to(device)


def _numbered(parts: Mapping[str, Any], order: Sequence[str]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield the modules of a file with the numbers of their tensors; older files number them as the model has them."""
    places = {name: place for place, name in enumerate(order)}
    for number, name in enumerate(sorted(parts, key=places.__getitem__)):
        fields = parts[name]
        yield a_whole_number(fields.get("number", number), "the number of a module"), name, fields


class _Reader:
    """Makes a compiled model of what a file holds."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        payload: Mapping[str, Any],
        budget: Budget,
        device: str | torch.device | None,
    ) -> None:
        self.tensors, self.payload, self.budget = tensors, payload, budget
        self.where = _device(device, payload)
        self.notes: list[str] = []

    def model(self, *, tune: Tune, most: int | None) -> CompiledModel:
        """Return the compiled model."""
        payload, where = self.payload, self.where
        graphs = [graph_from_json(payload["graph"])]
        if payload.get("general") is not None:
            graphs.append(graph_from_json(payload["general"]))
        signature = Signature.from_dict(payload["signature"])
        plain = read_tensors(self.tensors, where)
        kernels = {str(n): self.kernel(str(n), fields, tune=tune) for n, fields in payload["kernels"].items()}
        for graph in graphs:
            _check_fit(graph, plain, kernels, signature)
            check_sizes(graph, plain, kernels, signature.inputs, self.budget, max_bytes=most)
            if where.type != payload["provenance"]["device"]:
                _on_device(graph, where)
        report = self.report(tuned=tune != "off" or not kernels)
        spec = Spec({str(name): self.tesa(f"spec/{name}", meta) for name, meta in payload["spec"].items()})
        module, *others = (assemble(graph, plain, kernels) for graph in graphs)
        source = self.budget.source
        general = others[0] if others else module if payload.get("any_size") is True else None
        return CompiledModel(module, signature, report, spec, payload["provenance"], source=source, general=general)

    def report(self, *, tuned: bool) -> Report:
        """Return the stored report, with what is different here."""
        machine, here = str(self.payload["provenance"]["machine"]), device_name(self.where.type)
        if machine != here and not tuned:
            self.notes.append(
                f'tuned on another machine ({machine}); load(..., tune="quick") measures it on this one ({here})'
            )
        report = Report.from_dict(self.payload["report"])
        if machine == here and not self.notes:
            return report
        return Report(
            Plan(report.plan.layers, replace(report.plan.whole, loaded=True)),
            report.totals,
            report.certificate,
            (*report.notes, *self.notes),
            report.machine,
            report.precision,
        )

    def kernel(self, name: str, fields: Mapping[str, Any], *, tune: Tune) -> KernelModule:
        """Return a kernel module whose choices run here."""
        tesa, where = self.tesa(f"mask/{name}", fields["weight"]), self.where
        fused = Fused(operation_named(fields["op"]), tesa, dict(fields["attributes"]), Epilogue(**fields["epilogue"]))
        live = self.tensors[f"live/{name}"].to(where)
        if live.dim() != 1 or live.numel() != fused.weight.count("live"):
            raise FileFormatError(message(f"{live.numel()} live weights of {name}", f"{fused.weight.count('live')}"))
        self.budget.take(fused.weight.shape, 4, f"the weight of {name}")
        if fields.get("integers") or live.dtype == torch.float8_e4m3fn:
            rows = fused.weight.mask(where).nonzero()[:, 0]
            live = live.float() * row_scales(fused.weight).float().to(where)[rows]
            live = live.to(
                {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(fields.get("real")), live.dtype)
            )
        if not live.is_floating_point():
            raise FileFormatError(message(f"live weights of {name} in {live.dtype}", "floating-point numbers"))
        bias = self.tensors[f"bias/{name}"].to(where, live.dtype) if fused.epilogue.bias else None
        if bias is not None and bias.shape != fused.weight.shape[:1]:
            raise FileFormatError(
                message(f"a bias of {tuple(bias.shape)} for {name}", f"{fused.weight.shape[0]} values")
            )
        choices: dict[int, tuple[KernelSpec, Choice]] = {}
        for size, stored in fields["choices"].items():
            spec = self.kernel_spec(fused, live, stored)
            if tune != "off":
                dense = KernelModule(fused, live, bias, {int(size): (spec, Choice(DENSE, {}, "loading"))})
                choices[int(size)] = (spec, _retuned(dense, spec, tune))
            else:
                choices[int(size)] = (spec, self.choice(name, spec, stored))
        if not choices:
            raise FileFormatError(message(f"no choice for {name}", "one or more"))
        return KernelModule(fused, live, bias, choices)

    def kernel_spec(self, fused: Fused, live: Tensor, stored: Mapping[str, Any]) -> KernelSpec:
        """Return the kernel spec of a fused sub-graph at a stored size of its input."""
        sizes = tuple(map(int, stored["input"]))
        Budget(1 << 50, self.budget.source).check(sizes, live.element_size(), "an input")
        x = torch.empty(sizes, dtype=live.dtype, device="meta")
        return fused.lowering.spec(fused.weight, x, fused.attributes, fused.epilogue, device=self.where.type)

    def choice(self, name: str, spec: KernelSpec, stored: Mapping[str, Any]) -> Choice:
        """Return the stored choice where it runs here, else one of this machine's own, else the kernel as it is now.

        Dense is the last resort: what won when the file was written was faster.
        """
        choice = choice_from_dict(stored["choice"])
        try:
            implement = implement_named(choice.implement, spec.op)
            if implement.version != int(stored["version"]):
                raise FileFormatError(message(f"another version of {choice.implement} is installed"))
            answer = implement.answer(spec)
            if not answer:
                raise FileFormatError(message(answer.reason))
            if not includes(dict(implement.space(spec)), dict(choice.params)):
                raise FileFormatError(message(f"the parameters {dict(choice.params)}", "those of the search space"))
            build(spec, choice.config)
        except SpartaError as error:
            other = self.other_choice(choice, spec)
            why, same = str(error).splitlines()[0], other.implement == choice.implement
            runs = "it runs with other parameters" if same else f"{other.implement} runs instead"
            note = f"{name}: {choice.implement} does not run here ({why}); {runs}"
            self.notes.append(note)
            warnings.warn(note, stacklevel=6)
            return other
        return choice

    def other_choice(self, choice: Choice, spec: KernelSpec) -> Choice:
        """Return what runs where a stored choice does not; what rounds its inputs gives way to nothing else."""
        own = _with_own_parameters(choice, spec)
        if own is not None and choice.implement in INT8_IMPLEMENTS:
            return own
        known = choose(spec, ForgivingStore())
        return known if own is None or known.implement != DENSE or known.entry is not None else own

    def tesa(self, prefix: str, meta: Mapping[str, Any]) -> TeSA:
        """Return a stored TeSA."""
        self.budget.take(meta["shape"], 1, f"the mask {prefix}")
        return from_state({part: self.tensors[f"{prefix}/{part}"] for part in meta["parts"]}, meta)


def _with_own_parameters(choice: Choice, spec: KernelSpec) -> Choice | None:
    """Return the same kernel with its best guess for the parameters, None where it is not to be had here."""
    try:
        implement = implement_named(choice.implement, spec.op)
        if not implement.answer(spec):
            return None
        params = implement.default(spec)
        build(spec, {"_name": choice.implement, **params})
    except SpartaError:
        return None
    return Choice(choice.implement, params, "its best guess here: with those of the file it does not run")


def _kernel_fields(name: str, module: KernelModule, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what a kernel module is, as JSON values, with its tensors put among the others."""
    integers = module.fused.op in (OP, *CONV_OPS.values()) and module.live.dtype == torch.float32
    tensors[f"live/{name}"] = _integers(module) if integers else _codes(module)
    if module.bias is not None:
        tensors[f"bias/{name}"] = module.bias
    return {
        "op": module.fused.op,
        "integers": integers,
        "real": str(module.live.dtype).removeprefix("torch."),
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
    weight, known = module.weight(), module.fused.weight
    integers = integers_of(weight.flatten(1), row_scales(known)).reshape(weight.shape)
    return integers[known.mask(module.live.device)]


def _codes(module: KernelModule) -> Tensor:
    """Return the live weights as they are stored: in fp8 where that gives back every bit."""
    live, known = module.live, module.fused.weight
    if (
        str(known.format) != "fp8_e4m3"
        or not live.is_floating_point()
        or bool((known.scale.dense() == torch.inf).any())
    ):
        return live
    scales = known.scale.dense().to(live.device, torch.float32)[known.mask(live.device)]
    codes = (live.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    same = torch.equal((codes.float() * scales).to(live.dtype), live)
    rows = known.scale.dense().flatten(1)
    return codes if same and bool((rows == rows[:, :1]).all()) else live


def _retuned(module: KernelModule, spec: KernelSpec, tune: Tune) -> Choice:
    """Measure the candidates for a kernel on random activations."""
    lowering, weight = module.fused.lowering, module.weight()
    x = lowering.sample(spec).to(weight.dtype)
    y = lowering.dense(weight, x, None, module.fused.attributes)
    residual = torch.randn_like(y) if module.fused.epilogue.residual else None
    trials, seconds = EFFORT[tune]
    problem = lowering.problem(spec, weight, x, module.bias, residual)
    return tune_kernel(problem, max_trials=trials, max_seconds=seconds, store=ForgivingStore())


def _check_fit(
    graph: fx.Graph, tensors: Mapping[str, Tensor], kernels: Mapping[str, KernelModule], signature: Signature
) -> None:
    """Raise unless a graph, its signature and the file's tensors and kernels fit each other."""
    members: dict[str, Mapping[str, Any]] = {"get_attr": tensors, "call_module": kernels}
    for node in graph.nodes:
        if node.op in members and node.target not in members[node.op]:
            raise FileFormatError(message(f"the graph uses {node.target!r}, which the file lacks", fix="save it again"))
    places = sum(node.op == "placeholder" for node in graph.nodes)
    (results,) = next(iter(reversed(graph.nodes))).args
    found = len(results) if isinstance(results, (list, tuple)) else 1
    if places != len(signature.inputs) or found != signature.out_spec.num_leaves:
        given = f"a graph of {places} inputs and {found} results"
        wanted = f"{len(signature.inputs)} and {signature.out_spec.num_leaves}, as the signature says"
        raise FileFormatError(message(given, wanted, "save it again"))


def _on_device(graph: fx.Graph, where: torch.device) -> None:
    """Replace the devices that are written into the calls of a graph."""
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", where)


def _device(device: str | torch.device | None, payload: Mapping[str, Any]) -> torch.device:
    if device is not None:
        return torch.device(device)
    wanted = str(payload.get("provenance", {}).get("device", "cpu"))
    return torch.device(wanted if wanted != "cuda" or torch.cuda.is_available() else "cpu")


def _tesa_fields(prefix: str, tesa: TeSA, tensors: dict[str, Tensor]) -> dict[str, Any]:
    parts, meta = to_state(tesa)
    tensors.update({f"{prefix}/{part}": tensor for part, tensor in parts.items()})
    return {**meta, "parts": sorted(parts)}
