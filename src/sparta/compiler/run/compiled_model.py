"""The compiled model: called like the original, saved to one file, honest about what it runs.

:class:`CompiledModel` holds the combined graph and its host. It is for inference: it runs without autograd, whatever
the mode around it, and refuses to be put into training mode instead of training something else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from sparta.compiler.graph.signature import NOT_EXACT, Signature
from sparta.compiler.report import Report
from sparta.compiler.run.cuda_graph import Graphed
from sparta.compiler.run.given import GivenModel
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.errors import FileFormatError, SpartaError, ValueRangeError, message
from sparta.tesa.spec import Spec

__all__ = ["CompiledModel"]


class CompiledModel(nn.Module):
    """A model compiled by :func:`sparta.compile`, or loaded by :func:`sparta.load`.

    Parameters
    ----------
    graph
        The combined graph: flat inputs, flat outputs.
    signature
        How the original is called.
    report
        What runs and why.
    spec
        The TeSAs that the compilation started from, by the original's tensor names.
    provenance
        Where and with what it was compiled.
    run
        The graph as its host runs it, where that was made already.
    source
        The file it was loaded from, if any: until it has run once, a failure may be the file's.

    Examples
    --------
    >>> from sparta.compiler import compile_model
    >>> fast = compile_model(nn.Linear(4, 2), torch.randn(3, 4), tune="off")
    >>> fast(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        signature: Signature,
        report: Report,
        spec: Spec,
        provenance: Mapping[str, Any],
        run: Callable[..., Any] | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__()
        self.graph = graph
        self.signature = signature
        self.report = report
        self.spec = spec
        self.provenance = dict(provenance)
        self._hosted = run
        self._unproven = source
        self._fast_path: Callable[[tuple[Any, ...]], Any] | None = None
        super().train(mode=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what :meth:`forward` returns: the short way for inputs as in the example, where nobody has put a hook.

        Most of what a small model takes beside its kernels is Python, and the more so the less of it is in the caches.
        """
        fast_path = self._fast_path
        if fast_path is not None and not kwargs and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            hooked = self._forward_pre_hooks or self._forward_hooks or _has_any_global_hook()  # type: ignore[no-untyped-call]
            if not hooked and (result := fast_path(args)) is not NOT_EXACT:
                return result
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original model returns for these arguments, without gradients."""
        signature = self.signature
        leaves = signature.flatten(args, kwargs)
        if not torch.is_grad_enabled():  # the usual case, without the cost of entering a context
            return signature.unflatten(self._run(leaves))
        with torch.no_grad():
            return signature.unflatten(self._run(leaves))

    def _run(self, leaves: list[Any]) -> Any:
        if torch.compiler.is_compiling():
            return self.graph(*leaves)
        if self._unproven is not None:
            return self._first_run(leaves, self._unproven)
        return self._run_hosted(leaves)

    def _first_run(self, leaves: list[Any], source: str) -> Any:
        """Run what was loaded from a file for the first time: no one has seen its graph run here."""
        try:
            result = self._run_hosted(leaves)
            self.signature.unflatten(result)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, SpartaError):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            given = f"{source} does not run on these inputs ({reason})"
            raise FileFormatError(message(given, fix="check their values; if they are right, save it again")) from error
        self._unproven = None
        return result

    def _run_hosted(self, leaves: list[Any]) -> Any:
        if self._hosted is None:
            self._hosted = hosted(self.graph, self.report.plan.whole.host)
        try:
            result = self._hosted(*leaves)
        except torch._dynamo.exc.TorchDynamoException as error:
            warnings.warn(
                f"Inductor does not run this model here ({str(error).strip().splitlines()[0]}); it runs eagerly",
                stacklevel=3,
            )
            self._hosted = hosted(self.graph, Host.EAGER)
            result = self._hosted(*leaves)
        if (
            self._fast_path is None and self.report.plan.whole.host is not Host.INDUCTOR
        ):  # which may have to compile again
            self._fast_path = self._fast_path_of(self._hosted)
        return result

    def _fast_path_of(self, run: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any] | None:
        """Return the short way through a host; a recorded graph has looked at its inputs' sizes already."""
        if isinstance(run, GivenModel):
            return run.fast_path()
        if isinstance(run, Graphed):
            return run.fast_path(self.signature.unflatten) if self.signature.flat else None
        return self.signature.fast_path(run)

    def _forget_host(self) -> None:
        """Let the host be made again at the next call: it may hold tensors that are replaced now."""
        self._hosted = self._fast_path = None

    @property
    def kernels(self) -> dict[str, KernelModule]:
        """The kernel modules of the graph, by name."""
        return {name: child for name, child in self.graph.named_modules() if isinstance(child, KernelModule)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file: graph, live weights, plan, spec, provenance and certificate; no pickle.

        The file is written whole or not at all; :func:`sparta.load` reads it back.
        """
        from sparta.compiler.artifact import save

        save(self, path)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights of the same masks, as :meth:`state_dict` returned them."""
        self._forget_host()
        return super().load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - PyTorch's protocol
        """Raise for training mode: kernels hold fixed weights."""
        if mode:
            raise ValueRangeError(
                message("a compiled model in training mode", "inference", "train the original and compile it again")
            )
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:  # noqa: FBT001, FBT002 - PyTorch's protocol
        before = self._float()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self._float()
        if before != after and after is not None:
            self.signature = self.signature.in_dtype(after)
        self._forget_host()
        return self

    def _float(self) -> torch.dtype | None:
        """Return the dtype of the model's floating-point tensors."""
        return next((t.dtype for t in self.graph.buffers() if t.is_floating_point()), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        from copy import deepcopy

        copy = CompiledModel(deepcopy(self.graph, memo), self.signature, self.report, self.spec, self.provenance)
        memo[id(self)] = copy
        return copy

    def __getstate__(self) -> dict[str, Any]:
        raise ValueRangeError(
            message("pickling a compiled model", "its own file format", "use save() and sparta.load()")
        )

    def extra_repr(self) -> str:
        """Say what runs."""
        return self.report.plan.whole.reason


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    seen = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors.values()}
    return sum(seen.values())
