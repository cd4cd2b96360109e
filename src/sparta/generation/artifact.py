"""Files of compiled language models: packed weights and a configuration, loaded as the same class with `generate`.

The file holds every tensor once, the configuration as JSON and the class by its name in transformers' own registry. The
model is built without memory and then given the file's tensors, so nothing is initialised that is not used, and no code
comes from the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparta.compiler.plan import choice_from_dict
from sparta.compiler.report import Report
from sparta.compiler.session import ForgivingStore
from sparta.errors import FileFormatError, ValueRangeError, message
from sparta.files import Budget, load_tensors, reading, save_tensors
from sparta.generation.decoder import find_decoder
from sparta.generation.experts import PackedExperts, experts_of
from sparta.generation.fp8_files import fp8_fields, fp8_weight, is_fp8
from sparta.generation.graphs import DecodeGraph
from sparta.generation.layers import SparseLayer, is_linear, is_transposed, kernel_of, layer_spec, weight_of
from sparta.generation.matrices import PackedMatrix, packed, restored
from sparta.generation.model import Compiled, GenerativeModel, compiled_class
from sparta.generation.packed_linear import PackedLinear
from sparta.generation.packing import balanced
from sparta.generation.program import DecodeProgram
from sparta.generation.prompts import PromptGraphs
from sparta.generation.recording import prompts_agree
from sparta.generation.registry import architecture, config_fields, config_from, generation_from, transformers_module
from sparta.generation.siblings import product_fields, put_stored_products
from sparta.generation.trials import follows_itself
from sparta.modules import member, replace_module, set_member
from sparta.signing import PublicKey, signer, verifier
from sparta.specialize.kernel_spec import KernelSpec
from sparta.specialize.tuning.select import Choice, choose
from sparta.specialize.tuning.shipped import misfit
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

__all__ = ["KIND", "load_generator", "save"]

KIND = "language model"
_VERSION = 1
_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def save(model: GenerativeModel, path: str | os.PathLike[str], sign: object = None) -> None:
    """Write a compiled language model to one file; see :meth:`GenerativeModel.save`."""
    written = signer(path, sign)
    original: Any = type(model).__mro__[2]
    config: Any = model.config
    kind = str(getattr(config, "model_type", ""))
    try:
        architecture(kind, original.__name__)
    except FileFormatError as error:
        given = f"a {original.__name__}, which is none of transformers' own classes"
        fix = "save it with save_pretrained and compile it where it is used"
        raise ValueRangeError(message(given, "a class of its auto classes", fix)) from error
    tensors: dict[str, Tensor] = {}
    matrices, layers, rounded = {}, {}, {}
    pruned = {name.removesuffix(".weight"): tesa for name, tesa in model.spec.items()}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            matrices[name] = _matrix_fields(name, module.matrix, tensors)
        elif isinstance(module, SparseLayer) and is_fp8(module):
            rounded[name] = {**fp8_fields(name, module, tensors), **_kernel_fields(module)}
        elif name in pruned:
            mask = pruned[name].mask()
            layers[name] = _layer_fields(name, module, mask.t() if is_transposed(module) else mask, tensors)
    ties = _put_state(model, {*layers, *rounded}, tensors)
    payload = {
        "architecture": original.__name__,
        "model_type": kind,
        "config": json.loads(json.dumps(config_fields(config), default=str)),
        "generation": _generation_fields(getattr(model, "generation_config", None)),
        "matrices": matrices,
        "layers": layers,
        "fp8": rounded,
        "products": product_fields(model),
        "ties": ties,
        "experts": {name: m.int8 for name, m in model.named_modules() if isinstance(m, PackedExperts)},
        "program": model.program is not None,
        "longest": model._sparta.longest,
        "replayed": _replayed_fields(model._sparta),
        "report": model.report.to_dict(),
        "provenance": dict(model.provenance),
        "pruned": sorted(model.spec),
    }
    save_tensors(path, KIND, _VERSION, tensors, payload, written=written)


def _replayed_fields(compiled: Compiled) -> dict[str, bool] | None:
    """Return what is replayed from CUDA graphs."""
    if compiled.graph is None:
        return None
    return {"follows": compiled.graph.follows, "prompts": compiled.prompts is not None}


def _prompts(model: nn.Module) -> PromptGraphs | None:
    """Return what replays prompts, if they then are what the model's own code computes; that is tried here."""
    try:
        agree = prompts_agree(model)
    except Exception:  # noqa: BLE001 - whatever goes wrong: prompts run as they are
        return None
    return PromptGraphs(model.config) if agree else None


def _matrix_fields(name: str, matrix: PackedMatrix, tensors: dict[str, Tensor]) -> dict[str, Any]:
    tensors.update({f"matrix/{name}/{part}": tensor for part, tensor in matrix.tensors().items()})
    return {"shape": list(matrix.shape), "form": matrix.form, "parts": sorted(matrix.tensors())}


def _layer_fields(name: str, layer: nn.Module, mask: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what a pruned layer is, with its weight stored as the fewest bytes, and its kernels if it has any."""
    fields = _matrix_fields(name, packed(weight_of(layer).cpu().float(), mask.cpu().contiguous()), tensors)
    return {**fields, **_kernel_fields(layer)}


def _kernel_fields(layer: nn.Module) -> dict[str, Any]:
    """Return what a layer computes in, and the kernels that were chosen for it."""
    kernels = layer.kernel.choices if isinstance(layer, SparseLayer) else {}
    dtype = str(weight_of(layer).dtype).removeprefix("torch.")
    choices = {str(size): choice.to_dict() for size, (_, choice) in kernels.items()}
    return {"dtype": dtype, "choices": choices}


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _put_state(model: nn.Module, layers: set[str], tensors: dict[str, Tensor]) -> dict[str, str]:
    """Put all tensors that are not packed among the others; return the further names of those that have several."""
    first: dict[int, str] = {}
    ties = {}
    skipped = {f"{name}.weight" for name in layers}
    for name, tensor in _state(model):
        if name in skipped:
            continue
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        tensors[f"state/{name}"] = tensor
    return ties


def _generation_fields(config: Any) -> dict[str, Any] | None:
    """Return the plain settings of a generation config."""
    if config is None:
        return None
    fields = json.loads(config.to_json_string())
    return {
        key: value
        for key, value in fields.items()
        if isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(each, _PLAIN) for each in value))
    }


# ---------------------------------------------------------------------- reading


def load_generator(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    max_bytes: int | None = None,
    key: PublicKey | str | os.PathLike[str] | None = None,
) -> GenerativeModel:
    """Return a compiled language model from its file; :func:`sparta.load` does this for such files.

    Parameters
    ----------
    device
        Where to put it; None for the device it was compiled on, or the CPU where that is not here.
    max_bytes
        How much memory its weights may take; by default 64 times the size of the file.
    key
        Load only what the owner of this public key has signed.

    Raises
    ------
    sparta.errors.MissingPackageError
        If transformers is not installed.
    sparta.errors.FileFormatError
        If the file is damaged, edited, of another kind or of a newer format than this version reads.
    """
    transformers_module()
    tensors, payload = load_tensors(path, KIND, _VERSION, trusted=verifier(path, key))
    with reading(path), torch.no_grad():
        return _Reader(tensors, payload, Budget.of_file(path, max_bytes), device).model()


class _Reader:
    """Makes a language model of what a file holds."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        payload: Mapping[str, Any],
        budget: Budget,
        device: str | torch.device | None,
    ) -> None:
        self.tensors, self.payload, self.budget = tensors, payload, budget
        self.matrices: dict[str, PackedMatrix] = {}
        self.in_fp8: dict[str, TeSA] = {}
        self.turned: set[str] = set()
        stored = "cuda" if payload["provenance"]["device"] == "cuda" and torch.cuda.is_available() else "cpu"
        self.where = torch.device(stored if device is None else device)
        if self.where.type != "cpu" and payload["matrices"]:
            given, fix = "a file of weights packed for the CPU", "compile the model for that device"
            raise ValueRangeError(message(f"{given} on {self.where}", "the CPU", fix))

    def model(self) -> GenerativeModel:
        """Return the model."""
        config_class, original = architecture(self.payload["model_type"], self.payload["architecture"])
        config = config_from(config_class, self.payload["config"], len(self.tensors))
        with torch.device("meta"):
            model = cast("nn.Module", cast("Any", original)(config)).eval()
        self.turned = {name for name, module in model.named_modules() if is_transposed(module)}
        matrices = {str(name): self.matrix(model, str(name), f) for name, f in self.payload["matrices"].items()}
        self.matrices.update(matrices)
        self.fill(model, set(matrices))
        compiled = Compiled(longest=self.longest())
        replayed = self.payload.get("replayed")
        if replayed is not None and _has_graphs(self.where):
            compiled.graph = DecodeGraph(follows=False)  # until it was tried here
        self.put_layers(model)
        self.put_fp8(model)
        put_stored_products(model, self.payload.get("products", []))
        if self.payload["program"]:
            compiled.program = _program(model, matrices)
            compiled.output = _output_class()
        for name, matrix in matrices.items():
            replace_module(model, name, PackedLinear(matrix))
        self.put_experts(model)
        left = [name for name, tensor in _state(model) if tensor.is_meta]
        if left:
            raise FileFormatError(message(f"no tensor for {left[0]}", "all tensors of the model", "save it again"))
        self.tell(compiled, model)
        model.__class__ = compiled_class(original)  # type: ignore[arg-type]
        object.__setattr__(model, "_sparta", compiled)
        if compiled.graph is not None and self.payload["replayed"]["follows"] is True:
            compiled.graph.follows = follows_itself(model)
        if compiled.graph is not None and self.payload["replayed"].get("prompts") is True:
            compiled.prompts = _prompts(model)
        return cast("GenerativeModel", model)

    def longest(self) -> int | None:
        """Return from how many tokens on the model's own code runs."""
        longest = self.payload["longest"]
        return None if longest is None else int(longest)

    def tell(self, compiled: Compiled, model: nn.Module) -> None:
        """Set what is known of the model, and how it generates."""
        compiled.report = Report.from_dict(self.payload["report"])
        compiled.provenance = dict(self.payload["provenance"])
        found = {}
        for name in self.payload["pruned"]:
            path = str(name).removesuffix(".weight")
            mask = self.in_fp8[path].mask() if path in self.in_fp8 else self.matrices[path].mask()
            found[str(name)] = TeSA.from_mask(mask.t().contiguous() if path in self.turned else mask)
        compiled.spec = Spec(found)
        fields = self.payload["generation"]
        if fields is not None:
            cast("Any", model).generation_config = generation_from(fields)

    def matrix(self, model: nn.Module, name: str, fields: Mapping[str, Any]) -> PackedMatrix:
        """Return a packed matrix that fits the layer of its name."""
        layer = model.get_submodule(name)
        weight = getattr(layer, "weight", None)
        shape = tuple(int(size) for size in fields["shape"])
        wanted = None if weight is None else tuple(weight.shape[::-1] if is_transposed(layer) else weight.shape)
        if wanted != shape or len(shape) != 2:
            raise FileFormatError(message(f"a weight of {shape} for {name}", f"{wanted}", "save it again"))
        self.budget.take(shape, 4, f"the weight of {name}")
        parts = {str(part): self.tensors[f"matrix/{name}/{part}"] for part in fields["parts"]}
        return restored((shape[0], shape[1]), str(fields["form"]), parts)

    def fill(self, model: nn.Module, packed_names: set[str]) -> None:
        """Give the model the tensors of the file; each must have the shape that the model says."""
        for name, meta in list(_state(model)):
            tensor = self.tensors.get(f"state/{name}")
            if tensor is None or name.rpartition(".")[0] in packed_names:
                continue
            if tensor.shape != meta.shape or tensor.is_floating_point() != meta.is_floating_point():
                raise FileFormatError(message(f"{name} of shape {tuple(tensor.shape)}", f"{tuple(meta.shape)}"))
            _set(model, name, tensor.to(self.where), like=meta)
        for name, other in self.payload["ties"].items():
            if str(name).rpartition(".")[0] not in packed_names:
                _set(model, str(name), member(model, str(other)), like=member(model, str(name)))

    def put_layers(self, model: nn.Module) -> None:
        """Put sparse layers in place, with kernels that run here."""
        for key, fields in self.payload["layers"].items():
            name = str(key)
            matrix = self.matrices[name] = self.matrix(model, name, fields)
            layer = model.get_submodule(name)
            like: Any = layer.weight
            weight = matrix.weight().to(self.where, _dtype(fields))
            _set(model, f"{name}.weight", weight.t().contiguous() if is_transposed(layer) else weight, like=like)
            tesa = TeSA.from_mask(matrix.mask())
            choices = {int(size): self.choice(layer, tesa, int(size), c) for size, c in fields["choices"].items()}
            if choices:
                replace_module(model, name, SparseLayer(layer, kernel_of(layer, tesa, choices)))

    def put_fp8(self, model: nn.Module) -> None:
        """Put layers in fp8 in place, with kernels that run here; older files have none."""
        for key, fields in self.payload.get("fp8", {}).items():
            name, layer = str(key), model.get_submodule(str(key))
            if not is_linear(layer):
                raise FileFormatError(message(f"a weight in fp8 for {name[:100]}", "a linear layer", "save it again"))
            if not fields["choices"]:
                raise FileFormatError(message(f"no kernel for {name[:100]}", "one or more", "save it again"))
            like: Any = layer.weight
            shape = (like.shape[1], like.shape[0]) if is_transposed(layer) else (like.shape[0], like.shape[1])
            weight, tesa = fp8_weight(name, fields, self.tensors, shape, self.budget)
            self.in_fp8[name] = tesa  # which is small where nothing is pruned
            weight = weight.to(self.where, _dtype(fields))
            _set(model, f"{name}.weight", weight.t().contiguous() if is_transposed(layer) else weight, like=like)
            choices = {int(size): self.choice(layer, tesa, int(size), c) for size, c in fields["choices"].items()}
            replace_module(model, name, SparseLayer(layer, kernel_of(layer, tesa, choices)))

    def put_experts(self, model: nn.Module) -> None:
        """Put packed experts in place; their matrices follow from the tensors."""
        able = experts_of(model)
        for name, int8 in self.payload["experts"].items():
            if name not in able:
                raise FileFormatError(message(f"packed experts at {str(name)[:100]!r}", "where the model has experts"))
            replace_module(model, name, PackedExperts(able[name], int8=bool(int8)))

    def choice(self, layer: nn.Module, tesa: TeSA, rows: int, stored: Mapping[str, Any]) -> tuple[KernelSpec, Choice]:
        """Return the stored choice where it runs here, else this machine's own."""
        spec, choice = layer_spec(layer, tesa, rows), choice_from_dict(stored)
        return spec, choose(spec, ForgivingStore()) if misfit(spec, cast("Any", choice)) else choice


def _has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _dtype(fields: Mapping[str, Any]) -> torch.dtype:
    """Return what a sparse layer's weight is in; older files hold float32 only."""
    name = fields.get("dtype", "float32")
    if name not in _DTYPES:
        raise FileFormatError(message(f"a weight in {str(name)[:100]!r}", ", ".join(_DTYPES), "save it again"))
    return _DTYPES[name]


def _set(model: nn.Module, name: str, tensor: Tensor, *, like: Tensor) -> None:
    """Put a tensor where the model has one of the same kind."""
    if isinstance(like, nn.Parameter):
        held = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        set_member(model, name, held)
    else:
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._buffers[last] = tensor


def _program(model: nn.Module, matrices: dict[str, PackedMatrix]) -> DecodeProgram:
    """Return the decode program of a model whose tensors are there."""
    decoder = find_decoder(model)
    if isinstance(decoder, str):
        raise FileFormatError(message(f"a decode program for a model that is no decoder: {decoder}"))
    for block in decoder.blocks:
        halves = [block.linears["gate_proj"], block.linears["up_proj"]]
        if len({matrices[name].form for name in halves}) != 1:
            raise FileFormatError(message("a gated MLP of two forms", "one form for both halves", "save it again"))
        matrices.update(zip(halves, balanced([matrices[name] for name in halves]), strict=True))
    return DecodeProgram(decoder, matrices)


def _output_class() -> type:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast
