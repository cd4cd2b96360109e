"""The model as given, as what a compiled model runs: for models that no graph of theirs outruns.

It is a copy of the user's modules that reads the compiled graph's tensors, so that it costs no memory and does not
change when the user's model does. A file cannot hold a model's code; saved, copied or moved, the graph runs instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.compiler.copying import model_copy
from sparta.compiler.graph.signature import Signature

__all__ = ["GivenModel"]


class GivenModel:
    """A model as a function of flat inputs that returns flat outputs, like a graph of it.

    Parameters
    ----------
    model
        The user's; it is copied, in evaluation mode.
    tensors
        What its parameters and buffers of these names shall be.
    signature
        How it is called.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor], signature: Signature) -> None:
        shared: dict[int, Any] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in tensors:
                shared[id(parameter)] = nn.Parameter(tensors[name], requires_grad=False)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in tensors:
                shared[id(buffer)] = tensors[name]
        self.model, self._signature = model_copy(model, shared), signature

    def __call__(self, *leaves: Any) -> Any:
        """Return the flat outputs for flat inputs."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self._signature.in_spec)
        return pytree.tree_leaves(self.model(*args, **kwargs))

    def fast_path(self) -> Callable[[tuple[Any, ...]], Any] | None:
        """Return the short way: the model's own result for positional arguments; see :meth:`Signature.fast_path`."""
        return self._signature.fast_path(self.model, flat=False)
