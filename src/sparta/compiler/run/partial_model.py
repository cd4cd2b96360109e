"""The partly compiled model: the user's own code, with compiled models in the places of some of its modules.

Some models cannot be captured as one graph: their path depends on values, they keep state, or they call what torch
cannot trace. Their modules mostly can. Everything else of such a model runs as it was written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from sparta.compiler.report import Report
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.errors import ValueRangeError, message
from sparta.signing import SigningKey
from sparta.tesa.spec import Spec

__all__ = ["PartialModel"]


class PartialModel(nn.Module):
    """A model that :func:`sparta.compile` compiled in part.

    Parameters
    ----------
    model
        A copy of the user's model with compiled modules inside.
    names
        Where these are.
    report
        What runs each layer, and why the whole could not be compiled.
    spec, provenance
        As those of a :class:`CompiledModel`.
    """

    def __init__(
        self,
        model: nn.Module,
        names: tuple[str, ...],
        report: Report,
        spec: Spec,
        provenance: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.report = report
        self.spec = spec
        self.provenance = dict(provenance)
        super().train(mode=False)

    @property
    def parts(self) -> dict[str, CompiledModel]:
        """The compiled modules by their names in the model."""
        found = {name: self.model.get_submodule(name) for name in self.names}
        return {name: part for name, part in found.items() if isinstance(part, CompiledModel)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original model returns for these arguments, without gradients."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def tune(self, *args: Any, **kwargs: Any) -> Report:
        """Choose kernels for the sizes that the compiled modules see in a call with these arguments."""
        calls: list[tuple[CompiledModel, tuple[Any, ...], dict[str, Any]]] = []
        hooks = [
            part.register_forward_pre_hook(lambda m, a, k: calls.append((m, a, k)), with_kwargs=True)
            for part in self.parts.values()
        ]
        try:
            self(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        for part, given, named in calls:
            CompiledModel.tune(part, *given, **named)
        return self.report

    def save(self, path: str | os.PathLike[str], *, sign: SigningKey | str | os.PathLike[str] | None = None) -> None:
        """Write the compiled modules and all other tensors to one file; ``sparta.load(path, model=...)`` reads it.

        A file cannot hold a model's code, so loading needs the model. With `sign`, a key or its file, the signature of
        all its bytes is written to ``PATH.minisig`` (:mod:`sparta.signing`).
        """
        from sparta.compiler.artifact import save_parts

        save_parts(self, path, sign)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - PyTorch's protocol
        """Raise for training mode: kernels hold fixed weights."""
        if mode:
            raise ValueRangeError(
                message("a compiled model in training mode", "inference", "train the original and compile it again")
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        """Say what runs."""
        return self.report.plan.whole.reason
