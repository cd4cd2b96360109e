"""Joint spaces: kernels whose parameters must agree are tuned as one.

The forward and backward kernels of an operator, or the three of an attention, read and write one sparse layout, so
their block sizes are one decision. The one idea to know: :func:`share` takes such a parameter out of every kernel's own
space and puts it once into the joint one; :meth:`JointSpace.split` hands its value back to each kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparta.common.domains import Choices
from sparta.common.space import Sample, Space, TunableItemCfg, checked, normalize
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError, did_you_mean, message

__all__ = ["JointSpace", "share"]


@dataclass(frozen=True)
class JointSpace:
    """The space of several kernels that share parameters; made by :func:`share`.

    Attributes
    ----------
    space
        What to search: each shared parameter under its name, ``kernel/parameter`` for each parameter that a kernel has
        to itself, and ``kernel`` for what is left of a kernel whose space is a nested choice.
    kernels
        The spaces that were given.
    shared
        For each kernel, the shared name of each of its parameters that is shared.
    """

    space: dict[str, TunableItemCfg]
    kernels: dict[str, Space]
    shared: dict[str, dict[str, str]]

    def split(self, sample: Sample) -> dict[str, Sample]:
        """Return each kernel's own sample of a sample of the joint space."""
        joint = normalize(self.space, sample)
        return {kernel: self._sample_of(kernel, joint) for kernel in self.kernels}

    def _sample_of(self, kernel: str, joint: Mapping[str, Any]) -> Sample:
        space, shared = self.kernels[kernel], self.shared[kernel]
        if isinstance(space, Mapping):
            return {name: joint[shared.get(name) or f"{kernel}/{name}"] for name in space}
        if space.options is None:
            return joint[kernel]
        own = joint[kernel]
        params = space.options[own["_name"]]
        return {"_name": own["_name"]} | {n: joint[shared[n]] if n in shared else own[n] for n in params}


def share(spaces: Mapping[str, Space], shared: Mapping[str, Sequence[str]]) -> JointSpace:
    """Return the joint space of several kernels in which some of their parameters are one.

    Parameters
    ----------
    spaces
        The space of each kernel.
    shared
        For each shared parameter, ``"kernel/parameter"`` of all that it stands for. If the kernel's space is a nested
        choice, the parameter of that name in every alternative is meant; alternatives without it are not bound. A
        shared choice has the values that all of them allow; shared ranges must be equal.

    Examples
    --------
    >>> def choice(*values): return TunableItemCfg('choice', _value=values)
    >>> joint = share(
    ...     {'forward': {'BM': choice(16, 32, 64), 'warps': choice(4)}, 'backward': {'BK': choice(32, 64, 128)}},
    ...     {'block': ['forward/BM', 'backward/BK']},
    ... )
    >>> joint.space['block'].domain.values
    (32, 64)
    >>> joint.split({'block': 64, 'forward/warps': 4})
    {'forward': {'BM': 64, 'warps': 4}, 'backward': {'BK': 64}}
    """
    kernels = {kernel: checked(space) for kernel, space in spaces.items()}
    names: dict[str, dict[str, str]] = {kernel: {} for kernel in kernels}
    joint: dict[str, TunableItemCfg] = {}
    for shared_name, members in shared.items():
        items: list[TunableItemCfg] = []
        for member in members:
            kernel, parameter = _kernel_and_parameter(member, kernels)
            if parameter in names[kernel]:
                given = f"{member!r} is shared as {names[kernel][parameter]!r} and as {shared_name!r}"
                raise ValueRangeError(message(given, "one shared name for a parameter"))
            names[kernel][parameter] = shared_name
            items += _items_named(kernels[kernel], parameter, member)
        _add(joint, shared_name, _common(items, shared_name))
    for kernel, space in kernels.items():
        own = _without(space, names[kernel])
        if isinstance(own, TunableItemCfg):
            _add(joint, kernel, own)
        else:
            for parameter, item in own.items():
                _add(joint, f"{kernel}/{parameter}", item)
    checked(joint)
    return JointSpace(joint, kernels, names)


def _kernel_and_parameter(member: str, kernels: Mapping[str, Space]) -> tuple[str, str]:
    """Split ``kernel/parameter``; both may have slashes of their own, so the longest kernel that fits is meant."""
    for kernel in sorted(kernels, key=len, reverse=True):
        if member.startswith(f"{kernel}/"):
            return kernel, member.removeprefix(f"{kernel}/")
    raise NameNotFoundError(did_you_mean(member.rpartition("/")[0] or member, kernels, "kernel"))


def _items_named(space: Space, parameter: str, member: str) -> list[TunableItemCfg]:
    """Return the items of that name: one of a mapping, one of each alternative of a nested choice that has it."""
    if isinstance(space, Mapping):
        groups = [space]
    elif space.options is not None:
        groups = list(space.options.values())
    else:
        raise ShapeError(
            message(f"{member!r} of a kernel that is one plain parameter", "kernels with named parameters")
        )
    found = [group[parameter] for group in groups if parameter in group]
    if not found:
        known = {name for group in groups for name in group}
        raise NameNotFoundError(did_you_mean(parameter, known, f"parameter for {member!r}, a parameter"))
    return found


def _common(items: Sequence[TunableItemCfg], shared_name: str) -> TunableItemCfg:
    """Return the item that allows what all of `items` allow."""
    if not items:
        raise ValueRangeError(message(f"{shared_name!r} stands for no parameter", "one 'kernel/parameter' or more"))
    domains = [item.domain for item in items if item.options is None and isinstance(item.domain, Choices)]
    if len(domains) == len(items):
        values = [value for value in domains[0].values if all(_allows(domain, value) for domain in domains)]
        if not values:
            given = f"the parameters shared as {shared_name!r} have no value in common: " + "; ".join(map(str, domains))
            raise ValueRangeError(message(given, fix="give them one, or do not share them"))
        return TunableItemCfg("choice", values)
    if any(item != items[0] for item in items):
        given = f"the parameters shared as {shared_name!r} differ: " + "; ".join(map(str, items))
        raise ValueRangeError(message(given, "choices, or equal items of another type"))
    return items[0]


def _allows(domain: Choices, value: object) -> bool:
    try:
        domain.match(value)
    except LookupError:
        return False
    return True


def _without(space: Space, names: Mapping[str, str]) -> Space:
    """Return a space without the parameters of these names."""
    if isinstance(space, Mapping):
        return {name: item for name, item in space.items() if name not in names}
    if space.options is None or not names:
        return space
    options = {option: _without(params, names) for option, params in space.options.items()}
    return TunableItemCfg("choice", options, _is_nested=True)


def _add(joint: dict[str, TunableItemCfg], name: str, item: TunableItemCfg) -> None:
    if name in joint:
        raise ValueRangeError(message(f"two parameters of the joint space are named {name!r}", "names of their own"))
    joint[name] = item
