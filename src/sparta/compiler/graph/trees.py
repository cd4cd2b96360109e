"""Structures of arguments and results (tuples, lists, dicts, records) as JSON, read without importing anything.

PyTorch's own reader of such structures imports the modules that a file names; this one knows the built-in containers,
and takes data classes only if the program has registered them already. Where it has not, a :class:`Record` with the
same fields stands for them, and :class:`NamedValues` for named tuples, so a file loads without the model's code.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Mapping
from typing import Any

from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from sparta.errors import FileFormatError, message

__all__ = ["NamedValues", "Record", "tree_from_json", "tree_to_json"]

_DEEPEST = 64
_LISTS: dict[Any, str] = {tuple: "tuple", list: "list"}
_DICTS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered"}
_TORCH_NAMES = {
    "builtins.tuple": "tuple",
    "torch.Size": "tuple",
    "builtins.list": "list",
    "torch.fx.immutable_collections.immutable_list": "list",
    "builtins.dict": "dict",
    "torch.fx.immutable_collections.immutable_dict": "dict",
    "collections.OrderedDict": "ordered",
}
_ALIASES = {name.rpartition(".")[2]: kind for name, kind in _TORCH_NAMES.items()}


class Record(OrderedDict[str, Any]):
    """The fields of a result whose class is not there: by name, by attribute, and by position.

    >>> result = Record(logits=1, hidden=2)
    >>> result.logits, result["hidden"], result[0], result.to_tuple()
    (1, 2, 1, (1, 2))
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no field {name!r}; there are {', '.join(self) or 'none'}")

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values in the order of the fields."""
        return tuple(self.values())


class NamedValues(tuple[Any, ...]):
    """A tuple whose items have names, where the class of the named tuple is not there.

    >>> NamedValues.of(["values", "indices"], [3, 4]).indices
    4
    """

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    @staticmethod
    def of(fields: Iterable[str], values: Iterable[Any]) -> NamedValues:
        """Return the values under these names."""
        made = _Named(values)
        made._fields = tuple(fields)
        return made

    def __getattr__(self, name: str) -> Any:
        if name in self._fields:
            return self[self._fields.index(name)]
        raise AttributeError(f"no field {name!r}; there are {', '.join(self._fields) or 'none'}")


class _Named(NamedValues):
    """A subclass with room for the names."""


pytree.register_pytree_node(
    Record,
    lambda record: (list(record.values()), list(record)),
    lambda values, names: Record(zip(names, values, strict=True)),
    serialized_type_name="sparta.Record",
)
pytree.register_pytree_node(
    _Named,
    lambda named: (list(named), list(named._fields)),
    lambda values, names: NamedValues.of(names, values),
    serialized_type_name="sparta.NamedValues",
)
# Arguments of a class with these fields are taken for them.
fx_pytree.register_pytree_flatten_spec(Record, lambda given, spec: [_field(given, name) for name in spec.context])
fx_pytree.register_pytree_flatten_spec(_Named, lambda given, spec: [getattr(given, name) for name in spec.context])


def tree_to_json(spec: pytree.TreeSpec) -> Any:
    """Return a structure as JSON values; raises for a container that could not be read back.

    >>> tree_to_json(pytree.tree_structure((1, {"a": 2})))
    {'tuple': [None, {'dict': [['a', None]]}]}
    """
    if spec.is_leaf():
        return None
    children = [tree_to_json(child) for child in _children(spec)]
    alias = _ALIASES.get(getattr(spec.type, "__name__", ""))
    kind = _LISTS.get(spec.type) or _DICTS.get(spec.type) or alias
    if kind in ("tuple", "list"):
        return {kind: children}
    if kind is not None and all(isinstance(key, (str, int, bool)) for key in spec.context):
        return {kind: [list(pair) for pair in zip(spec.context, children, strict=True)]}
    if spec.type is namedtuple:  # noqa: PYI024 - what PyTorch calls all of them
        return {"named": _record(spec.context, spec.context._fields, children)}
    if spec.type is _Named:
        return {"named": _record(_Named, spec.context, children)}
    names = list(spec.context) if isinstance(spec.context, (list, tuple)) else []
    if len(names) == len(children) and names and all(isinstance(name, str) for name in names):
        return {"record": _record(spec.type, names, children)}
    raise FileFormatError(
        message(
            f"the model takes or returns a {getattr(spec.type, '__name__', spec.type)}, which cannot be written",
            "tensors, numbers, tuples, lists, dicts, named tuples and data classes of these",
            "wrap the model in a module that returns one of these, and compile that",
        )
    )


def tree_from_json(tree: Any) -> pytree.TreeSpec:
    """Return the structure that :func:`tree_to_json`, or an older version's file, holds; imports nothing."""
    if isinstance(tree, str):
        return _from_torch(tree)
    return _read(tree, _DEEPEST)


def _field(given: Any, name: str) -> Any:
    return given[name] if isinstance(given, Mapping) else getattr(given, name)


def _record(kind: Any, fields: Iterable[str], children: list[Any]) -> dict[str, Any]:
    pairs = [list(pair) for pair in zip(fields, children, strict=True)]
    return {"type": f"{kind.__module__}.{kind.__qualname__}", "fields": pairs}


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return [spec.child(place) for place in range(spec.num_children)]


def _read(tree: Any, depth: int) -> pytree.TreeSpec:
    if tree is None:
        return pytree.treespec_leaf()
    if depth == 0 or not isinstance(tree, Mapping) or len(tree) != 1:
        raise _unreadable(tree)
    ((kind, inner),) = tree.items()
    if kind in ("tuple", "list") and isinstance(inner, list):
        return _node(tuple if kind == "tuple" else list, None, [_read(child, depth - 1) for child in inner])
    if kind in ("named", "record") and isinstance(inner, Mapping) and isinstance(inner.get("type"), str):
        names, children = _pairs(inner.get("fields"), depth)
        if not all(isinstance(name, str) for name in names):
            raise _unreadable(tree)
        return _node(_Named, names, children) if kind == "named" else _recorded(inner["type"], names, children)
    if kind in ("dict", "ordered"):
        keys, children = _pairs(inner, depth)
        return _node(dict if kind == "dict" else OrderedDict, keys, children)
    raise _unreadable(tree)


def _pairs(pairs: Any, depth: int) -> tuple[list[Any], list[pytree.TreeSpec]]:
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise _unreadable(pairs)
    keys = [key for key, _ in pairs]
    if not all(isinstance(key, (str, int, bool)) for key in keys) or len(set(keys)) != len(keys):
        raise _unreadable(keys)
    return keys, [_read(child, depth - 1) for _, child in pairs]


def _recorded(name: str, fields: list[str], children: list[pytree.TreeSpec]) -> pytree.TreeSpec:
    for known in pytree.SUPPORTED_NODES:
        if (
            dataclasses.is_dataclass(known)
            and f"{known.__module__}.{known.__qualname__}" == name
            and set(fields) <= {field.name for field in dataclasses.fields(known)}
        ):
            return _node(known, fields, children)
    return _node(Record, fields, children)


def _node(kind: Any, context: Any, children: list[pytree.TreeSpec]) -> pytree.TreeSpec:
    return pytree.TreeSpec(kind, context, children)


def _from_torch(text: str) -> pytree.TreeSpec:
    """Return a structure in PyTorch's notation, as older files have it; built-in containers only."""
    try:
        protocol, schema = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _unreadable(text) from error
    if protocol != 1:
        raise _unreadable(text)
    return _read(_modern(schema, _DEEPEST), _DEEPEST)


def _modern(schema: Any, depth: int) -> Any:
    """Return PyTorch's notation of a structure in ours."""
    if not isinstance(schema, Mapping) or depth == 0:
        raise _unreadable(schema)
    name, context, below = (schema.get(key) for key in ("type", "context", "children_spec"))
    if name is None:
        return None
    if not isinstance(below, list):
        raise _unreadable(schema)
    children = [_modern(child, depth - 1) for child in below]
    kind = _TORCH_NAMES.get(str(name))
    if kind in ("tuple", "list"):
        return {kind: children}
    try:
        keys = json.loads(context) if isinstance(context, str) else context
    except (ValueError, RecursionError) as error:
        raise _unreadable(schema) from error
    if not isinstance(keys, list) or len(keys) != len(children):
        raise _unreadable(schema)
    pairs = [list(pair) for pair in zip(keys, children, strict=True)]
    return {"record": {"type": str(name), "fields": pairs}} if kind is None else {kind: pairs}


def _unreadable(tree: object) -> FileFormatError:
    return FileFormatError(
        message(
            f"the stored structure {reprlib.repr(tree)} of arguments or results",
            "tuples, lists, dicts, named tuples and records of leaves",
            "save the model again",
        )
    )
