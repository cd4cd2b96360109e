"""Search spaces: nested choices over parameters, in NNI's notation.

A space is a :class:`TunableItemCfg` or a plain dict of them (a joint space). It says what may be tried;
:mod:`sparta.common.search` decides what is. A sample is made by a walk from the root that picks one value at every node
it comes to, and :func:`walk` is that walk: drawing, enumerating, reading a stored trial and asking Optuna differ only
in who picks.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, cast

from sparta.common.domains import Choices, Domain, Scalar, domain_of, identity, thaw
from sparta.errors import NameNotFoundError, ShapeError, SpartaError, ValueRangeError, did_you_mean, message

__all__ = [
    "Sample",
    "Space",
    "TunableItemCfg",
    "checked",
    "coordinates",
    "default_of",
    "draw",
    "from_json",
    "from_nni_search_space",
    "includes",
    "key_of",
    "mutate",
    "normalize",
    "sample_at",
    "samples_of",
    "size_of",
    "to_json",
    "to_nni_search_space",
    "walk",
]

Sample = Any  # a value of a plain item; a dict of parameters, with "_name" for a nested choice
Pick = Callable[[str, "TunableItemCfg"], Scalar]

_NAME = "_name"
_RESERVED = frozenset({_NAME, "_type", "_value"})


@dataclass(frozen=True, eq=False)
class TunableItemCfg:
    """One tunable parameter, or a nested choice between alternatives that each have parameters of their own.

    Parameters
    ----------
    _type
        ``'choice'``, or one of NNI's numeric types: ``'uniform'``, ``'loguniform'``, ``'quniform'``, ``'randint'``.
    _value
        The values of a choice, or the bounds of a numeric type: ``[low, high]``, ``[low, high, q]`` for ``quniform``
        (multiples of q), ``[lower, upper]`` for ``randint`` (upper excluded). Of a nested choice, a mapping from each
        alternative's name to its parameters, a mapping from name to :class:`TunableItemCfg` (empty: no parameters).
    _is_nested
        Whether this is a nested choice.

    Examples
    --------
    >>> tile = TunableItemCfg('choice', _value=[16, 32])
    >>> space = TunableItemCfg('choice', _is_nested=True, _value={'dense': {}, 'block': {'tile': tile}})
    >>> list(space.samples())
    [{'_name': 'dense'}, {'_name': 'block', 'tile': 16}, {'_name': 'block', 'tile': 32}]
    >>> space.includes({'_name': 'block', 'tile': 64})
    False
    """

    _type: str = "choice"
    _value: Any = ()
    _is_nested: bool = False
    domain: Domain = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self._is_nested:
            object.__setattr__(self, "_value", _checked_options(self._type, self._value))
            object.__setattr__(self, "domain", Choices(tuple(self._value)))
            return
        if isinstance(self._value, Mapping):
            given = f"a {self._type} whose _value is a mapping"
            raise ValueRangeError(message(given, "a list", "pass _is_nested=True for a nested choice"))
        object.__setattr__(self, "domain", domain_of(self._type, self._value))
        values = self.domain.values if isinstance(self.domain, Choices) else self._value
        object.__setattr__(self, "_value", tuple(values))

    @property
    def options(self) -> Mapping[str, Mapping[str, TunableItemCfg]] | None:
        """The alternatives of a nested choice by name, each with its parameters; None for a plain parameter."""
        return cast("Mapping[str, Mapping[str, TunableItemCfg]]", self._value) if self._is_nested else None

    def size(self) -> int | None:
        """Return how many samples there are, or None when a range is continuous."""
        return size_of(self)

    def samples(self) -> Iterator[Sample]:
        """Iterate over all samples, the last parameter fastest; a finite space only."""
        return samples_of(self)

    def default(self) -> Sample:
        """Return the sample to use before anything is known: first choices, low ends, centres of continuous ranges."""
        return default_of(self)

    def includes(self, params: Sample) -> bool:
        """Tell whether a sample lies in this space."""
        return includes(self, params)

    def to_nni_search_space(self) -> dict[str, Any]:
        """Return this item as a dict in NNI's JSON notation.

        >>> TunableItemCfg('choice', _is_nested=True, _value={'dense': {}}).to_nni_search_space()
        {'_type': 'choice', '_value': [{'_name': 'dense'}]}
        """
        if self.options is None:
            return {"_type": self._type, "_value": thaw(self._value)}
        named = [{_NAME: name, **to_nni_search_space(params)} for name, params in self.options.items()]
        return {"_type": self._type, "_value": named}

    @classmethod
    def from_nni_search_space(cls, data: Mapping[str, Any]) -> TunableItemCfg:
        """Read one item back from NNI's notation; :func:`from_nni_search_space` reads joint spaces too."""
        found = from_nni_search_space(data)
        if not isinstance(found, TunableItemCfg):
            given = f"a mapping of the parameters {', '.join(found) or '(none)'}"
            fix = "read it with sparta.common.tuning.from_nni_search_space"
            raise ValueRangeError(message(given, "one item with _type and _value", fix))
        return found

    def to_json(self) -> str:
        """Return this item as JSON text in NNI's notation."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> TunableItemCfg:
        """Read one item back from JSON text."""
        return cls.from_nni_search_space(_loads(text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TunableItemCfg) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only mapping cannot be pickled or deep-copied; what it was made from can.
        plain = self._value if self.options is None else {name: dict(p) for name, p in self.options.items()}
        return (TunableItemCfg, (self._type, plain, self._is_nested))

    def __str__(self) -> str:
        return self.to_json()


Space = TunableItemCfg | Mapping[str, TunableItemCfg]


def walk(space: Space, pick: Pick, path: str = "") -> Sample:
    """Return the sample made by calling ``pick(path, item)`` at every node from the root on.

    Parameters
    ----------
    pick
        Returns a value of ``item.domain``; for a nested choice that is the name of an alternative, and only that
        alternative's parameters are visited.

    Examples
    --------
    >>> tile = TunableItemCfg('choice', _value=[16, 32])
    >>> space = TunableItemCfg('choice', _is_nested=True, _value={'block': {'tile': tile}})
    >>> paths = []
    >>> walk(space, lambda path, item: paths.append(path) or item.domain.middle), paths
    ({'_name': 'block', 'tile': 16}, ['/_name', '/block/tile'])
    """
    if isinstance(space, Mapping):
        return {name: walk(item, pick, _join(path, name)) for name, item in space.items()}
    if space.options is None:
        return pick(path or "/_value", space)
    name = cast("str", pick(f"{path}/{_NAME}", space))
    return {_NAME: name, **walk(space.options[name], pick, _join(path, name))}


def coordinates(space: Space, sample: Sample, path: str = "") -> dict[str, Scalar]:
    """Return the pick at every path that :func:`walk` visits to make `sample`.

    Raises
    ------
    ValueRangeError, NameNotFoundError, ShapeError
        If the sample does not lie in the space; the message names the parameter.

    Examples
    --------
    >>> coordinates({'tile': TunableItemCfg('choice', _value=[16, 32])}, {'tile': 32})
    {'/tile': 32}
    """
    if isinstance(space, Mapping):
        _check_names(space, sample, path or "the sample")
        found: dict[str, Scalar] = {}
        for name, item in space.items():
            found |= coordinates(item, sample[name], _join(path, name))
        return found
    here = path or "/_value"
    if space.options is None:
        return {here: _matched(space, sample, here)}
    here = f"{path}/{_NAME}"
    if not isinstance(sample, Mapping) or _NAME not in sample:
        given = f"{here} is missing in {sample!r}"
        raise ShapeError(message(given, f"a mapping in which {_NAME!r} is {space.domain}"))
    name = cast("str", _matched(space, sample[_NAME], here))
    params = {key: value for key, value in sample.items() if key != _NAME}
    return {here: name} | coordinates(space.options[name], params, _join(path, name))


def key_of(found: Mapping[str, Scalar]) -> frozenset[tuple[str, object]]:
    """Return a hashable key of a sample's :func:`coordinates`: equal keys, equal samples.

    >>> key_of({'/tile': 1}) == key_of({'/tile': 1.0}), key_of({'/tile': 1}) == key_of({'/tile': True})
    (True, False)
    """
    return frozenset((path, identity(value)) for path, value in found.items())


def normalize(space: Space, sample: Sample) -> Sample:
    """Return `sample` as the space itself writes it (tuples for lists, its own order), or raise saying what is wrong.

    >>> normalize({'tile': TunableItemCfg('choice', _value=[(8, 8), (16, 16)])}, {'tile': [16, 16]})
    {'tile': (16, 16)}
    """
    found = coordinates(space, sample)
    return walk(space, lambda path, _: found[path])


def includes(space: Space, sample: Sample) -> bool:
    """Tell whether a sample lies in a space.

    >>> includes({'tile': TunableItemCfg('choice', _value=[16, 32])}, {'tile': 64})
    False
    """
    try:
        coordinates(space, sample)
    except SpartaError:
        return False
    return True


def size_of(space: Space) -> int | None:
    """Return how many samples a space has, or None when a range in it is continuous.

    >>> size_of({'a': TunableItemCfg('randint', [0, 10]), 'b': TunableItemCfg('choice', ['x', 'y'])})
    20
    """
    if isinstance(space, Mapping):
        factors = [size_of(item) for item in space.values()]
        return None if None in factors else math.prod(cast("list[int]", factors))
    if space.options is None:
        return space.domain.count
    terms = [size_of(params) for params in space.options.values()]
    return None if None in terms else sum(cast("list[int]", terms))


def sample_at(space: Space, index: int) -> Sample:
    """Return the sample at a position of :func:`samples_of`, without making the others.

    >>> sample_at({'a': TunableItemCfg('randint', [0, 10**9]), 'b': TunableItemCfg('choice', ['x', 'y'])}, 123456789)
    {'a': 61728394, 'b': 'y'}
    """
    size = _finite_size(space)
    if not 0 <= index < size:
        raise ValueRangeError(message(f"position {index} of a space of {size} samples", f"0 to {size - 1}"))
    return _at(space, index)


def samples_of(space: Space) -> Iterator[Sample]:
    """Iterate over all samples of a finite space, the last parameter fastest.

    >>> list(samples_of({'a': TunableItemCfg('choice', [1, 2]), 'b': TunableItemCfg('choice', ['x', 'y'])}))
    [{'a': 1, 'b': 'x'}, {'a': 1, 'b': 'y'}, {'a': 2, 'b': 'x'}, {'a': 2, 'b': 'y'}]
    """
    return (_at(space, index) for index in range(_finite_size(space)))


def default_of(space: Space) -> Sample:
    """Return the sample to use before anything is known: first choices, low ends, centres of continuous ranges.

    >>> default_of({'tile': TunableItemCfg('choice', _value=[16, 32]), 'rate': TunableItemCfg('uniform', [0, 1])})
    {'tile': 16, 'rate': 0.5}
    """
    return walk(space, lambda _, item: item.domain.middle)


def draw(space: Space, rng: random.Random) -> Sample:
    """Return a random sample: even at every pick, so that a small alternative is as likely as a large one.

    >>> draw({'tile': TunableItemCfg('choice', _value=[16])}, random.Random(0))
    {'tile': 16}
    """
    return walk(space, lambda _, item: item.domain.draw(rng))


def mutate(space: Space, sample: Sample, rng: random.Random) -> Sample:
    """Return `sample` with one pick changed; if that opens another alternative, its parameters are drawn again.

    A sample of which no pick could differ is returned as it is.

    >>> mutate({'tile': TunableItemCfg('choice', [16, 32])}, {'tile': 16}, random.Random(0))
    {'tile': 32}
    """
    old = coordinates(space, sample)
    changeable: list[str] = []

    def note(path: str, item: TunableItemCfg) -> Scalar:
        if item.domain.count != 1:
            changeable.append(path)
        return old[path]

    walk(space, note)
    if not changeable:
        return sample
    target = rng.choice(changeable)

    def pick(path: str, item: TunableItemCfg) -> Scalar:
        if path == target:
            return _different(item.domain, old[path], rng)
        return old[path] if path in old else item.domain.draw(rng)

    return walk(space, pick)


def to_nni_search_space(space: Space) -> dict[str, Any]:
    """Return a space as a dict in NNI's JSON notation.

    >>> to_nni_search_space({'a': TunableItemCfg('uniform', [0.0, 1.0])})
    {'a': {'_type': 'uniform', '_value': [0.0, 1.0]}}
    """
    if isinstance(space, TunableItemCfg):
        return space.to_nni_search_space()
    return {name: item.to_nni_search_space() for name, item in space.items()}


def from_nni_search_space(data: Mapping[str, Any]) -> Space:
    """Read a space from NNI's JSON notation: one item if it has ``_type``, otherwise a dict of them.

    >>> print(from_nni_search_space({'_type': 'choice', '_value': [{'_name': 'dense'}]}))
    {"_type": "choice", "_value": [{"_name": "dense"}]}
    """
    if not isinstance(data, Mapping):
        raise ShapeError(message(f"a search space is {data!r}", "a mapping in NNI's notation"))
    if "_type" not in data:
        return checked({name: TunableItemCfg.from_nni_search_space(item) for name, item in data.items()})
    unknown = set(data) - {"_type", "_value"}
    if unknown or "_value" not in data:
        given = f"an item with the keys {', '.join(sorted(map(str, data)))}"
        raise ShapeError(message(given, "_type and _value"))
    kind, value = data["_type"], data["_value"]
    if kind != "choice" or not isinstance(value, list | tuple) or not any(isinstance(v, Mapping) for v in value):
        return TunableItemCfg(kind, value)
    options: dict[str, Any] = {}
    for option in value:
        name = option.get(_NAME) if isinstance(option, Mapping) else None
        if not isinstance(name, str) or name in options:
            what = f"{option!r} in a nested choice"
            raise ShapeError(message(what, f"mappings that each have a {_NAME!r} of their own"))
        options[name] = from_nni_search_space({key: item for key, item in option.items() if key != _NAME})
    return TunableItemCfg("choice", options, _is_nested=True)


def to_json(space: Space) -> str:
    """Return a space as JSON text in NNI's notation.

    >>> to_json({'tile': TunableItemCfg('choice', _value=[(8, 8)])})
    '{"tile": {"_type": "choice", "_value": [[8, 8]]}}'
    """
    return json.dumps(to_nni_search_space(space))


def from_json(text: str) -> Space:
    """Read a space from JSON text in NNI's notation.

    >>> from_json('{"tile": {"_type": "choice", "_value": [16, 32]}}')["tile"].size()
    2
    """
    return from_nni_search_space(_loads(text))


def checked(space: object) -> Space:
    """Return a space after checking that it is an item or a mapping of items with usable names.

    >>> checked({'tile': [16, 32]})
    Traceback (most recent call last):
    sparta.errors.ShapeError: the parameter 'tile' of a joint search space is [16, 32]; allowed: a TunableItemCfg; ...
    """
    if isinstance(space, TunableItemCfg):
        return space
    return dict(_checked_params(space, "a joint search space"))


def _checked_options(kind: object, value: object) -> Mapping[str, Mapping[str, TunableItemCfg]]:
    if kind != "choice":
        raise ValueRangeError(message(f"a nested {kind}", "_is_nested=True with the type 'choice' only"))
    if not isinstance(value, Mapping):
        given = f"the _value of a nested choice is {value!r}"
        raise ShapeError(message(given, "a mapping from alternative to its parameters", "pass {} for no parameters"))
    for name in value:
        if not isinstance(name, str) or not name:
            raise ValueRangeError(message(f"an alternative is named {name!r}", "a string that is not empty"))
    return MappingProxyType({n: _checked_params(params, f"the alternative {n!r}") for n, params in value.items()})


def _checked_params(params: object, what: str) -> Mapping[str, TunableItemCfg]:
    if not isinstance(params, Mapping):
        fix = "pass {} for an alternative without parameters"
        raise ShapeError(message(f"{what} is {params!r}", "a mapping from parameter name to TunableItemCfg", fix))
    for name, item in params.items():
        if not isinstance(name, str) or not name or name in _RESERVED:
            allowed = f"a string that is not empty and not {', '.join(sorted(_RESERVED))}"
            raise ValueRangeError(message(f"a parameter of {what} is named {name!r}", allowed))
        if not isinstance(item, TunableItemCfg):
            given = f"the parameter {name!r} of {what} is {item!r}"
            raise ShapeError(message(given, "a TunableItemCfg", "write TunableItemCfg('choice', _value=[...])"))
    return MappingProxyType(dict(params))


def _check_names(params: Mapping[str, TunableItemCfg], sample: object, where: str) -> None:
    if not isinstance(sample, Mapping):
        raise ShapeError(message(f"{where} is {sample!r}", f"a mapping of {', '.join(params) or 'no parameters'}"))
    for name in sample:
        if name not in params:
            raise NameNotFoundError(did_you_mean(str(name), params, f"parameter of {where}"))
    if missing := [name for name in params if name not in sample]:
        raise ShapeError(message(f"{where} has no {', '.join(missing)}", f"all of {', '.join(params)}"))


def _matched(item: TunableItemCfg, value: object, where: str) -> Scalar:
    try:
        return item.domain.match(value)
    except LookupError:
        raise ValueRangeError(message(f"{where} is {value!r}", str(item.domain))) from None


def _different(domain: Domain, value: Scalar, rng: random.Random) -> Scalar:
    """Return a random value of a domain other than `value`."""
    if domain.count is None:
        return domain.draw(rng)
    # One position fewer is drawn from; the last one stands in where the old value is met, so all others are as likely.
    candidate = domain.at(rng.randrange(domain.count - 1))
    return domain.at(domain.count - 1) if identity(candidate) == identity(value) else candidate


def _at(space: Space, index: int) -> Sample:
    if isinstance(space, Mapping):
        digits: dict[str, Sample] = {}
        for name in reversed(list(space)):
            index, digit = divmod(index, _finite_size(space[name]))
            digits[name] = _at(space[name], digit)
        return {name: digits[name] for name in space}
    if space.options is None:
        return space.domain.at(index)
    sizes = [_finite_size(params) for params in space.options.values()]
    starts = list(accumulate(sizes, initial=0))
    chosen = bisect_right(starts, index) - 1
    name, params = list(space.options.items())[chosen]
    return {_NAME: name, **_at(params, index - starts[chosen])}


def _finite_size(space: Space) -> int:
    size = size_of(space)
    if size is None:
        raise ValueRangeError(
            message(
                "a space with a continuous range cannot be listed",
                "finite spaces",
                "use quniform instead of uniform, or search it with 'rand', 'tpe' or 'evolution'",
            )
        )
    return size


def _join(path: str, name: str) -> str:
    """Return the path of a child; a slash in its name is escaped, so that different nodes never share a path."""
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueRangeError(message(f"a search space is not JSON: {error}", "JSON text in NNI's notation")) from error
