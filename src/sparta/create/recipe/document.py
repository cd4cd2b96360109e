"""Reading and writing YAML: plain data in, plain data out, and no surprises on the way.

It is the one place where a recipe's text becomes dictionaries, lists and scalars. Scalars are read as YAML 1.2 reads
them (``2:4`` is text, ``1e-7`` a number, ``no`` a word) but written so that older readers see the same. A duplicate
key, a strange tag or an endless alias is an error, and so is a short text that stands for a huge document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sparta.errors import FileFormatError, message

__all__ = ["Size", "Tagged", "dump", "front_matter", "parse_document", "parse_scalar", "plain_data"]

_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_NULL = re.compile(r"~|null|Null|NULL|")
_LONGEST = 500_000  # characters; the longest recipes that people write have some thousands
_MOST_VALUES = 100_000  # of one document, aliases written out
_DEEPEST = 40
_MOST_DIGITS = 400  # of a whole number: more than the largest float has
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Tagged:
    """A mapping that carries a tag of its own, such as ``!EpochRangeModifier``.

    >>> parse_document("- !EpochRangeModifier {end_epoch: 3}")
    [Tagged(tag='EpochRangeModifier', fields={'end_epoch': 3})]
    """

    tag: str
    fields: dict[str, Any]


def parse_document(text: str, *, source: str = "the recipe") -> Any:
    """Return what a YAML text holds: dictionaries with text keys, lists, scalars and :class:`Tagged` mappings.

    Parameters
    ----------
    text
        YAML, or Markdown with YAML between two lines of ``---`` or ``+++`` on its top.
    source
        What error messages call it.

    Examples
    --------
    >>> parse_document("{mask_type: 2:4, final_lr: 1e-7, momentum: 5., frozen: no}")
    {'mask_type': '2:4', 'final_lr': 1e-07, 'momentum': 5.0, 'frozen': 'no'}
    """
    import yaml

    if len(text) > _LONGEST:
        raise FileFormatError(message(f"{source} has {len(text)} characters", f"{_LONGEST} at most", "split it up"))
    try:
        loaded = yaml.load(front_matter(text), Loader=_loader())  # noqa: S506 - a subclass of SafeLoader
        return plain_data(loaded, source)
    except RecursionError as error:
        raise FileFormatError(
            message(f"{source} is nested too deeply", f"{_DEEPEST} levels at most", "write it flatter")
        ) from error
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Beside its own errors, yaml raises whatever int("x") and the like do for a scalar under a wrong tag.
        what = " ".join(str(error).split())[:500]
        raise FileFormatError(message(f"{source} is not valid YAML: {what}", fix="correct the text")) from error


def parse_scalar(text: str) -> Any:
    """Return the value a text such as ``0.5``, ``true``, ``null`` or ``cosine`` stands for.

    >>> [parse_scalar(text) for text in ("0.5", "2:4", "true", "null", "[1, 2]")]
    [0.5, '2:4', True, None, [1, 2]]
    """
    return parse_document(text, source=repr(text))


def plain_data(value: Any, source: str = "the recipe") -> Any:
    """Return a copy made of dictionaries with text keys, lists, scalars and :class:`Tagged`; refuses anything else.

    >>> plain_data({0.5: ("a", None)})
    {'0.5': ['a', None]}
    """
    return _plain(value, Size(source), 0, source)


class Size:
    """Counts the values of a document, those that are shared as often as they stand in it, and refuses too many.

    >>> size = Size("the recipe")
    >>> size.add({"a": [1, 2]})
    >>> size.count
    4
    """

    def __init__(self, source: str) -> None:
        self.source, self.count = source, 0

    def step(self) -> None:
        """Count one value."""
        self.count += 1
        if self.count > _MOST_VALUES:
            raise too_large(self.source)

    def add(self, value: object) -> None:
        """Count a value and all inside it."""
        self.step()
        for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
            self.add(inner)


def too_large(source: str) -> FileFormatError:
    """Return the error for a document that explodes."""
    allowed = f"{_MOST_VALUES} values, {_DEEPEST} levels deep"
    return FileFormatError(message(f"{source} is too large or refers to itself", allowed, "write less of it"))


def front_matter(text: str) -> str:
    r"""Return the YAML of a Markdown text (what stands between two ``---`` or ``+++`` lines on its top), or the text.

    >>> front_matter("---\na: 1\n---\n# A title\n")
    'a: 1'
    """
    prose = re.sub(r"\A\ufeff?\s*(?:<!--.*?-->\s*)*", "", text, flags=re.DOTALL)  # a licence may stand on top
    lines = prose.splitlines()
    fence = lines[0].rstrip() if lines else ""
    if fence not in {"---", "+++"}:
        return text
    for place in range(1, len(lines)):
        if lines[place].rstrip() == fence:
            return "\n".join(lines[1:place])
    if fence == "+++":
        raise FileFormatError(message("the front matter opened by +++ is never closed", fix="close it with a +++ line"))
    return text


def dump(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML that old and new readers read alike.

    >>> print(dump({"mask_type": "2:4", "final_lr": 1e-7, "ends": [1, 2]}), end="")
    mask_type: '2:4'
    final_lr: 1.0e-07
    ends: [1, 2]
    """
    import yaml

    text: str = yaml.dump(
        data, Dumper=_dumper(), sort_keys=False, default_flow_style=False, width=10_000, allow_unicode=True
    )
    return text


@cache
def _loader() -> type[Any]:
    """Return a loader of YAML 1.2's scalars that keeps tagged mappings apart and refuses duplicate keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - yaml's own convention
        _merged = 0  # pairs, over the whole document

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                if key is not None and key != "<<":
                    seen.add(key)
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Put the pairs of the mappings under ``<<`` before a mapping's own; each key stays once."""
            pairs: dict[object, tuple[yaml.Node, yaml.Node]] = {}
            own = [(key, value) for key, value in node.value if key.tag != _MERGE]
            for given in [value for key, value in node.value if key.tag == _MERGE]:
                for source in reversed(given.value if isinstance(given, yaml.SequenceNode) else [given]):
                    if not isinstance(source, yaml.MappingNode):
                        raise yaml.constructor.ConstructorError(None, None, "<< wants mappings", source.start_mark)
                    self.flatten_mapping(source)
                    self._merged += len(source.value) + 1
                    if self._merged > _MOST_VALUES:
                        raise too_large("a recipe with merge keys")
                    pairs.update({_identity(key): (key, value) for key, value in source.value})
            if len(own) < len(node.value):
                node.value = list((pairs | {_identity(key): (key, value) for key, value in own}).values())

    for tag, pattern, first in (
        ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
        ("tag:yaml.org,2002:bool", _BOOLEAN, list("tTfF")),
        ("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789")),
        ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
        (_MERGE, re.compile("<<"), ["<"]),
    ):
        Loader.add_implicit_resolver(tag, re.compile(f"(?:{pattern.pattern})$"), first)
    Loader.add_constructor("tag:yaml.org,2002:int", _integer)
    Loader.add_constructor("tag:yaml.org,2002:float", _real)
    Loader.add_multi_constructor("!", _tagged)
    return Loader


@cache
def _dumper() -> type[Any]:
    """Return a dumper that quotes whatever either kind of reader would take for something else than text."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes short lists on one line, and everything else on lines of its own."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - every value is written out
            return True

    def text(dumper: Any, data: str) -> Any:
        odd = any(mark in data for mark in "\r\x85\u2028\u2029\ufeff")  # line breaks, which only this style keeps
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style='"' if odd else None)

    def items(dumper: Any, data: list[Any]) -> Any:
        short = not any(isinstance(item, list | dict) for item in data)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=short)

    Dumper.add_representer(str, text)
    Dumper.add_representer(list, items)
    number = re.compile(f"(?:{_INTEGER.pattern}|{_FLOAT.pattern})$")
    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Dumper


def _identity(key: Any) -> object:
    """Return what tells keys of a mapping apart: tag and text of a scalar, else the node itself."""
    return (key.tag, key.value) if isinstance(key.value, str) else id(key)


def _tagged(loader: Any, suffix: str, node: Any) -> Tagged:
    import yaml

    if isinstance(node, yaml.MappingNode):
        return Tagged(suffix, loader.construct_mapping(node, deep=True))
    if isinstance(node, yaml.ScalarNode) and not node.value:
        return Tagged(suffix, {})
    raise yaml.constructor.ConstructorError(None, None, f"the tag !{suffix} is not on a mapping", node.start_mark)


def _integer(loader: Any, node: Any) -> int:
    import yaml

    text = str(loader.construct_scalar(node))
    if len(text) > _MOST_DIGITS:
        raise yaml.constructor.ConstructorError(None, None, f"a number of {len(text)} digits", node.start_mark)
    return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)


def _real(loader: Any, node: Any) -> float:
    text = str(loader.construct_scalar(node))
    lower = text.lower()
    if lower.endswith(("inf", "nan")):
        return math.nan if "nan" in lower else math.copysign(math.inf, -1 if lower.startswith("-") else 1)
    return float(text)


def _plain(value: Any, size: Size, depth: int, source: str) -> Any:
    """Return a copy with aliases written out; refuses keys that are no text, and documents that explode."""
    size.step()
    if depth > _DEEPEST:
        raise too_large(source)
    if isinstance(value, Tagged):
        return Tagged(value.tag, _plain(value.fields, size, depth + 1, source))
    if isinstance(value, list | tuple):
        return [_plain(item, size, depth + 1, source) for item in value]
    if isinstance(value, Mapping):
        return {_key(key, source): _plain(item, size, depth + 1, source) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise FileFormatError(message(f"{source} holds a {type(value).__name__}", "mappings, lists, text and numbers"))


def _key(key: object, source: str) -> str:
    if isinstance(key, bool) or not isinstance(key, str | int | float):
        raise FileFormatError(message(f"{source} has the key {key!r}", "text", "put it in quotes"))
    return str(key)
