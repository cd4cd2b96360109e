"""Stages: in which order layers are calibrated and pruned, and how data reaches each of them.

A chain of repeated blocks runs block by block: the inputs of the first are captured once, each block runs once to
calibrate and once more, pruned, to make the inputs of the next. Layers outside the chain, and models without one, are
calibrated by passes through the whole model, one per group of layers that share an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sparta.oneshot.calibrate import Stop, call
from sparta.oneshot.targets import Target

__all__ = ["Chain", "Stage", "find_chain", "order"]


Store = Callable[[Iterator[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers that are calibrated together; `block` is their block in a chain, None outside of it."""

    name: str
    targets: list[Target]
    block: int | None = None


@dataclass(eq=False)
class Chain:
    """Blocks of which each takes the output of the one before it, and what each was called with.

    Parameters
    ----------
    hidden
        The inputs of the block that is next, one per batch.
    calls
        By block and batch: the other arguments.
    store
        Keeps hidden states, in memory or elsewhere.
    keeping
        Holds a block while it is run on all batches.
    in_tuples
        Whether each block returns its hidden state in a tuple; None where a block returns anything else with it.
    """

    names: list[str]
    blocks: list[nn.Module]
    hidden: Sequence[Tensor] = field(default_factory=list)
    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=list)
    store: Store = list
    keeping: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    in_tuples: list[bool] | None = None

    position: int = 0

    def run(self, batch: int) -> Tensor:
        """Return the output of the next block on the inputs of a batch, which stay as they are."""
        args, kwargs = self.calls[self.position][batch]
        output: Tensor = _first(self.blocks[self.position](self.hidden[batch].clone(), *args, **kwargs))
        return output

    def advance(self) -> None:
        """Run the next block as it is now; its outputs become the inputs of the one after it."""
        with self.keeping(self.blocks[self.position]):
            self.hidden = self.store(self.run(batch) for batch in range(len(self.hidden)))
        self.position += 1

    def capture(self, model: nn.Module, batches: Sequence[Any]) -> bool:
        """Fill in what each block is called with; return whether the blocks really are a chain on every batch.

        Blocks that hand over nothing but their hidden state are not run for that: only the first one's input counts.
        """
        self.calls, self.position = [[] for _ in self.blocks], 0

        def inputs() -> Iterator[Tensor]:
            for index, batch in enumerate(batches):
                with nullcontext() if self.in_tuples is None else _skipping(self.blocks, self.in_tuples):
                    seen = _recorded(model, self.blocks, batch, index)
                if seen is None:
                    raise _NotAChainError
                for number, (args, kwargs) in enumerate(seen):
                    self.calls[number].append((args[1:], kwargs))
                yield seen[0][0][0]

        try:
            self.hidden = self.store(inputs())
        except _NotAChainError:
            return False
        return True


class _NotAChainError(Exception):
    """Blocks are called in another order, or with another input, than a chain is."""


def find_chain(model: nn.Module, targets: Sequence[Target], batch: Any) -> Chain | None:
    """Return the chain of blocks that holds most weights, checked on one batch; None when there is none."""
    owned = {id(target.module): target.parameter.numel() for target in targets}
    best: tuple[int, str, nn.Module] | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        weighing = [sum(owned.get(id(m), 0) for m in child.modules()) for child in module]
        if sum(1 for size in weighing if size) >= 2 and (best is None or sum(weighing) > best[0]):
            best = (sum(weighing), path, module)
    if best is None:
        return None
    _, path, container = best
    prefix = f"{path}." if path else ""
    chain = Chain([f"{prefix}{name}" for name, _ in container.named_children()], list(container.children()))
    if len(set(map(id, chain.blocks))) < len(chain.blocks):
        return None
    with _outputs(chain.blocks) as outputs:
        if not chain.capture(model, [batch]):
            return None
    if not any("forward" in vars(block) for block in chain.blocks):  # which others may have replaced
        alone = all(output is None or output == (None,) for output in outputs)
        chain.in_tuples = [output is not None for output in outputs] if alone else None
    return chain


def order(
    model: nn.Module, targets: Sequence[Target], batch: Any, chain: Chain | None
) -> tuple[list[Stage], list[Target]]:
    """Return the stages in the order in which the model runs them, and the layers that it never calls."""
    inside = {} if chain is None else {id(m): i for i, block in enumerate(chain.blocks) for m in block.modules()}
    calls: list[tuple[Target, Tensor]] = []
    with _listening([(t.module, _noting(calls, t)) for t in targets]):
        call(model, batch, 0)
    stages: list[Stage] = []
    at_block: dict[int, Stage] = {}
    by_input: dict[int, Stage] = {}
    placed: set[str] = set()
    for target, x in calls:
        if target.name in placed:
            continue
        placed.add(target.name)
        block = inside.get(id(target.module))
        if chain is not None and block is not None:
            stage = at_block.get(block) or Stage(chain.names[block], [], block)
            at_block[block] = stage
        else:
            stage = by_input.get(id(x)) or Stage(target.name.rpartition(".")[0], [])
            by_input[id(x)] = stage
        if not stage.targets:
            stages.append(stage)
        stage.targets.append(target)
    return stages, [target for target in targets if target.name not in placed]


def _noting(calls: list[tuple[Target, Tensor]], target: Target) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((target, args[0] if args else next(iter(kwargs.values()))))

    return hook


def _recorded(
    model: nn.Module, blocks: Sequence[nn.Module], batch: Any, index: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Return what each block is called with on a batch; None unless each takes the output of the one before it."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    order_of_calls: list[int] = []
    outputs: list[Any] = []
    linked = True

    def enter(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal linked
            order_of_calls.append(number)
            hidden = args[0] if args else None
            linked = linked and isinstance(hidden, Tensor) and (not outputs or hidden is outputs[-1])
            if not seen and isinstance(hidden, Tensor):
                args = (hidden.clone(), *args[1:])  # a block may change its input in place
            seen.append((args, kwargs))

        return hook

    def leave(number: int) -> Any:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            outputs.append(_first(output))
            if number == len(blocks) - 1:
                raise Stop

        return hook

    handles = [block.register_forward_hook(leave(i)) for i, block in enumerate(blocks)]
    try:
        with _listening([(block, enter(i)) for i, block in enumerate(blocks)]):
            call(model, batch, index)
    except Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
    is_chain = linked and order_of_calls == list(range(len(blocks))) and len(outputs) == len(blocks)
    return seen if is_chain and isinstance(outputs[-1], Tensor) else None


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output


@contextmanager
def _outputs(blocks: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Collect what blocks return, tensors replaced by nothing."""
    found: list[Any] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        found.append(type(output)([None] * len(output)) if type(output) in {tuple, list} else None)

    handles = [block.register_forward_hook(note) for block in blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _skipping(blocks: Sequence[nn.Module], in_tuples: Sequence[bool]) -> Iterator[None]:
    """Let blocks return their input as it is."""

    def unchanged(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden

    def wrapped(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
        return (hidden,)

    for block, in_tuple in zip(blocks, in_tuples, strict=True):
        block.forward = wrapped if in_tuple else unchanged
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["forward"]


@contextmanager
def _listening(hooks: Sequence[tuple[nn.Module, Any]]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
