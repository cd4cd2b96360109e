"""The compiled model: called like the original, saved to one file, honest about what it runs.

:class:`CompiledModel` holds the combined graph and its host. It is for inference: it runs without autograd, whatever
the mode around it, and refuses to be put into training mode instead of training something else.
"""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from sparta.compiler.graph.signature import NOT_EXACT, Signature
from sparta.compiler.report import Report
from sparta.compiler.run.by_size import BySize
from sparta.compiler.run.chain.chained import Chained
from sparta.compiler.run.cuda_graph import Graphed, on_cuda
from sparta.compiler.run.given import GivenModel
from sparta.compiler.run.host import Host, hosted
from sparta.compiler.run.kernel_module import KernelModule
from sparta.errors import FileFormatError, ShapeError, SpartaError, ValueRangeError, message
from sparta.modules import set_member
from sparta.signing import SigningKey
from sparta.tesa.spec import Spec

__all__ = ["CompiledModel"]

_MOST_TUNED = 1024


class CompiledModel(nn.Module):
    """A model compiled by :func:`sparta.compile`, or loaded by :func:`sparta.load`.

    Parameters
    ----------
    graph
        The combined graph: flat inputs, flat outputs; for the sizes of the example where there is a general one.
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
    general
        The graph for any other size, with the same tensors and kernels; None where `graph` is for all sizes.
    given
        The model as given, for sizes that no graph takes.

    Examples
    --------
    >>> from sparta.compiler import compile_model
    >>> fast = compile_model(nn.Linear(4, 2), torch.randn(3, 4), tune="off")
    >>> fast(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    # What chooses kernels for more sizes. `compiler.retune` puts it here, since what runs knows nothing of searching.
    search: ClassVar[Callable[..., None]]
    # What tunes sizes beside calls, put here by `compiler.background`.
    in_background: ClassVar[Callable[..., Any]]

    def __init__(  # noqa: PLR0913 - all that a compiled model is
        self,
        graph: fx.GraphModule,
        signature: Signature,
        report: Report,
        spec: Spec,
        provenance: Mapping[str, Any],
        run: Callable[..., Any] | None = None,
        source: str | None = None,
        *,
        general: fx.GraphModule | None = None,
        given: GivenModel | None = None,
    ) -> None:
        super().__init__()
        self.graph = graph
        # In a list, because its tensors and kernels are those of `graph`, and are not listed twice.
        self._general = [] if general is None else [general]
        self._given = given
        self._original: weakref.ref[nn.Module] | None = None
        self.signature = signature
        self.report = report
        self.spec = spec
        self.provenance = dict(provenance)
        self._hosted = run
        self._unproven = source
        self._fast_path: Callable[[tuple[Any, ...]], Any] | None = None
        self._decided: OrderedDict[Any, Callable[..., Any]] = OrderedDict()  # by the sizes that were tuned
        self._tuned: dict[Any, Callable[..., Any]] = {}  # the same by sizes and dtypes of positional arguments
        self.packed: dict[Any, Any] = {}  # what chains of all tuned sizes share
        self._unseen: Any = None  # what tunes sizes as they come
        self._other_sizes = self._by_size()
        super().train(mode=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what :meth:`forward` returns: the short way for inputs as in the example, where nobody has put a hook.

        Most of what a small model takes beside its kernels is Python, and the more so the less of it is in the caches.
        """
        fast_path, tuned = self._fast_path, self._tuned
        short = (fast_path is not None or tuned) and not kwargs and not torch.is_grad_enabled()
        if short and not torch.compiler.is_compiling():
            hooked = self._forward_pre_hooks or self._forward_hooks or _has_any_global_hook()  # type: ignore[no-untyped-call]
            if not hooked:
                if fast_path is not None and (result := fast_path(args)) is not NOT_EXACT:
                    return result
                if tuned and (run := tuned.get(_shapes_and_dtypes(args))) is not None:
                    return run(*args)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original model returns for these arguments, without gradients."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(*args, **kwargs)
        signature = self.signature
        try:
            leaves = signature.flatten(args, kwargs)
        except ShapeError:
            if self._given is None:
                raise
            return self._given.model(*args, **kwargs)
        return signature.unflatten(self._run(leaves))

    def _run(self, leaves: list[Any]) -> Any:
        if torch.compiler.is_compiling():
            return (self.graph if self.general is None or self._as_example(leaves) else self.general)(*leaves)
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
        if not self._as_example(leaves):
            return self._at_other_size(leaves)
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
        host = self.report.plan.whole.host
        if self._fast_path is None and (host.graphed or not host.compiles):  # which may have to compile again
            self._fast_path = self._fast_path_of(self._hosted)
        return result

    def _as_example(self, leaves: Sequence[Any]) -> bool:
        """Whether flat inputs have the sizes that `graph` is for."""
        sizes = self.signature.sizes
        if sizes is None or not sizes.dynamic:
            return True
        return all(shape is None or leaf.shape == shape for leaf, shape in zip(leaves, sizes.example, strict=True))

    @staticmethod
    def _shapes_of(leaves: Sequence[Any]) -> tuple[torch.Size | None, ...]:
        return tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves)

    def _at_other_size(self, leaves: list[Any]) -> Any:
        """Run the graph for any size, or the model as given where that does not take these sizes."""
        shapes = self._shapes_of(leaves)
        run = self._decided.get(shapes)
        if run is not None:
            return run(*leaves)
        run = self._other_sizes.get(shapes)
        if run is not None:
            self._tune_later(leaves)
            return run(*leaves)
        sizes = self.signature.sizes
        problem = "" if sizes is None else sizes.problem(shapes)
        if not problem:
            self._tune_later(leaves)
        if isinstance(self._hosted, GivenModel):
            return self._hosted(*leaves)
        if self.general is None or problem:
            if self._given is not None:
                return self._given(*leaves)
            given = f"inputs of {', '.join(str(tuple(shape)) for shape in shapes if shape is not None)} ({problem})"
            raise ShapeError(message(given, "sizes as those the model was compiled for", "compile it for these too"))
        return self._other_sizes.made(shapes)(*leaves)

    def _tune_later(self, leaves: Sequence[Any]) -> None:
        if self._unseen is not None and self.general is not None:
            self._unseen.see(leaves)

    def _by_size(self) -> BySize:
        module = self.general if self.general is not None else self.graph
        graphed = self.report.plan.whole.host.graphed and on_cuda(module)
        return BySize(self._general_run, record=graphed, module=module)

    def _general_run(self) -> Callable[..., Any]:
        """Return the graph for any size as its host runs it."""
        host = self.report.plan.whole.host  # what is recorded for each size is not compiled for it: that takes seconds
        plain = host if host in (Host.INDUCTOR, Host.CHAIN) else Host.EAGER
        return hosted(self.general if self.general is not None else self.graph, plain, any_size=True)

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
        self._decided, self._tuned, self.packed = OrderedDict(), {}, {}
        self._other_sizes = self._by_size()

    @property
    def general(self) -> fx.GraphModule | None:
        """The graph for any size, with the tensors and kernels of `graph`; None where only that is there."""
        return self._general[0] if self._general else None

    @property
    def kernels(self) -> dict[str, KernelModule]:
        """The kernel modules of the graphs, by name."""
        modules = [*self.graph.named_modules(), *(self.general.named_modules() if self.general is not None else ())]
        return {name: child for name, child in modules if isinstance(child, KernelModule)}

    @property
    def given(self) -> GivenModel | None:
        """The model as given, where it is kept: it runs at some size."""
        return self._hosted if isinstance(self._hosted, GivenModel) else self._given

    def remember(self, model: nn.Module) -> None:
        """Know the model that this was compiled from, for as long as others hold it: it competes where sizes are tuned.

        Whether it still computes the same is looked at then.
        """
        self._original = weakref.ref(model)

    def given_again(self, *, keep: bool) -> GivenModel | None:
        """Return the model as given; with the user's own tensors unless it is kept; None where it is not known."""
        original = None if self._original is None else self._original()
        if self.given is not None or original is None:
            return self.given
        tensors = {} if keep else {**dict(original.named_parameters()), **dict(original.named_buffers())}
        try:
            found = GivenModel(original, {name: t.detach() for name, t in tensors.items()}, self.signature)
        except Exception:  # noqa: BLE001 - whatever a module does when it is copied; graphs of it remain
            return None
        if keep:
            self._given = found
        return found

    def tune(
        self, *args: Any, tune: Literal["quick", "full", "off"] = "quick", budget_s: float | None = None, **kwargs: Any
    ) -> Report:
        """Choose kernels for the sizes of these arguments, and return the report with them.

        Other sizes than the example's run at once, with the kernels of the nearest size; this measures them. The
        choices are saved with the model.

        Parameters
        ----------
        args, kwargs
            As in a call of the model.
        tune, budget_s
            As in :func:`sparta.compile`.
        """
        leaves = self.signature.flatten(args, kwargs)
        shapes = self._shapes_of(leaves)
        sizes = self.signature.sizes
        if sizes is None or not sizes.problem(shapes):
            self.search(self, leaves, tune, budget_s)
        return self.report

    def tune_unseen(self, budget_s: float = 1.0, most: int = 64) -> Self:
        """Tune sizes that were not tuned as they come, in a thread beside the calls, and return the model.

        A call of a new size runs at once as before; what is found is used by later calls of that size. At most `most`
        sizes are tuned, for `budget_s` seconds each, and a few wait at a time. Nothing is printed or raised.

        Parameters
        ----------
        budget_s
            For each size.
        most
            Sizes in all; 0 stops it.
        """
        if not budget_s > 0 or not isinstance(most, int) or most < 0:
            given = f"budget_s={budget_s!r}, most={most!r}"
            raise ValueRangeError(message(given, "seconds above 0, and a number of sizes"))
        if on_cuda(self.graph):
            raise ValueRangeError(message("a model on CUDA", "one on the CPU", "call tune with the sizes instead"))
        self._unseen = self.in_background(self, budget_s, most) if most else None
        return self

    def use_general(self, graph: fx.GraphModule) -> None:
        """Run this graph at other sizes than the example's."""
        self._general = [graph]
        self._other_sizes = self._by_size()

    def decided_at(self, leaves: Sequence[Any]) -> Callable[..., Any] | None:
        """Return what runs at the sizes of these flat inputs by an earlier decision; None where there is none."""
        return self._hosted if self._as_example(leaves) else self._decided.get(self._shapes_of(leaves))

    def use_at(self, leaves: Sequence[Any], run: Callable[..., Any]) -> None:
        """Run this function of flat inputs at the sizes of these."""
        if not any(isinstance(each, Chained) for each in (run, self._hosted, *self._decided.values())):
            self.packed.clear()  # of candidates that lost
        if self._as_example(leaves):
            self._hosted, self._fast_path = run, None
            return
        if self._other_sizes.records:  # what is recorded there looks its kernels up by size, once
            self._other_sizes.made(self._shapes_of(leaves))
            return
        if len(self._decided) >= _MOST_TUNED:
            self._decided.popitem(last=False)
            self._tuned = {}
        self._decided[self._shapes_of(leaves)] = run
        if self.signature.flat and all(type(leaf) is Tensor for leaf in leaves):
            self._tuned[_shapes_and_dtypes(leaves)] = self.finished(run)

    def finished(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of flat inputs as one that returns what the model returns; for flat arguments."""
        if isinstance(run, GivenModel):
            return run.model
        build = self.signature.unflatten

        def call(*leaves: Any) -> Any:
            return build(run(*leaves))

        return call

    def save(self, path: str | os.PathLike[str], *, sign: SigningKey | str | os.PathLike[str] | None = None) -> None:
        """Write the model to one file: graph, live weights, plan, spec, provenance and certificate; no pickle.

        The file is written whole or not at all; :func:`sparta.load` reads it back. With `sign`, a key or its file, the
        signature of all its bytes is written to ``PATH.minisig`` (:mod:`sparta.signing`).
        """
        from sparta.compiler.artifact import save

        save(self, path, sign)

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
        if self.general is not None and self.general is not self.graph:
            shared = dict(self.graph.named_buffers())
            held = {id(t) for kernel in self.kernels.values() for t in kernel.buffers()}
            for name, tensor in list(self.general.named_buffers()):
                if id(tensor) not in held:
                    set_member(self.general, name, shared[name] if name in shared else fn(tensor))
        self._given = None
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

        graph, general = deepcopy(self.graph, memo), deepcopy(self.general, memo)
        copy = CompiledModel(graph, self.signature, self.report, self.spec, self.provenance, general=general)
        memo[id(self)] = copy
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle and `torch.save` keep: the bytes of the model's own file."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.sparta"
            self.save(file)
            return _from_bytes, (file.read_bytes(),)

    def extra_repr(self) -> str:
        """Say what runs."""
        return self.report.plan.whole.reason


def _shapes_and_dtypes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(leaf.shape, leaf.dtype) if type(leaf) is Tensor else None for leaf in leaves])


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    seen = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors.values()}
    return sum(seen.values())


def _from_bytes(file: bytes) -> Any:
    """Return a compiled model from the bytes of its file."""
    from sparta.compiler.artifact import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.sparta"
        path.write_bytes(file)
        return load(path)
