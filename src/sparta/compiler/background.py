"""Background tuning: sizes that a compiled model meets for the first time are tuned beside its calls, by one thread.

A call runs at once with what there is, and leaves a copy of its inputs; a few wait, further ones are not taken. What is
found is put in place while calls go on, and nothing is printed or raised.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparta.compiler.retune import tuned_at
from sparta.compiler.run.compiled_model import CompiledModel
from sparta.compiler.session import Session

__all__ = ["Background"]

_MOST_WAITING = 8  # copies of inputs that are held
_IDLE_SECONDS = 1.0


class Background:
    """What tunes the sizes of one model.

    Parameters
    ----------
    model
        It is not kept alive.
    seconds
        For each size.
    most
        Sizes in all.
    """

    def __init__(self, model: CompiledModel, seconds: float, most: int) -> None:
        self._model, self._seconds, self._left = weakref.ref(model), seconds, most
        self._seen: set[Any] = set()
        self._waiting: queue.Queue[list[Any]] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def see(self, leaves: Sequence[Any]) -> None:
        """Take in flat inputs of a size that nothing was measured for; those of sizes before are left alone."""
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
        with self._lock:
            if key in self._seen or self._left <= 0 or self._waiting.full():
                return
            self._seen.add(key)
            self._left -= 1
            self._waiting.put([leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="sparta tuning", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Return when all that was taken in is tuned."""
        self._waiting.join()

    def _work(self) -> None:
        while True:
            try:
                leaves = self._waiting.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._thread = None
                        return
                continue
            try:
                model = self._model()
                if model is not None:
                    tuned_at(model, leaves, Session(budget_s=self._seconds))
            except Exception:  # noqa: BLE001, S110 - what ran before goes on
                pass
            finally:
                del model
                self._waiting.task_done()


CompiledModel.in_background = Background
