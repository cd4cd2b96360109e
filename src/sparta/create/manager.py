"""The manager: a list of modifiers, run from the steps of one optimizer.

It keeps the time, calls every modifier at its moments, and is what a script asks: how long to train, what is due when,
what was done. At each step the scheduled work of the present time comes first (step k works at epoch ``(k - 1) /
steps_per_epoch``), then the optimizer; what is due at the very end happens right after the last step.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparta.create.loop.clock import Clock
from sparta.create.loop.data import Kept
from sparta.create.loop.follow import Follower
from sparta.create.loop.optimizer import StepListener, bare_optimizer
from sparta.create.modifiers.base import KINDS, Modifier, Run
from sparta.create.modifiers.masked import MaskedModifier
from sparta.errors import SpartaError, ValueRangeError, message
from sparta.sparsify.logs import Logger, send, writer
from sparta.tesa.spec import Spec

if TYPE_CHECKING:
    from sparta.create.recipe.recipe import Recipe

__all__ = ["Manager"]

_VERSION = 1
_SLACK = 1e-6
_CHANGES_MODEL = frozenset({"pruning", "structured", "quantization", "training"})


class Manager:
    """Runs modifiers inside a training loop.

    Parameters
    ----------
    modifiers
        In the order of the recipe; or a :class:`~sparta.create.recipe.recipe.Recipe` that does not count in steps.
    recipe
        The recipe they come from, for printing and saving; made from the modifiers when it is not given.

    Examples
    --------
    >>> from sparta.create.modifiers import modifier_named
    >>> pruning = modifier_named("MagnitudePruning")(final_sparsity=0.75, end_epoch=2, update_frequency=0.5)
    >>> model = nn.Linear(8, 8)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> manager = Manager([pruning])
    >>> manager.attach(model, optimizer, steps_per_epoch=4)
    >>> for _ in range(manager.max_epochs * 4):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(2, 8)).square().sum().backward()
    ...     optimizer.step()
    >>> manager.epoch, manager.spec().density
    (2.0, 0.25)
    """

    def __init__(self, modifiers: Sequence[Modifier] | Recipe, recipe: Recipe | None = None) -> None:
        from sparta.create.recipe.recipe import Recipe as KnownRecipe

        if isinstance(modifiers, KnownRecipe):
            recipe, modifiers = recipe or modifiers, modifiers.modifiers()
        given: object = modifiers
        if not isinstance(given, Iterable) or isinstance(given, Tensor | str):
            raise ValueRangeError(message(f"modifiers of type {type(modifiers).__name__}", "a recipe, or modifiers"))
        self.modifiers = list(modifiers)
        for entry in self.modifiers:
            if not isinstance(entry, Modifier):
                raise ValueRangeError(message(f"a {type(entry).__name__} among the modifiers", "modifiers"))
        self._recipe = recipe
        self._run: Run | None = None
        self._clock = Clock(1)
        self._listener: StepListener | None = None
        self._finished: Spec | None = None
        self._asked: set[int] = set()
        self._followers: list[Follower] = []
        self.loggers: list[Logger] = []

    # ------------------------------------------------------------------ what is in it

    def iter_modifiers(self) -> Iterator[Modifier]:
        """Iterate over the modifiers in the order in which they run: those that end first come first."""
        ends = [(m.end_epoch if m.end_epoch >= 0 else math.inf, m.start_epoch, m.name) for m in self.modifiers]
        for place in sorted(range(len(ends)), key=lambda place: (ends[place], place)):
            yield self.modifiers[place]

    def of_kind(self, kind: str) -> list[Modifier]:
        """Return the modifiers of one kind, in the order of the recipe."""
        if kind not in KINDS:
            raise ValueRangeError(message(f"kind is {kind!r}", ", ".join(KINDS)))
        return [entry for entry in self.modifiers if entry.kind == kind]

    @property
    def epoch_modifiers(self) -> list[Modifier]:
        """Those that only say how long to train."""
        return self.of_kind("epoch")

    @property
    def learning_rate_modifiers(self) -> list[Modifier]:
        """Those that set the learning rate."""
        return self.of_kind("learning_rate")

    @property
    def pruning_modifiers(self) -> list[Modifier]:
        """Those that prune weights."""
        return self.of_kind("pruning")

    @property
    def quantization_modifiers(self) -> list[Modifier]:
        """Those that quantize; mixed precision can be left when the first of them starts."""
        return self.of_kind("quantization")

    @property
    def distillation_modifiers(self) -> list[Modifier]:
        """Those that change the loss."""
        return self.of_kind("distillation")

    @property
    def structured_modifiers(self) -> list[Modifier]:
        """Those that prune whole channels or layers."""
        return self.of_kind("structured")

    @property
    def max_epochs(self) -> int:
        """How long to train: the last start or end, rounded up; -1 when there is none."""
        moments = [moment for entry in self.modifiers for moment in entry.epochs() if moment >= 0]
        return math.ceil(max(moments) - _SLACK) if moments else -1

    @property
    def min_epochs(self) -> int:
        """The first start, rounded down; -1 when there is none."""
        starts = [entry.epochs()[0] for entry in self.modifiers if entry.epochs()[0] >= 0]
        return math.floor(min(starts) + _SLACK) if starts else -1

    def qat_active(self, epoch: float) -> bool:
        """Return whether quantization begins before the epoch after `epoch` does."""
        return any(entry.start_epoch < epoch + 1 for entry in self.quantization_modifiers)

    def phase(self, epoch: float) -> str | None:
        """Return what the model is at `epoch`: a checkpoint is comparable with others of the same phase.

        ``dense``, ``pruned``, ``dense_quantized``, ``pruned_quantized`` (pruned first), ``quantized_pruned``
        (quantized first); None while pruning is under way.
        """
        pruning = [*self.pruning_modifiers, *self.structured_modifiers]
        begun = [entry for entry in pruning if epoch >= entry.start_epoch]
        if any(0 <= epoch < entry.end_epoch for entry in begun):
            return None
        starts = [entry.start_epoch for entry in self.quantization_modifiers if epoch >= entry.start_epoch]
        if not starts:
            return "pruned" if begun else "dense"
        if not begun:
            return "dense_quantized"
        pruned_at = max(max(entry.start_epoch, entry.end_epoch) for entry in begun)
        return "pruned_quantized" if pruned_at <= min(starts) else "quantized_pruned"

    # ------------------------------------------------------------------ time

    @property
    def epoch(self) -> float:
        """The time in epochs: optimizer steps that really happened."""
        return self._clock.epoch

    @property
    def step(self) -> int:
        """How many optimizer steps were taken."""
        return self._clock.step

    @property
    def steps_per_epoch(self) -> int:
        """How many optimizer steps an epoch has."""
        return self._clock.steps_per_epoch

    @property
    def run(self) -> Run:
        """The training run it is attached to."""
        if self._run is None:
            raise ValueRangeError(message("the manager is attached to no training run", fix="call attach first"))
        return self._run

    # ------------------------------------------------------------------ the training loop

    def attach(
        self,
        model: nn.Module,
        optimizer: Any,
        steps_per_epoch: int,
        *,
        epoch: float = 0.0,
        **extras: Any,
    ) -> None:
        """Begin a run: check everything, then run from the optimizer's steps.

        Parameters
        ----------
        steps_per_epoch
            Optimizer steps of an epoch.
        epoch
            Where to begin, when a run is resumed without a state.
        extras
            Other fields of :class:`~sparta.create.modifiers.base.Run`.
        """
        if self._run is not None:
            raise ValueRangeError(message("the manager is attached to a run already", fix="make another manager"))
        self._clock = Clock(steps_per_epoch)
        self._clock.set_epoch(epoch)
        bare = bare_optimizer(optimizer)
        run = Run(model, bare, steps_per_epoch, self._clock.epoch, self._clock.step, self.log, **extras)
        listener = StepListener(bare, self._before_step, self._after_step)
        listener.listen_before()  # before the masks' own hooks: gradients are still whole
        begun: list[Modifier] = []
        try:
            for entry in self.iter_modifiers():
                entry.call_initialize(run)
                begun.append(entry)
        except BaseException:
            listener.stop()
            for entry in begun:
                entry.finalize(run)
            raise
        listener.listen_after()  # after the masks' own hooks: weights are zero again
        self._run, self._listener = run, listener

    def _before_step(self) -> None:
        run = self.run
        run.epoch, run.step = self._clock.epoch, self._clock.step
        for entry in self.iter_modifiers():
            entry.update_if_due(run)
        for entry in self.iter_modifiers():
            entry.before_step(run)

    def _after_step(self) -> None:
        run = self.run
        for entry in self.iter_modifiers():
            entry.after_step(run)
        self._clock.tick()
        run.epoch, run.step = self._clock.epoch, self._clock.step
        self._warn_of_idle()
        if self.epoch >= self.max_epochs - _SLACK:
            self._fire_ends()

    def _fire_ends(self) -> None:
        """Do what is due when training ends, without waiting for a step that will not come."""
        for entry in self.iter_modifiers():
            if entry.end_pending(self.run.epoch):
                entry.update_if_due(self.run)

    def loss_update(self, loss: Tensor, *, inputs: Any = None, outputs: Any = None) -> Tensor:
        """Return the loss to train with, as the distillation modifiers that are active make it.

        Parameters
        ----------
        loss
            The loss of the task.
        inputs, outputs
            Of the model in this step; by default what was captured of its last forward pass.
        """
        run = self.run
        for entry in self.distillation_modifiers:
            if entry.active(self.epoch):
                loss = entry.loss(run, loss, inputs, outputs)
        return loss

    def follow(self, copy: nn.Module) -> None:
        """Let a copy of the model have its zeros: an :class:`torch.optim.swa_utils.AveragedModel`, say.

        The present masks are on the copy whenever it computes or is saved, and for good after :meth:`finalize`.
        """
        masked = [entry for entry in self.modifiers if isinstance(entry, MaskedModifier)]
        shapes = {name: layer.shape for entry in masked for name, layer in entry.masks.layers.items()}

        def present() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for entry in masked:
                for name, kept in entry.held_masks().items():
                    found[name] = found[name] & kept if name in found else kept
            return found

        self._followers.append(Follower(copy, present, shapes))

    def finalize(self) -> None:
        """End the run: do what is due at its end, zero what is pruned, take all hooks away.

        The optimizer and the model are plain ones from then on. A run that stopped more than an epoch early stays as
        it is, with a warning of what was not reached.
        """
        if self._listener is None:
            return
        run = self.run
        last = self.max_epochs
        if self.epoch < last <= self.epoch + 1 + _SLACK:
            run.epoch = float(last)
            for entry in self.iter_modifiers():
                entry.update_if_due(run)
        self._fire_ends()
        self._warn_of_rest()
        self._warn_of_idle(at_end=True)
        self._listener.stop()
        self._listener = None
        self._finished = self.spec()
        for follower in self._followers:
            follower.stop()
        for entry in self.iter_modifiers():
            entry.finalize(run)

    def apply(self, model: nn.Module, **extras: Any) -> None:
        """Bring `model` to the state that the recipe ends with at once, without training.

        Parameters
        ----------
        extras
            Other fields of :class:`~sparta.create.modifiers.base.Run`, such as ``data`` or ``loss_closure``.
        """
        if self._run is not None:
            raise ValueRangeError(message("the manager is attached to a run already", fix="make another manager"))
        if isinstance(extras.get("data"), Iterator):  # several modifiers may read it
            extras["data"] = Kept(extras["data"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # never stepped: somewhere to write rates to
        run = Run(model, optimizer, epoch=math.inf, log=self.log, **extras)
        ordered = [entry for entry in self.iter_modifiers() if entry.kind in _CHANGES_MODEL]
        for entry in ordered:
            entry.call_initialize(run)
        for entry in ordered:
            entry.update_if_due(run)
        self._run = run
        self._finished = self.spec()
        for entry in ordered:
            entry.finalize(run)

    # ------------------------------------------------------------------ what it tells

    def spec(self) -> Spec:
        """Return what was done to the weights so far: zeros, and bits where they are quantized."""
        if self._finished is not None:
            return self._finished
        found = Spec()
        for entry in self.iter_modifiers():
            part = entry.spec(self.run)
            found = found if part is None else found | part
        return found

    def add_logger(self, logger: Logger) -> None:
        """Send records to a callable, a writer of a package or its name, or anything with ``log(dict)``.

        The names are ``"tensorboard"``, ``"wandb"`` and ``"mlflow"``; a :class:`~sparta.sparsify.logs.History` keeps
        the records for the curves of a report.
        """
        if isinstance(logger, str):
            logger = writer(logger)
        send(logger, {}, 0)
        self.loggers.append(logger)

    def log(self, record: dict[str, float]) -> None:
        """Send a record to all loggers, with the time."""
        for logger in self.loggers:
            send(logger, {"epoch": self.epoch, **record}, self.step)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the scheduled sparsity and learning rate over the epochs; needs matplotlib.

        Parameters
        ----------
        path
            Where to save the picture, if anywhere.

        Returns
        -------
        matplotlib.figure.Figure
        """
        from sparta.create.plot import plot_schedule

        return plot_schedule(self.modifiers, self.max_epochs, path)

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        if self._recipe is None:
            from sparta.create.recipe.recipe import Recipe

            self._recipe = Recipe.from_modifiers(self.modifiers)
        return self._recipe

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe, its variables intact, to a YAML file."""
        self.recipe.save(path)

    def __str__(self) -> str:
        return str(self.recipe)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything the rest of the run depends on, beside the model's and the optimizer's own states."""
        run = self.run
        return {
            "version": _VERSION,
            "step": self.step,
            "steps_per_epoch": self.steps_per_epoch,
            "modifiers": {self._key(place): entry.full_state() for place, entry in enumerate(self.modifiers)},
            "generator": run.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned, after :meth:`attach` with the same recipe.

        Load the model and the optimizer too, in any order. With another number of steps per epoch the time is kept in
        epochs.
        """
        _check_state(state)
        keys = {self._key(place): entry for place, entry in enumerate(self.modifiers)}
        if state["modifiers"].keys() != keys.keys():
            odd = sorted(map(str, state["modifiers"].keys() ^ keys.keys()))[:5]
            raise ValueRangeError(message(f"the state and the recipe differ in {odd}", "the state of the same recipe"))
        run = self.run
        try:
            run.generator.set_state(state["generator"].cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueRangeError(
                message(f"a generator's state that is none ({error})", "what state_dict returned")
            ) from error
        if state["steps_per_epoch"] == self.steps_per_epoch:
            self._clock.step = state["step"]
        else:
            self._clock.set_epoch(state["step"] / state["steps_per_epoch"])
        run.epoch, run.step = self._clock.epoch, self._clock.step
        for entry in self.iter_modifiers():
            place = next(place for place, other in enumerate(self.modifiers) if other is entry)
            try:
                entry.load_full_state(run, state["modifiers"][self._key(place)])
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, SpartaError):
                    raise
                given = f"the state of {entry.name} does not fit it ({type(error).__name__}: {error})"
                raise ValueRangeError(message(given, "what the same modifier saved on the same model")) from error

    def _key(self, place: int) -> str:
        return f"{place}.{self.modifiers[place].name}"

    # ------------------------------------------------------------------ warnings

    def _warn_of_idle(self, *, at_end: bool = False) -> None:
        """Warn once of a modifier that says it had no effect, when its first epoch is over or all is."""
        for entry in self.modifiers:
            begun = max(0.0, entry.start_epoch)
            due = self.epoch >= begun + 1 or (at_end and self.epoch > begun)
            if due and id(entry) not in self._asked:
                self._asked.add(id(entry))
                reason = entry.idle()
                if reason:
                    warnings.warn(reason, stacklevel=2)

    def _warn_of_rest(self) -> None:
        unfinished = [
            entry.name
            for entry in self.modifiers
            if entry.kind in {"pruning", "structured", "quantization"}
            and (not entry._started or (entry.end_epoch >= 0 and not entry._ended))
        ]
        if unfinished:
            warnings.warn(
                message(
                    f"the run ends at epoch {self.epoch:g} of {self.max_epochs}, before {', '.join(unfinished)} did",
                    fix=f"train for manager.max_epochs = {self.max_epochs} epochs to complete the recipe",
                ),
                stacklevel=3,
            )


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise unless a state has the parts that :meth:`Manager.state_dict` writes, each of its type and range."""
    if not isinstance(state, Mapping):
        raise ValueRangeError(message(f"a state that is {type(state).__name__}", "what state_dict returned"))
    version = state.get("version")
    if not isinstance(version, int) or version != _VERSION:
        raise ValueRangeError(message(f"a state of version {version!r}"[:200], f"version {_VERSION}"))
    for name, least in (("step", 0), ("steps_per_epoch", 1)):
        value = state.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
            raise ValueRangeError(message(f"{name} of the state is {value!r}"[:200], f"a whole number from {least}"))
    for name, kind in (("modifiers", Mapping), ("generator", Tensor)):
        if not isinstance(state.get(name), kind):
            given = f"{name} of the state is {type(state.get(name)).__name__}"
            raise ValueRangeError(message(given, f"a {kind.__name__.lower()}", "pass what state_dict returned"))
