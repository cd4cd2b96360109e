"""Trace: a graph at one size becomes a program of steps for C++ and calls for Python, in the order of the graph.

Views and everything that depends on sizes alone fall away here; what depends on fixed tensors alone is computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from sparta.compiler.run.chain.images import image_layer
from sparta.compiler.run.chain.native import NativeCall, constant_of, native_call, result_of
from sparta.compiler.run.chain.values import (
    Constant,
    Made,
    NotChained,
    Slot,
    Storages,
    Value,
    mapped,
    meta_like,
    rows_of,
)
from sparta.compiler.run.kernel_module import KernelModule
from sparta.modules import member
from sparta.specialize.cpu.chain import ImageProduct, Product, StepKind
from sparta.specialize.cpu.library import load
from sparta.specialize.linear.cpu_bf16_panel import bf16_dense_product, bf16_dense_tile, bf16_dense_values
from sparta.specialize.linear.cpu_dense import dense_product, dense_tile, dense_values, few_tokens_product

__all__ = ["ImageItem", "Item", "Linear", "Native", "PythonCall", "Trace"]

_SHORT = (torch.bfloat16, torch.float16)
_FEWEST_TOKENS = 3  # of a panel; with fewer, vectors of tokens stay empty
_MANY_QUERIES = 32  # from here on blocks of bf16 pay in models that are not in it
_LARGEST_CONSTANT = 1 << 24  # bytes that are kept for one size


@dataclass(eq=False)
class Native:
    """A step that is ready."""

    call: NativeCall
    result: Value


@dataclass(eq=False)
class Linear:
    """A product of rows; how its input and its result are laid out is decided later.

    Attributes
    ----------
    tokens, stride
        Of x, in elements.
    packed
        Where x stands as a panel, None where the product packs it itself.
    to_panel
        Whether the result stays a panel.
    """

    product: Product
    x: Value
    residual: Value | None
    result: Value
    tokens: int
    stride: int
    packed: Made | None = None
    packs: bool = False
    to_panel: bool = False


@dataclass(eq=False)
class ImageItem:
    """A convolution of contiguous images.

    Attributes
    ----------
    room
        Memory that it needs while it runs.
    from_bytes, residual_bytes
        Where the image and the residual stand in bytes, None for real numbers.
    to_bytes, in_bytes
        How the result is handed on in bytes, and where it stands so: in the memory of the result, or beside it. None
        where it is handed on in real numbers alone.
    """

    product: ImageProduct
    x: Value
    residual: Value | None
    result: Value
    room: Made | None
    from_bytes: Made | None = None
    residual_bytes: Made | None = None
    to_bytes: tuple[Any, ...] | None = None
    in_bytes: Made | None = None


@dataclass(eq=False)
class PythonCall:
    """A call that Python makes; its result is put into a slot."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int
    meta: Any


Item = Native | Linear | ImageItem | PythonCall


@dataclass
class Trace:
    """The program of a graph module for inputs like these.

    Parameters
    ----------
    module
        The graph.
    leaves
        Flat inputs; only sizes, strides, dtypes and what is no tensor count.
    threads
        How many will run it.
    packed
        Dense layers that were packed for other sizes, and tensors that were widened; new ones are added.
    widen
        Whether models in bf16 and fp16 are computed in fp32 between their inputs and results, as the kernels do anyway:
        nothing is rounded on the way, and nothing is converted there and back.

    Attributes
    ----------
    items
        The program.
    outputs
        What the graph returns: values, and what is no tensor.
    slots
        How many tensors Python holds.
    """

    module: fx.GraphModule
    leaves: Sequence[Any]
    threads: int
    packed: dict[Any, Any] = field(default_factory=dict)
    widen: bool = True
    items: list[Item] = field(default_factory=list)
    outputs: Any = None
    slots: int = 0
    _values: dict[fx.Node, Any] = field(default_factory=dict)
    _storages: Storages = field(default_factory=Storages)
    _widened: bool = False
    _in_bf16: bool = False
    _rounded: set[int] = field(default_factory=set)  # memory that int8 layers write

    def __post_init__(self) -> None:
        self.slots = len(self.leaves)
        given = iter(enumerate(self.leaves))
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._given(*next(given))
            elif node.op == "get_attr":
                self._values[node] = self._constant(member(self.module, str(node.target)))
            elif node.op == "output":
                self.outputs = self._arguments(node.args[0])
            elif node.op == "call_module":
                self._values[node] = self._layer(node)
            else:
                self._values[node] = self._call(node)
        if self._widened:
            self._narrow_outputs()

    @property
    def shapes(self) -> dict[fx.Node, torch.Size]:
        """Shapes of the tensors of the graph."""
        return {node: value.meta.shape for node, value in self._values.items() if isinstance(value, Value)}

    # ------------------------------------------------------------------ what is there before

    def _given(self, number: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.device.type != "cpu":
            raise NotChained(f"an input on {leaf.device}")
        value = self._storages.put(meta_like(leaf), Slot(number))
        if not self._is_short(leaf):
            return value
        return self._python(Tensor.float, (value,), {}, torch.empty(leaf.shape, device="meta"))

    def _is_short(self, tensor: Tensor) -> bool:
        """Whether a tensor is widened; from then on so is all else."""
        short = self.widen and tensor.dtype in _SHORT
        self._widened |= short
        self._in_bf16 |= short and tensor.dtype == torch.bfloat16
        return short

    def _wide(self, tensor: Tensor) -> Tensor:
        """Return a fixed tensor in float32, widened once for all sizes."""
        if not self._is_short(tensor):
            return tensor
        key = ("wide", tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in self.packed:
            self.packed[key] = tensor.float()
        found: Tensor = self.packed[key]
        if tensor.dtype == torch.bfloat16:
            self.packed["bf16", found.data_ptr()] = True
        return found

    def _narrow_outputs(self) -> None:
        """Return results in the dtypes that the graph gives them."""
        plain = Trace(self.module, self.leaves, self.threads, widen=False).outputs
        if not isinstance(plain, (list, tuple)):
            raise NotChained("results in a structure")
        pairs = zip(self.outputs, plain, strict=True)
        self.outputs = type(plain)(
            self._python(Tensor.to, (one, two.meta.dtype), {}, meta_like(two.meta))
            if isinstance(one, Value) and one.meta.dtype != two.meta.dtype
            else one
            for one, two in pairs
        )

    def _constant(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        tensor = self._wide(tensor)
        if tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj() or tensor.layout != torch.strided:
            raise NotChained("a tensor that is not plain memory on the CPU")
        return self._storages.put(meta_like(tensor), Constant(tensor))

    def _arguments(self, tree: Any) -> Any:
        def change(each: Any) -> Any:
            if isinstance(each, fx.Node):
                return self._values[each]
            return torch.float32 if self.widen and isinstance(each, torch.dtype) and each in _SHORT else each

        return mapped(tree, change)

    # ------------------------------------------------------------------ calls

    def _call(self, node: fx.Node) -> Any:
        target: Any = node.target
        schema = getattr(target, "_schema", None)
        if node.op != "call_function" or (schema is not None and schema.is_mutable):
            raise NotChained(f"{target} writes to its arguments")
        args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
        if any(isinstance(each, _Several) for each in args):
            return self._part_of(target, args)
        quick = result_of(target, args)
        result = target(*_metas(args), **_metas(kwargs)) if quick is None else quick
        if isinstance(result, (list, tuple)):
            views = [self._storages.find(each) if isinstance(each, Tensor) else None for each in result]
            return tuple(views) if all(views) else self._python(target, args, kwargs, result)
        if not isinstance(result, Tensor):
            return result  # a size
        found = self._storages.find(result) or self._folded(target, args, kwargs, result)
        if found is not None:
            return found
        dense = self._dense_layer(target, args, kwargs)
        if dense is not None:
            return dense
        native = native_call(target, args, kwargs, result)
        return self._python(target, args, kwargs, result) if native is None else self._native(native)

    def _part_of(self, target: Any, args: tuple[Any, ...]) -> Any:
        """Return one of several results of a Python call."""
        several, which = args[0], args[1] if len(args) > 1 else None
        if target is not operator.getitem or not isinstance(which, int):
            raise NotChained(f"{target} of several results")
        meta = several.metas[which]
        if not isinstance(meta, Tensor):
            raise NotChained("a result that is no tensor")
        return self._python(operator.getitem, (several, which), {}, meta)

    def _folded(self, target: Any, args: Any, kwargs: Any, result: Tensor) -> Value | None:
        """Return what depends on sizes and fixed tensors alone, computed now."""
        given = _values_in((args, kwargs))
        random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        large = result.numel() * result.element_size() > _LARGEST_CONSTANT
        if random or large or not all(isinstance(each.source, Constant) for each in given):
            return None

        def real(each: Any) -> Any:
            return constant_of(each) if isinstance(each, Value) else each

        fixed = target(*mapped(args, real), **mapped(kwargs, real))
        value: Value = self._constant(fixed.contiguous() if fixed.stride() != result.stride() else fixed)
        return value

    def _native(self, call: NativeCall) -> Value:
        if call.step.kind is StepKind.ATTENTION and self._may_attend_in_bf16(call) and attends_by_blocks():
            call = replace(call, step=replace(call.step, kind=StepKind.ATTENTION_BF16))
        result = self._made(call.result)
        self.items.append(Native(call, result))
        return result

    def _may_attend_in_bf16(self, call: NativeCall) -> bool:
        """Whether attention may round to bf16: the model does, or int8 layers made all it reads, rounded coarser."""
        made = (call.x, *call.others[:2])
        rounded = all(each is not None and id(each.source) in self._rounded for each in made)
        return self._in_bf16 or (rounded and call.x.meta.shape[-2] >= _MANY_QUERIES)

    def _python(self, target: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> Any:
        slot = self.slots
        self.slots += 1
        self.items.append(PythonCall(target, args, kwargs, slot, result))
        if isinstance(result, Tensor):
            return self._storages.put(meta_like(result), Slot(slot))
        return _Several(slot, result)

    def _made(self, meta: Tensor) -> Value:
        nbytes = meta.untyped_storage().nbytes()
        return self._storages.put(meta, Made(nbytes))

    # ------------------------------------------------------------------ layers

    def _layer(self, node: fx.Node) -> Any:
        layer = self.module.get_submodule(str(node.target))
        args = self._arguments(node.args)
        if not isinstance(layer, KernelModule) or not all(isinstance(each, Value) for each in args):
            raise NotChained(f"the module {node.target}")
        x, residual = args[0], args[1] if len(args) > 1 else None
        lowering = layer.fused.lowering
        kernel, packed = layer.kernel_for(lowering.size(x.meta))
        product = kernel.product(packed, None if layer.bias is None else self._wide(layer.bias))
        found = None
        if isinstance(product, Product):
            found = self._linear(product, x, residual)
        elif callable(product):
            found = self._image(product, x, residual)
        if found is not None:
            return found
        dtype, fused = layer.live.dtype, layer.fused
        weight = torch.empty(fused.weight.shape, dtype=dtype, device="meta")
        shape = lowering.dense(weight, x.meta.to(dtype), None, fused.attributes).shape
        run = layer.fast_path() or layer.run
        if self._is_short(layer.live):
            meta = torch.empty(shape, device="meta")
            return self._python(partial(_in_short, run, dtype), (x, residual), {}, meta)
        meta = torch.empty(shape, dtype=lowering.result_dtype(dtype, fused.attributes), device="meta")
        return self._python(run, (x, residual), {}, meta)

    def _dense_layer(self, target: Any, args: Any, kwargs: Any) -> Value | None:
        """Return a layer with fixed dense tensors as a product of rows or of images."""
        if target is torch.ops.aten.linear.default:
            return self._dense(*args, **kwargs)
        layer = image_layer(target, self.packed, args, kwargs)
        return None if layer is None else self._image(layer, self._contiguous(args[0]), None)

    def _dense(self, x: Value, weight: Value, bias: Value | None = None) -> Value | None:
        """Return a dense layer with fixed tensors as a product."""
        fixed, shift = constant_of(weight), constant_of(bias)
        if fixed is None or (bias is not None and shift is None) or x.meta.dtype != torch.float32 or fixed.dim() != 2:
            return None
        tokens = x.meta.shape[:-1].numel()
        few = tokens < _FEWEST_TOKENS
        product = self._packed_few(fixed, shift) if few else self._packed_dense(fixed, shift, tokens)
        return None if product is None else self._linear(product, x, None)

    def _packed_few(self, weight: Tensor, bias: Tensor | None) -> Product | None:
        """Return a dense layer as a product of few tokens."""
        key = ("few", weight.data_ptr(), weight.shape, None if bias is None else bias.data_ptr())
        if key not in self.packed:
            self.packed[key] = few_tokens_product(weight, bias), weight, bias  # which keep their addresses
        found: Product | None = self.packed[key][0]
        return found

    def _packed_dense(self, weight: Tensor, bias: Tensor | None, tokens: int) -> Product | None:
        """Return a dense layer as a product, in bf16 where the model is and the processor computes in it."""
        known = weight.numel() > 0 and ("bf16", weight.data_ptr()) in self.packed
        short = bf16_dense_tile(tokens) if known else None
        tile = dense_tile(tokens, weight.shape[1])
        which = (weight.data_ptr(), weight.shape)
        key = (*which, None if bias is None else bias.data_ptr(), str(short or tile))
        stored = ("values", *which, *((tile.block, tile.k_chunk) if short is None else (short.form,)))
        if stored not in self.packed:
            self.packed[stored] = dense_values(weight, tile) if short is None else bf16_dense_values(weight, short)
        if key not in self.packed:
            values = self.packed[stored]
            self.packed["kept", key] = weight, bias  # so that no other tensors come to lie at their addresses
            self.packed[key] = (
                dense_product(weight, bias, tile, values)
                if short is None
                else bf16_dense_product(weight, bias, short, values)
            )
        found: Product | None = self.packed[key]
        return found

    def _linear(self, product: Product, x: Value, residual: Value | None) -> Value | None:
        rows = rows_of(x.meta, product.inputs)
        real = x.meta.dtype == torch.float32 and (product.takes is not None or product.output == torch.float32)
        whole = x.meta.dtype == product.takes and rows is not None and rows[1] % 4 == 0 and x.offset % 4 == 0
        if rows is None or not rows[0] or not (real or whole):
            return None
        if residual is not None:
            added = rows_of(residual.meta, product.outputs)
            if residual.meta.dtype != torch.float32 or added != (rows[0], product.outputs):
                return None
        shape = (*x.meta.shape[:-1], product.outputs)
        result = self._made(torch.empty(shape, dtype=product.output, device="meta"))
        self.items.append(Linear(product, x, residual, result, *rows))
        if product.kind is StepKind.INT8:
            self._rounded.add(id(result.source))
        return result

    def _contiguous(self, x: Value) -> Value:
        """Return images as layers of images read them, copied where they lie in another way."""
        if x.meta.is_contiguous():
            return x
        result = torch.empty(x.meta.shape, dtype=x.meta.dtype, device="meta")
        copy = native_call(torch.ops.aten.contiguous.default, (x,), {}, result)
        return x if copy is None else self._native(copy)

    def _image(self, product: Callable[..., Any], x: Value, residual: Value | None) -> Value | None:
        plain = x.meta.dtype == torch.float32 and x.meta.is_contiguous() and x.meta.numel() > 0
        found: ImageProduct | None = product(tuple(x.meta.shape), self.threads) if plain else None
        if found is None:
            return None
        if residual is not None:
            fits = residual.meta.is_contiguous() and tuple(residual.meta.shape) == found.shape
            if not fits or residual.meta.dtype != torch.float32:
                return None
        result = self._made(torch.empty(found.shape, device="meta"))
        room = Made(found.room) if found.room else None
        self.items.append(ImageItem(found, x, residual, result, room))
        return result


def attends_by_blocks() -> bool:
    """Whether the processor multiplies blocks of bf16, which makes attention in it worth while."""
    return "blocks" in load().bf16_units


def _in_short(run: Callable[..., Tensor], dtype: torch.dtype, x: Tensor, residual: Tensor | None) -> Tensor:
    """Return what a layer of a short dtype makes of float32."""
    return run(x.to(dtype), None if residual is None else residual.to(dtype)).float()


@dataclass(frozen=True, eq=False)
class _Several:
    """Several results of a Python call."""

    slot: int
    metas: Sequence[Any]


def _metas(tree: Any) -> Any:
    return mapped(tree, lambda each: each.meta if isinstance(each, Value) else _checked(each))


def _checked(each: Any) -> Any:
    if isinstance(each, torch.device):
        return torch.device("meta")
    return each


def _values_in(tree: Any) -> list[Value]:
    found: list[Value] = []
    mapped(tree, lambda each: found.append(each) if isinstance(each, Value) else None)
    return found
