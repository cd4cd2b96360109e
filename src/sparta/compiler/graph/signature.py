"""The signature: how a compiled model is called, kept apart from what it computes.

A captured graph takes flat tensors and returns flat tensors; a :class:`Signature` leads from the caller's arguments to
the former and from the latter back to the caller's structure. It holds names, sizes and tree structures only, so it is
written to JSON and read back without the original model's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from sparta.compiler.graph.sizes import Sizes
from sparta.compiler.graph.trees import tree_from_json, tree_to_json
from sparta.compiler.numbers import a_flag, a_whole_number
from sparta.errors import FileFormatError, ShapeError, ValueRangeError, message
from sparta.propagation.capture import Captured

__all__ = ["NOT_EXACT", "Input", "Signature", "builder"]

_PLAIN = (bool, int, float, str, type(None))
NOT_EXACT = object()
"""What :meth:`Signature.fast_path` returns for inputs that need a second look."""


@dataclass(frozen=True)
class Input:
    """One flat input: a tensor with its sizes (None where any size will do), or a constant of the capture.

    Parameters
    ----------
    name
        As the graph calls it.
    shape
        Sizes of the dims; None for an input that is no tensor.
    dtype
        Name of the tensor's dtype, ``""`` for a constant.
    constant
        The value that an input that is no tensor must have: the graph was captured for it.
    """

    name: str
    shape: tuple[int | None, ...] | None
    dtype: str = ""
    constant: Any = None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Input:
        """Return the input that a file describes."""
        name, shape, dtype, constant = (fields[key] for key in ("name", "shape", "dtype", "constant"))
        if shape is None:
            if not isinstance(constant, (bool, int, float, str, type(None))):
                raise FileFormatError(message(f"the constant of the input {name!r}", "None, a number or a string"))
            return cls(str(name), None, "", constant)
        if not all(size is None or (isinstance(size, int) and size >= 0) for size in shape):
            raise FileFormatError(message(f"the sizes {shape} of the input {name!r}", "None, or 0 and more"))
        if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise FileFormatError(message(f"the input {name!r} has the dtype {dtype!r}", "one of torch"))
        return cls(str(name), tuple(shape), str(dtype))

    def check(self, leaf: object, *, cast: bool) -> object:
        """Return the leaf as the graph takes it; raises for one that does not fit."""
        if self.shape is None:
            if leaf is self.constant or (type(leaf) is type(self.constant) and leaf == self.constant):
                return leaf
            given = f"{self.name}={leaf!r}, but the model was compiled for {self.name}={self.constant!r}"
            raise ValueRangeError(message(given, fix="compile it for this value too, as a model of its own"))
        if not isinstance(leaf, Tensor):
            raise ValueRangeError(message(f"{self.name} of type {type(leaf).__name__}", "a tensor"))
        fits = len(self.shape) == leaf.dim() and all(
            mine is None or mine == given for mine, given in zip(self.shape, leaf.shape, strict=True)
        )
        if not fits:
            sizes = "×".join("any" if size is None else str(size) for size in self.shape)
            raise ShapeError(
                message(
                    f"{self.name} of shape {tuple(leaf.shape)}",
                    sizes or "a scalar",
                    "pass dynamic_shapes to sparta.compile for dims that change",
                )
            )
        wanted = getattr(torch, self.dtype)
        if leaf.dtype == wanted:
            return leaf
        if cast and leaf.is_floating_point():
            return leaf.to(wanted)
        raise ValueRangeError(message(f"{self.name} of {leaf.dtype}", str(wanted), f"pass {self.name}.to({wanted})"))


@dataclass(frozen=True)
class Signature:
    """How a model is called.

    Parameters
    ----------
    parameters
        The names of the positional parameters of the model's ``forward``.
    in_spec, out_spec
        Structures of ``(args, kwargs)`` and of the result.
    inputs
        The flat inputs in order.
    positional, keywords
        How many arguments the example gave by position, and the names of the others.
    cast
        Whether floating-point inputs are converted to the compiled dtype.
    sizes
        Which sizes the graph takes; None, as files of older versions have it, for what the inputs say alone.
    defaults
        What parameters of ``forward`` are that a call leaves out, where that is None, a number or a string.
    """

    parameters: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    inputs: tuple[Input, ...]
    positional: int
    keywords: tuple[str, ...]
    cast: bool = False
    sizes: Sizes | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, captured: Captured, *, cast: bool = False, sizes: Sizes | None = None) -> Signature:
        """Return the signature of a captured model."""
        info = captured.graph._codegen.pytree_info  # type: ignore[attr-defined]
        places = [node for node in captured.graph.nodes if node.op == "placeholder"]
        leaves = pytree.tree_leaves((captured.args, dict(captured.kwargs)))
        inputs = tuple(_input(node, leaf) for node, leaf in zip(places, leaves, strict=True))
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(model.forward).parameters.values()
        named = tuple(p.name for p in parameters if p.kind in kinds)
        defaults = {p.name: p.default for p in parameters if isinstance(p.default, _PLAIN)}
        keywords = tuple(captured.kwargs)
        return cls(named, info.in_spec, info.out_spec, inputs, len(captured.args), keywords, cast, sizes, defaults)

    @property
    def flat(self) -> bool:
        """Whether the flat inputs are the positional arguments of the example: nothing nested, nothing by name."""
        return self.positional == len(self.inputs)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the flat inputs of a call, checked."""
        if not kwargs and self.flat and len(args) == self.positional:
            leaves: Sequence[Any] = args  # the usual case: tensors by position, nothing nested
            if all(map(_is, args, *self._exact)):
                return list(args)
        else:
            leaves = self._leaves(*self._as_captured(args, kwargs))
        return [given.check(leaf, cast=self.cast) for given, leaf in zip(self.inputs, leaves, strict=True)]

    def fast_path(self, run: Callable[..., Any], *, flat: bool = True) -> Callable[[tuple[Any, ...]], Any] | None:
        """Return a function of the positional arguments as a tuple, for inputs that are tensors of the example's sizes.

        It returns what :meth:`unflatten` makes of what `run` returns (which it returns as it is if that is not `flat`),
        and `NOT_EXACT` for other inputs; None where the example itself is not of that kind.
        """
        sizes, dtypes = self._exact
        if None in sizes or not self.flat:
            return None
        build, count = self._builder if flat else _unchanged, len(sizes)

        def call(args: tuple[Any, ...]) -> Any:
            if len(args) != count:
                return NOT_EXACT
            for leaf, size, dtype in zip(args, sizes, dtypes, strict=True):
                if type(leaf) is not Tensor or leaf.shape != size or leaf.dtype is not dtype:
                    return NOT_EXACT
            return build(run(*args))

        return call

    @cached_property
    def _exact(self) -> tuple[list[torch.Size | None], list[torch.dtype | None]]:
        """The sizes and the dtypes that need no second look; None where there are none."""
        sizes: list[torch.Size | None] = []
        dtypes: list[torch.dtype | None] = []
        examples = self.sizes.example if self.sizes is not None else tuple(given.shape for given in self.inputs)
        for given, shape in zip(self.inputs, examples, strict=True):
            exact = given.shape is not None and shape is not None and None not in shape
            sizes.append(torch.Size(size or 0 for size in shape or ()) if exact else None)
            dtypes.append(getattr(torch, given.dtype) if exact else None)
        return sizes, dtypes

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return flat outputs in the structure that the model returns."""
        return self._builder(leaves)

    @cached_property
    def _builder(self) -> Callable[[Sequence[Any]], Any]:
        return builder(self.out_spec)

    def _as_captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by position and by name as the example gave them, whichever way the caller did."""
        if len(args) == self.positional and set(kwargs) == set(self.keywords):
            return args, {name: kwargs[name] for name in self.keywords}
        if len(args) > max(len(self.parameters), self.positional):
            raise ValueRangeError(message(f"{len(args)} arguments", f"up to {len(self.parameters)}"))
        given = dict(zip(self.parameters, args, strict=False)) if args else {}
        twice = sorted(set(given) & set(kwargs))
        if twice:
            raise ValueRangeError(message(f"{twice[0]} is given twice", "once"))
        given.update(kwargs)
        first = self.parameters[: self.positional]
        given = {**{name: value for name, value in self.defaults.items() if name in self._constants}, **given}
        missing = [name for name in (*first, *self.keywords) if name not in given]
        extra = [name for name in given if name not in (*first, *self.keywords) and not self._is_default(name, given)]
        if missing or extra or len(first) < self.positional:
            asked = ", ".join((*first, *self.keywords))
            what = f"a call without {', '.join(missing)}" if missing else f"a call with {', '.join(extra)} as well"
            raise ValueRangeError(message(what, f"the arguments of the example: {asked}", "compile it with these"))
        return tuple(given[name] for name in first), {name: given[name] for name in self.keywords}

    @cached_property
    def _constants(self) -> frozenset[str]:
        """The names of arguments that were no tensors, and held none, in the example."""
        args, kwargs = self.in_spec.child(0), self.in_spec.child(1)
        children = [*map(args.child, range(args.num_children)), *map(kwargs.child, range(kwargs.num_children))]
        places, found = iter(self.inputs), set()
        for name, child in zip((*self.parameters[: self.positional], *kwargs.context), children, strict=False):
            leaves = [next(places) for _ in range(child.num_leaves)]
            if all(leaf.shape is None for leaf in leaves):
                found.add(name)
        return frozenset(found)

    def _is_default(self, name: str, given: Mapping[str, Any]) -> bool:
        """Whether an argument that the example left out is what it was then."""
        value = given[name]
        known = self.defaults.get(name)
        return value is None or (name in self.defaults and type(value) is type(known) and value == known)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, found = pytree.tree_flatten((args, kwargs))
        if found == self.in_spec:
            return leaves
        try:
            leaves = list(fx_pytree.tree_flatten_spec((args, kwargs), self.in_spec))
        except (KeyError, IndexError, TypeError, RuntimeError, AttributeError) as error:
            raise ValueRangeError(
                message(f"arguments of another structure ({error})", "the structure of the example", "compile for it")
            ) from error
        return leaves

    def in_dtype(self, dtype: torch.dtype) -> Signature:
        """Return the signature of the model in another dtype; floating-point inputs are converted from now on."""
        name = str(dtype).removeprefix("torch.")
        inputs = tuple(
            replace(given, dtype=name) if given.dtype and getattr(torch, given.dtype).is_floating_point else given
            for given in self.inputs
        )
        return replace(self, inputs=inputs, cast=True)

    # ------------------------------------------------------------------ as JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the signature as JSON values; raises where a structure has a type that cannot be written."""
        specs = {"in_spec": tree_to_json(self.in_spec), "out_spec": tree_to_json(self.out_spec)}
        inputs = [asdict(given) for given in self.inputs]
        for given in inputs:
            if given["constant"] is not None and not isinstance(given["constant"], (bool, int, float, str)):
                raise FileFormatError(message(f"the constant input {given['name']!r}", "None, a number or a string"))
        return {
            **specs,
            "parameters": list(self.parameters),
            "inputs": inputs,
            "positional": self.positional,
            "keywords": list(self.keywords),
            "cast": self.cast,
            "sizes": None if self.sizes is None else self.sizes.to_dict(),
            "defaults": dict(self.defaults),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Signature:
        """Return the signature that :meth:`to_dict` wrote."""
        taken, given_back = (tree_from_json(fields[name]) for name in ("in_spec", "out_spec"))
        inputs = tuple(Input.from_dict(given) for given in fields["inputs"])
        if taken.num_leaves != len(inputs):
            raise FileFormatError(message(f"{len(inputs)} inputs for {taken.num_leaves} places", "one per place"))
        found = cls(
            _names(fields["parameters"]),
            taken,
            given_back,
            inputs,
            a_whole_number(fields["positional"], "the number of positional arguments"),
            _names(fields["keywords"]),
            a_flag(fields["cast"], "whether inputs are converted"),
            None if fields.get("sizes") is None else Sizes.from_dict(fields["sizes"]),
            _defaults(fields.get("defaults", {})),
        )
        _check_arguments(found)
        return found


def _defaults(given: object) -> dict[str, Any]:
    """Return the defaults of arguments that a file lists."""
    if not isinstance(given, dict) or not all(isinstance(value, _PLAIN) for value in given.values()):
        raise FileFormatError(message("the defaults of arguments", "None, numbers and texts", "save it again"))
    return {str(name): value for name, value in given.items()}


def _names(given: object) -> tuple[str, ...]:
    """Return the names of arguments that a file lists."""
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given) or len(set(given)) < len(given):
        raise FileFormatError(message("the names of arguments", "a list of texts, each once", "save it again"))
    return tuple(given)


def _check_arguments(signature: Signature) -> None:
    """Raise unless the structure that a file gives is that of arguments: a tuple, and a dict by the same names."""
    spec = signature.in_spec
    parts = [spec.child(place) for place in range(spec.num_children)] if spec.type is tuple else []
    if [part.type for part in parts] != [tuple, dict]:
        raise FileFormatError(message("the structure of the arguments", "a tuple and a dict", "save it again"))
    args, kwargs = parts
    if args.num_children != signature.positional or set(kwargs.context) != set(signature.keywords):
        given = f"{signature.positional} positional arguments and {', '.join(signature.keywords)[:200] or 'no others'}"
        raise FileFormatError(message(given, "those of the structure of the arguments", "save it again"))


def builder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts flat leaves into a structure.

    Tuples, lists and dicts are looked at here and not in every call, which would cost more than starting a kernel.

    >>> _, spec = pytree.tree_flatten((1, [2, {"a": 3}]))
    >>> builder(spec)(["x", "y", "z"])
    ('x', ['y', {'a': 'z'}])
    """
    places = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return _builder_of(places) or (lambda leaves: pytree.tree_unflatten(list(leaves), spec))


def _builder_of(places: object) -> Callable[[Sequence[Any]], Any] | None:
    """Return what builds a structure whose leaves are the places of leaves; None for types that are not known."""
    if isinstance(places, int):
        return itemgetter(places)
    kind = type(places)
    if kind is dict and isinstance(places, dict):
        values = _builder_of(tuple(places.values()))
        keys = tuple(places)
        return None if values is None else lambda leaves: dict(zip(keys, values(leaves), strict=True))
    if not isinstance(places, (tuple, list)) or kind not in (tuple, list):
        return None
    parts = [_builder_of(each) for each in places]
    known = [part for part in parts if part is not None]
    return None if len(known) < len(parts) else lambda leaves: kind([part(leaves) for part in known])


def _unchanged(result: Any) -> Any:
    return result


def _is(leaf: object, size: torch.Size | None, dtype: torch.dtype | None) -> bool:
    return isinstance(leaf, Tensor) and leaf.shape == size and leaf.dtype is dtype


def _input(node: fx.Node, leaf: object) -> Input:
    value = node.meta.get("val")
    if not isinstance(leaf, Tensor) or not isinstance(value, Tensor):
        return Input(node.name, None, constant=leaf)
    shape = tuple(_fixed_size(size) for size in value.shape)
    return Input(node.name, shape, str(leaf.dtype).removeprefix("torch."))


def _fixed_size(size: int | torch.SymInt) -> int | None:
    """Return the size of a dim that does not change, else None."""
    if isinstance(size, int):
        return size
    found = size.node.shape_env.replace(size.node.expr)
    return int(found) if found.is_Integer else None
