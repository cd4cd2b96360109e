"""A recipe around a script: the script trains as it always does, and the recipe listens.

Nothing of the script is changed. While it runs, torch tells which modules compute, which loader is read and which
optimizer steps; at the first step of an optimizer the recipe is attached to it and to the module that owns its
parameters.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparta.errors import FileFormatError, SpartaError, ValueRangeError, message

if TYPE_CHECKING:
    from torch import nn

    from sparta.create import Manager, Recipe

__all__ = ["ScriptError", "Training", "check_script", "run_script"]


class ScriptError(Exception):
    """The script itself failed; the text is its traceback, without frames of ours."""


@dataclass(eq=False)
class Training:
    """What is known of a training under way.

    Parameters
    ----------
    recipe
        What is attached at the first step.
    steps_per_epoch
        Optimizer steps of an epoch; None takes the length of the loader that is read.
    accumulation
        Batches whose gradients are summed for one step.
    """

    recipe: Recipe
    steps_per_epoch: int | None = None
    accumulation: int = 1
    model: nn.Module | None = None
    manager: Manager | None = None
    _called: dict[int, nn.Module] = field(default_factory=dict)
    _length: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Listen to modules, loaders and optimizers; take everything away in the end."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader

        handles = [
            register_module_forward_pre_hook(lambda module, _inputs: self._saw(module)),
            register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: self._steps(optimizer)),
        ]
        started = DataLoader.__iter__

        def noted(loader: Any) -> Any:
            self._reads(loader)
            return started(loader)

        DataLoader.__iter__ = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            DataLoader.__iter__ = started  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()

    def _saw(self, module: nn.Module) -> None:
        if self.manager is None and module.training:
            self._called.setdefault(id(module), module)

    def _reads(self, loader: Any) -> None:
        if self.manager is None:
            try:
                self._length = len(loader)
            except TypeError:  # a stream
                self._length = None

    def _steps(self, optimizer: Any) -> None:
        """Attach the recipe at the first step of all."""
        if self.manager is not None:
            return
        from sparta import create

        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owned = [(sum(id(p) in trained for p in m.parameters()), m) for m in self._called.values()]
        most = max((count for count, _ in owned), default=0)
        if not most:
            given = "the optimizer steps, and no module that owns its parameters was called in training mode"
            raise ValueRangeError(message(given, fix="call model.train() and the model itself before the first step"))
        self.model = next(module for count, module in owned if count == most)  # the outermost is called first
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            if self._length is None:
                given = "nobody knows how many steps an epoch has: no DataLoader of known length is read"
                raise ValueRangeError(message(given, fix="pass --steps-per-epoch"))
            per_epoch = max(1, self._length // self.accumulation)
        self.manager, _ = create.initialize(self.model, optimizer, per_epoch, recipe=self.recipe)
        self._called.clear()


def check_script(script: Path) -> None:
    """Raise where a file is no Python script."""
    try:
        compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise FileFormatError(message(f"{script} is no Python script: {what}", fix="check the path")) from error


def run_script(script: Path, arguments: list[str]) -> None:
    """Run a script as Python would, with arguments of its own; its exit is not ours unless it failed."""
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ScriptError(f"the script ended with {error.code!r}") from error
    except (KeyboardInterrupt, SpartaError):
        raise
    except Exception as error:
        raise ScriptError(_own_traceback(error, str(script))) from error
    finally:
        sys.argv, sys.path[:] = before


def _own_traceback(error: Exception, script: str) -> str:
    """Return the traceback from the script's own first line on."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at or error.__traceback__)).rstrip()
