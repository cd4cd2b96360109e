"""The spec: which tensor of a model has which TeSA. What a user writes, and what propagation completes.

A spec is an immutable mapping from tensor name to :class:`~sparta.tesa.attribute.TeSA`. Names are resolved against a
model only when the spec meets one (`apply`, `check`, `resolve`), so that a spec may hold globs, and the same spec fits
a model before and after DDP, FSDP or `torch.compile` wrapped it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparta.errors import CheckError, NameNotFoundError, ShapeError, ValueRangeError, message
from sparta.files import Budget, load_tensors, reading, save_tensors
from sparta.tables import table
from sparta.tesa import names
from sparta.tesa.attribute import TeSA
from sparta.tesa.patterns import Pattern, as_pattern
from sparta.tesa.prunable import prunable
from sparta.tesa.state import from_state, to_state

__all__ = ["Spec", "prunable"]

_KIND, _VERSION = "spec", 1


class Spec(Mapping[str, TeSA]):
    """An immutable mapping from tensor name to TeSA.

    Keys are parameter names as ``model.named_parameters()`` has them, globs, or ``"re:"`` and a regular expression.

    Examples
    --------
    >>> from sparta.tesa.patterns import NM
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> spec = Spec.from_pattern(model, NM(2, 4))
    >>> spec.apply(model)
    >>> Spec.from_zeros(model)["0.weight"].density
    0.5
    >>> spec.check(model)
    """

    def __init__(self, tesas: Mapping[str, TeSA] | None = None) -> None:
        self._tesas = dict(tesas or {})
        for name, tesa in self._tesas.items():
            if not isinstance(tesa, TeSA):
                raise ValueRangeError(
                    message(f"{name!r} is a {type(tesa).__name__}", "a TeSA", "wrap a mask in `TeSA.from_mask`")
                )

    # ------------------------------------------------------------------ making

    @classmethod
    def from_zeros(
        cls,
        model: nn.Module | Mapping[str, Tensor],
        *,
        include: Sequence[str] | str | None = None,
        ignore: Sequence[str] | str | None = None,
    ) -> Spec:
        """Read the zeros that are already in a model's weights.

        Parameters
        ----------
        model
            A module, or a state dict.
        include, ignore
            Names, globs or ``re:`` patterns. By default all floating-point tensors of two dims and more: a bias or
            a norm's shift that is still zero as initialised says nothing about sparsity.

        Returns
        -------
        Spec
            The tensors that have at least one zero.
        """
        tensors = _tensors_of(model)
        found: dict[str, TeSA] = {}
        seen: dict[int, TeSA | None] = {}  # a tied tensor is read once
        for name in names.select(tensors, include, ignore):
            tensor = tensors[name]
            if include is None and (tensor.dim() < 2 or not tensor.is_floating_point()):
                continue
            if id(tensor) not in seen:
                seen[id(tensor)] = _zeros_in(tensor)
            if (tesa := seen[id(tensor)]) is not None:
                found[names.canonical(name)] = tesa
        return cls(found)

    @classmethod
    def from_pattern(
        cls,
        model: nn.Module,
        pattern: Pattern | str,
        sparsity: float | None = None,
        *,
        include: Sequence[str] | str | None = None,
        ignore: Sequence[str] | str | None = None,
    ) -> Spec:
        """Prune by magnitude: in each weight keep the largest elements under `pattern`.

        Parameters
        ----------
        pattern
            A pattern, or its text form: ``"4x1"``, ``"2:4"``, ``"channel:0"``, ``"unstructured"``.
        sparsity
            Fraction of each weight to prune; N:M patterns have one of their own, and any other is an error.
        include, ignore
            Names, globs or ``re:`` patterns. By default the weights of linear, convolution and attention layers that
            no embedding shares. N:M goes along input channels, also in transposed convolutions, whose first dim they
            are.
        """
        pattern = as_pattern(pattern)
        sparsity = pattern.final_sparsity(sparsity)
        tensors, axes = _tensors_of(model), prunable(model)
        known = axes if include is None else tensors
        found: dict[str, TeSA] = {}
        for name in names.select(known, include, ignore):
            tensor = tensors[name].detach()
            try:
                tesa = TeSA.from_pattern(pattern.along(axes.get(name, 1)), tensor.abs(), sparsity)
            except ShapeError as error:
                raise ShapeError(f"{name}: {str(error).rstrip('.')}; or leave it out with ignore={name!r}.") from error
            found[names.canonical(name)] = tesa.with_format(tensor.dtype)
        return cls(found)

    # ------------------------------------------------------------------ meeting a model

    def resolve(self, model: nn.Module | Mapping[str, Tensor]) -> dict[str, TeSA]:
        """Return the TeSA of each tensor of `model` under the model's own names.

        A plain name beats a glob or regular expression that matches it too; two patterns that match one tensor join.
        Raises :class:`NameNotFoundError` for a name the model does not have, :class:`ShapeError` for a TeSA of
        another shape.
        """
        tensors = _tensors_of(model)
        found: dict[str, TeSA] = {}
        exact: set[str] = set()
        for key in sorted(self._tesas, key=names.is_name_pattern):
            for name in names.resolve(key, tensors):
                tesa = self._tesas[key]
                if tesa.shape != tuple(tensors[name].shape):
                    raise ShapeError(
                        message(
                            f"the TeSA of {key!r} is {tesa.shape}, but {name!r} is {tuple(tensors[name].shape)}",
                            "a TeSA of the tensor's shape",
                        )
                    )
                if not names.is_name_pattern(key):
                    exact.add(name)
                elif name in exact:
                    continue
                found[name] = found[name] | tesa if name in found else tesa
        return found

    def apply(self, model: nn.Module) -> None:
        """Put every constant of the spec (a pruned weight: 0) into the model's tensors, in place."""
        tensors = _tensors_of(model)
        with torch.no_grad():
            for name, tesa in self.resolve(model).items():
                tensors[name].copy_(tesa.apply(tensors[name]))

    def violations(self, model: nn.Module | Mapping[str, Tensor]) -> dict[str, int]:
        """Return the tensors that do not obey the spec, each with the number of elements that differ from it."""
        tensors = _tensors_of(model)
        counts = {name: tesa.violations(tensors[name]) for name, tesa in self.resolve(model).items()}
        return {name: count for name, count in counts.items() if count}

    def check(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        """Raise :class:`CheckError` unless every weight really obeys the spec."""
        wrong = self.violations(model)
        if wrong:
            listed = ", ".join(f"{name} ({count} elements)" for name, count in list(wrong.items())[:10])
            more = f" and {len(wrong) - 10} more tensors" if len(wrong) > 10 else ""
            raise CheckError(
                message(
                    f"weights that the spec prunes are not zero: {listed}{more}",
                    fix="call `spec.apply(model)`, or hold the masks while training",
                )
            )

    # ------------------------------------------------------------------ combining

    def __or__(self, other: Spec) -> Spec:
        """Return all that either spec knows; two different constants for one element are an error."""
        joined = dict(self._tesas)
        for name, tesa in other.items():
            if name in joined and (clash := joined[name].conflicts(tesa)):
                raise CheckError(
                    message(
                        f"the specs contradict each other on {clash} elements of {name!r}",
                        "one value per element",
                    )
                )
            joined[name] = joined[name] | tesa if name in joined else tesa
        return Spec(joined)

    def select(self, include: Sequence[str] | str | None = None, ignore: Sequence[str] | str | None = None) -> Spec:
        """Return the part of the spec whose names match."""
        return Spec({name: self._tesas[name] for name in names.select(self._tesas, include, ignore)})

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save as one safetensors file with a JSON header, atomically."""
        tensors, payload = {}, {}
        for name, tesa in self._tesas.items():
            arrays, payload[name] = to_state(tesa)
            tensors.update({f"{name}::{key}": array for key, array in arrays.items()})
        save_tensors(path, _KIND, _VERSION, tensors, {"tensors": payload, "order": list(self._tesas)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> Spec:
        """Load a saved spec; a truncated, edited or newer file is a :class:`FileFormatError`.

        Parameters
        ----------
        max_bytes
            How much memory a TeSA may take when it is printed or used; by default 64 times the file, 64 MiB at least.
        """
        tensors, payload = load_tensors(path, _KIND, _VERSION)
        with reading(path):
            budget = Budget.of_file(path, max_bytes)
            arrays: dict[str, dict[str, Tensor]] = {}
            for key, array in tensors.items():
                name, _, part = key.rpartition("::")
                arrays.setdefault(name, {})[part] = array
            order, metas = payload["order"], payload["tensors"]
            return cls({name: from_state(arrays.get(name, {}), metas[name], budget) for name in order})

    # ------------------------------------------------------------------ telling a person

    @property
    def density(self) -> float:
        """Live fraction over all tensors of the spec together (1.0 for an empty spec)."""
        total = sum(t.numel for t in self._tesas.values())
        return sum(t.count("live") for t in self._tesas.values()) / total if total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the table as data: for each tensor its shape, pattern, density and bits."""
        return {
            name: {
                "shape": list(tesa.shape),
                "pattern": tesa.describe_pattern(),
                "density": tesa.density,
                "bits": tesa.describe_bits(),
            }
            for name, tesa in self._tesas.items()
        }

    def table(self) -> str:
        """Return the spec as a table: one row per tensor."""
        rows: list[list[object]] = [
            [name, "×".join(map(str, row["shape"])), row["pattern"], f"{row['density']:.4f}", row["bits"]]
            for name, row in self.to_dict().items()
        ]
        rows.append([f"{len(self)} tensors", "", "", f"{self.density:.4f}", ""])
        return table(["tensor", "shape", "pattern", "density", "bits"], rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"<Spec of {len(self)} tensors, density {self.density:.4g}>"

    def __eq__(self, other: object) -> bool:
        return self._tesas == other._tesas if isinstance(other, Spec) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(sorted((name, tesa.digest) for name, tesa in self._tesas.items())))

    def __getitem__(self, name: str) -> TeSA:
        return self._tesas[names.resolve(name, self._tesas)[0]] if not names.is_name_pattern(name) else self._only(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tesas)

    def __len__(self) -> int:
        return len(self._tesas)

    def _only(self, pattern: str) -> TeSA:
        if pattern not in self._tesas:
            raise NameNotFoundError(message(f"{pattern!r} is a pattern", fix="use `spec.select` for several tensors"))
        return self._tesas[pattern]


def _zeros_in(tensor: Tensor) -> TeSA | None:
    """Return :meth:`TeSA.from_zeros` of a tensor, or None, which costs much less, where it has no zeros."""
    if tensor.is_meta:
        return TeSA.from_zeros(tensor)  # which says what is wrong with that
    live = tensor.detach() != 0
    if bool(live.all()):
        return None
    return TeSA.from_mask(live, format=tensor.dtype if tensor.dtype is not torch.bool else None)


def _tensors_of(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(model, nn.Module):
        found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        found.update(model.named_buffers(remove_duplicate=False))
        return found
    return dict(model)
