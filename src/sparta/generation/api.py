"""Compile a language model of transformers: the same class with the same `generate`, faster.

Where the model is a llama-like decoder in float32 on the CPU, a decode program in C++ runs its steps; elsewhere the
model's own code runs with sparse kernels in its linear layers. Either is compared with the masked dense model before
it is handed over, and where neither helps, the model runs as it was given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparta.common.progress import Progress
from sparta.compiler.certificate import Certificate
from sparta.compiler.plan import EndToEnd, LayerPlan, Plan
from sparta.compiler.provenance import provenance_of
from sparta.compiler.report import Report, Totals
from sparta.compiler.session import Session, Tune, shown
from sparta.compiler.variant import GIVEN, Base
from sparta.errors import CheckError, MissingPackageError, SpartaError, ValueRangeError, message
from sparta.generation.decoder import find_decoder
from sparta.generation.experts import PackedExperts, put_experts
from sparta.generation.fp8 import fp8_obstacle, put_back, round_weights, simulated
from sparta.generation.layers import (
    SparseLayer,
    is_linear,
    is_transposed,
    layer_plans,
    put_layers,
    row_counts,
    weight_of,
)
from sparta.generation.model import Compiled, GenerativeModel, compiled_class, shared_copy
from sparta.generation.packed_linear import PackedLinear, dense_products
from sparta.generation.packing import packed_layers, program_plans, put_program
from sparta.generation.prompts import PromptGraphs
from sparta.generation.recording import let_replay
from sparta.generation.siblings import join_siblings
from sparta.generation.trials import (
    agreement,
    certified,
    decode_call,
    generate_call,
    named_example,
    outputs,
    prompt_call,
    replayed_call,
    timed,
)
from sparta.modules import set_member
from sparta.precision.data import checked_batches
from sparta.specialize.tuning.significance import LEAST_GAIN, pairs_of
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

__all__ = ["compile_generator", "generates"]

_PRECISIONS = ("fp32", "int8", "fp8", "auto")
_MOST_CHANGE = 0.1
_SPARSE = 0.95  # weights with more live values than that are dense with a few zeros
_LEAST = 0.97  # of the speed of the model as given
_HALVES = (torch.bfloat16, torch.float16)


def generates(model: object, example_inputs: object = None) -> bool:
    """Whether a model is one of transformers that can generate, and is called with its cache.

    >>> generates(nn.Linear(2, 2))
    False
    """
    loaded = sys.modules.get("transformers.generation.utils")  # a model that has it has imported it
    if loaded is None or not isinstance(model, loaded.GenerationMixin) or not isinstance(model, nn.Module):
        return False
    asked = example_inputs.get("use_cache") if isinstance(example_inputs, Mapping) else None
    keeps: Any = getattr(model.config, "use_cache", True) if asked is None else asked
    can = getattr(model, "can_generate", None)
    return bool(keeps) and callable(can) and bool(can())


def compile_generator(  # noqa: PLR0913 - one call says all there is to say about a compilation
    model: nn.Module,
    example_inputs: Any,
    spec: Spec | None = None,
    *,
    device: str | torch.device | None = None,
    tune: Tune = "quick",
    dtype: torch.dtype | None = None,
    verify: bool = True,
    budget_s: float | None = None,
    precision: str | None = None,
    calibration: Any = None,
    max_loss: float | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    progress: Progress | bool | None = None,
) -> GenerativeModel:
    """Return a copy of a language model that computes what the masked dense one computes, faster, with `generate`.

    :func:`sparta.compile` does this for models of transformers that can generate.

    Parameters
    ----------
    model
        It is not changed; the copy shares what is not packed.
    example_inputs
        A prompt as the model is called with: a tensor of token ids, or a dict with its attention mask. Other lengths
        and batches run as well.
    spec
        What is pruned; None reads the zeros that are in the weights.
    precision
        ``"fp32"`` (the default: as the model is); ``"int8"``: weights of linear layers are rounded to 8 bits with a
        scale per row, on the CPU; ``"fp8"``: weights and, where a kernel wins by it, inputs, on the GPU; or ``"auto"``:
        int8 or fp8 where it costs no more than `max_loss`. The report tells what it costs.
    calibration
        Prompts, as an iterable of what `example_inputs` is: the loss of rounding is measured on them. Weights have the
        only fixed grids there are, so ranges need no data; None takes the example.
    max_loss
        The loss that rounding may cost: what `metric` falls by (0 by default), or without one the norm of the change
        of the logits over their norm (0.1 by default). Beyond it the model stays as it is.
    metric
        Takes a model and returns a number, higher is better.
    device, dtype, tune, verify, budget_s, progress
        As for :func:`sparta.compile`.

    Returns
    -------
    GenerativeModel
        An instance of the model's own class, with `report` and `save`.
    """
    session = Session(tune=tune, budget_s=budget_s, show=shown(progress))
    if not isinstance(model, nn.Module) or not generates(model):
        given = f"a {type(model).__name__}"
        raise ValueRangeError(message(given, "a model of transformers that can generate, with its cache in use"))
    if precision not in (None, *_PRECISIONS):
        raise ValueRangeError(message(f"precision={precision!r}", " or ".join(map(repr, _PRECISIONS))))
    if precision == "fp8" and dtype is None and next(model.parameters()).dtype == torch.float32:
        dtype = torch.bfloat16
        session.note("in bfloat16 beside fp8: kernels in fp8 take and give 16 bits")
    base = _moved(model, device, dtype)
    example = pytree.tree_map(lambda leaf: _moved_leaf(leaf, base), named_example(base, example_inputs))
    tesas = _masked(base, spec)
    if precision == "int8" and next(base.parameters()).device.type != "cpu":
        raise ValueRangeError(message("precision='int8' on CUDA", "the CPU for language models in int8"))
    if precision == "fp8" and (obstacle := fp8_obstacle(base)):
        allowed = "bfloat16 or float16 on a GPU of compute capability 8.9 or more"
        fix = "pass device='cuda', dtype=torch.bfloat16; on the CPU precision='int8'"
        raise ValueRangeError(message(f"precision='fp8' for {obstacle}", allowed, fix))
    on_cpu = next(base.parameters()).device.type == "cpu"
    limit = _Limit(max_loss, metric) if precision == "auto" or max_loss is not None or metric is not None else None
    int8 = precision == "int8" or (precision == "auto" and on_cpu)
    prompts = None if calibration is None else _prompts(base, calibration, example_inputs)
    compilation = _Compilation(base, example, tesas, session, int8=int8, limit=limit, check=verify, prompts=prompts)
    compilation.fp8 = precision == "fp8" or (precision == "auto" and not fp8_obstacle(base))
    return compilation.run()


def _prompts(base: nn.Module, calibration: Any, example: Any) -> list[dict[str, Any]]:
    """Return calibration data as calls by name."""
    batches = checked_batches(calibration, example)
    return [pytree.tree_map(lambda leaf: _moved_leaf(leaf, base), named_example(base, batch)) for batch in batches]


@dataclass(frozen=True)
class _Limit:
    """What int8 may cost."""

    most: float | None
    metric: Callable[[nn.Module], float] | None

    def exceeded(self, base: nn.Module, fast: nn.Module, relative: float) -> str:
        """Return in words that it costs more; nothing where it does not."""
        if self.metric is None:
            most = _MOST_CHANGE if self.most is None else self.most
            return "" if relative <= most else f"logits change by {relative:.2g}, more than {most:.2g}"
        before, after = float(self.metric(base)), float(self.metric(fast))
        most = self.most or 0.0
        return "" if before - after <= most else f"the metric falls from {before:.4g} to {after:.4g}"


class _Compilation:
    """One compilation: the masked dense model, the example, and what is known of the weights."""

    def __init__(
        self,
        base: nn.Module,
        example: dict[str, Any],
        tesas: dict[str, TeSA],
        session: Session,
        *,
        int8: bool,
        limit: _Limit | None,
        check: bool,
        prompts: list[dict[str, Any]] | None = None,
    ) -> None:
        self.base, self.example, self.tesas, self.session = base, example, tesas, session
        self.int8, self.limit, self.check = int8, limit, check
        self.fp8 = False
        self._wide: nn.Module | None = None
        self.prompts = prompts or [example]
        try:
            with torch.no_grad():
                self.output = type(base(**example))
        except Exception as error:
            given = f"example inputs that the model does not take: {type(error).__name__}: {error}"[:500]
            raise ValueRangeError(message(given, "what the model is called with")) from error

    def run(self) -> GenerativeModel:
        """Return the compiled model."""
        found = None if self.fp8 else self._by_program()
        if found is None and self.int8 and next(self.base.parameters()).device.type == "cpu":
            self.int8 = False
            found = self._by_program()
        fast, plans, certificate = found or self._by_layers()
        if next(self.base.parameters()).device.type == "cuda":
            let_replay(fast, self.example, self.session, check=self.check)
        whole = self._measured(fast)
        if whole.base is Base.GIVEN:
            fast, plans = self._copy(), [plan.made_dense(whole.reason) for plan in plans]
            self.fp8 = False
        report = Report(Plan(tuple(plans), whole), self._totals(fast), certificate, tuple(self.session.notes))
        fast._sparta.report = report
        kind = next(self.base.parameters()).device.type
        provenance = provenance_of(type(self.base).__qualname__, kind, self.session.tune)
        fast._sparta.provenance = {
            **provenance,
            "precision": "int8" if self.int8 else "fp8" if self.fp8 else "as given",
        }
        turned = {name for name in self.tesas if is_transposed(self.base.get_submodule(name))}
        fast._sparta.spec = Spec(
            {f"{name}.weight": _turned(tesa) if name in turned else tesa for name, tesa in self.tesas.items()}
        )
        return fast

    def _copy(self, of: nn.Module | None = None) -> GenerativeModel:
        """Return a copy of the masked model, of the compiled class."""
        fast = shared_copy(self.base if of is None else of)
        fast.__class__ = compiled_class(type(self.base))  # type: ignore[arg-type]
        compiled = cast("GenerativeModel", fast)
        object.__setattr__(compiled, "_sparta", Compiled(output=self.output))
        return compiled

    # ------------------------------------------------------------------ in C++

    def _by_program(self) -> tuple[GenerativeModel, list[LayerPlan], Certificate] | None:
        """Return the model with its steps, or at least its layers, packed; None where it is not to be."""
        if next(self.base.parameters()).device.type != "cpu":
            return None
        wide = self._widened()
        decoder = find_decoder(wide)
        if isinstance(decoder, str):
            self.session.note(f"no decode program: {decoder}")
            if not self.int8:
                return None
        fast = self._copy(wide)
        masks = {name: tesa.mask() for name, tesa in self.tesas.items()}
        try:
            if isinstance(decoder, str):
                matrices = packed_layers(fast, masks, int8=True)
                self._note_experts(put_experts(fast, int8=True))
            else:
                matrices = put_program(fast, decoder, masks, int8=self.int8)
            certificate = self._certificate(fast, wide)
        except (CheckError, MissingPackageError) as error:
            self.session.gave_up("no decode program", error)
            return None
        if self.int8 and self._costs_too_much(fast, "int8"):
            return None
        if wide is not self.base:
            dtype = str(next(self.base.parameters()).dtype).removeprefix("torch.")
            self.session.note(f"the decode program computes in float32 what the model computes in {dtype}")
        return fast, program_plans(matrices, masks), certificate

    def _widened(self) -> nn.Module:
        """Return the masked model in float32 where it is a decoder in fewer bits, else as it is."""
        if isinstance(find_decoder(self.base, _HALVES), str):
            return self.base
        if self._wide is None:
            self._wide = deepcopy(self.base).float()
            cast("Any", self._wide).config.dtype = torch.float32
        return self._wide

    def _costs_too_much(self, fast: GenerativeModel, precision: str) -> bool:
        """Note what rounding changes; return whether that is more than is allowed."""
        before, after = ([outputs(m, each) for each in self.prompts] for m in (self.base, fast))
        if [len(each) for each in before] != [len(each) for each in after]:
            self.session.note(f"not in {precision}: the model then takes other calls than before")
            return True
        relative, same = agreement([t for each in before for t in each], [t for each in after for t in each])
        whose = "the example" if self.prompts[0] is self.example else f"{len(self.prompts)} calibration batches"
        self.session.note(
            f"{precision}: logits of {whose} differ from those before rounding by {relative:.2g} (relative); "
            f"{same:.1%} of the tokens have the same likeliest next one"
        )
        too_much = "" if self.limit is None else self.limit.exceeded(self.base, fast, relative)
        if too_much:
            self.session.note(f"not in {precision}: {too_much}")
        return bool(too_much)

    # ------------------------------------------------------------------ in the model's own code

    def _by_layers(self) -> tuple[GenerativeModel, list[LayerPlan], Certificate]:
        """Return the model with sparse kernels in its layers, or as it was given where that fails."""
        fast = self._copy()
        if next(self.base.parameters()).device.type == "cuda":
            self.session.use_graphs()  # as steps are replayed
        tesas = round_weights(fast, self.tesas) if self.fp8 else self.tesas
        step = decode_call(fast, self.example) or generate_call(fast, self.example)
        rows = row_counts(fast, tesas, [step, prompt_call(fast, self.example)])
        try:
            put = put_layers(fast, tesas, rows, self.session)
            if self.session.in_graphs:
                put |= join_siblings(fast, put, step, self.session)
            if self.fp8:
                put_back(fast, self.base, [name for name in tesas if name not in put])
            self._note_experts(put_experts(fast, int8=False))
            certificate = self._certificate(fast)
            if not self.fp8 or not self._costs_too_much(fast, "fp8"):
                return fast, layer_plans(put), certificate
        except SpartaError as error:
            self.session.gave_up("layers in fp8" if self.fp8 else "sparse layers", error)
        if self.fp8:
            self.fp8 = False
            return self._by_layers()
        fast = self._copy()
        return fast, [], self._certificate(fast)

    def _note_experts(self, put: Mapping[str, PackedExperts]) -> None:
        for name, experts in put.items():
            self.session.note(f"{name}: {experts.extra_repr()}")

    def _certificate(self, fast: GenerativeModel, like: nn.Module | None = None) -> Certificate:
        """Compare with the masked model, or with `like`, what it is in another dtype."""
        base = self.base if like is None else like
        dtype = next(base.parameters()).dtype
        example = pytree.tree_map(lambda leaf: _moved_leaf(leaf, base), self.example)
        if not self.check:
            return Certificate((), str(dtype).removeprefix("torch."), 0.0, 0.0, 0.0, 0, passed=False)
        if self.fp8:
            in_fp8 = partial(outputs, simulated(fast))
            return certified(in_fp8, partial(outputs, fast), base, example, rounding=True)
        if not self.int8:
            return certified(partial(outputs, base), partial(outputs, fast), base, example)
        rounded = cast("GenerativeModel", shared_copy(fast))  # the same packed weights in the model's own code
        rounded._sparta.program = None
        with dense_products(rounded):
            return certified(partial(outputs, rounded), partial(outputs, fast), base, example, rounding=True)

    # ------------------------------------------------------------------ measuring

    def _measured(self, fast: GenerativeModel) -> EndToEnd:
        """Time one token and the prompt against the model as given; the latter runs where it is faster."""
        if self.session.tune == "off" or self.session.left <= 0:
            return EndToEnd(Base.ORIGINAL, reason="not measured")
        gains, spans, times = {}, {}, {}
        for what, make in (("one token", decode_call), ("the prompt", prompt_call)):
            calls = [make(model, self.example) for model in (self.base, fast)]
            if make is decode_call and fast._sparta.graph is not None:
                calls[1] = replayed_call(fast, self.example)
            if calls[0] is None or calls[1] is None:
                continue
            pairs = pairs_of(timed({"given": calls[0], "compiled": calls[1]}))
            gains[what], spans[what] = pairs.likely_gain, pairs.interval
            times[what] = pairs.quiet
        if fast._sparta.graph is not None:
            fast._sparta.graph.forget()
        if fast._sparta.prompts is not None:
            self._choose_prompts(fast, fast._sparta.prompts)
        if fast.program is not None:
            self._choose_longest(fast)
        main = next(iter(gains))
        said = ", ".join(f"{what} {gain:.2f}x" for what, gain in gains.items())
        if not self.int8 and max(gains.values()) < LEAST_GAIN and min(gains.values()) < _LEAST:
            given = {str(GIVEN): times[main][0]}
            return EndToEnd(Base.GIVEN, milliseconds=given, reason=f"nothing was faster ({said})", chosen=str(GIVEN))
        names = {str(GIVEN): times[main][0], "compiled": times[main][1]}
        return EndToEnd(
            Base.ORIGINAL,
            milliseconds=names,
            reason=f"compiled: {said} the model as given",
            chosen="compiled",
            ratio=gains[main],
            interval=spans[main],
        )

    def _choose_prompts(self, fast: GenerativeModel, prompts: PromptGraphs) -> None:
        """Let prompts run as they are where replaying them is not faster."""
        whole = prompt_call(fast, self.example)

        def as_it_is() -> Tensor:
            fast._sparta.prompts = None
            try:
                return whole()
            finally:
                fast._sparta.prompts = prompts

        before = prompts.replays
        for _ in range(2):  # the second is recorded
            whole()
        if prompts.replays == before:
            return  # the example is longer than what is replayed
        if not pairs_of(timed({"as it is": as_it_is, "replayed": whole})).won:
            fast._sparta.prompts = None
            self.session.note("prompts are not replayed from CUDA graphs: that is not faster")

    def _choose_longest(self, fast: GenerativeModel) -> None:
        """Leave long prompts to the model's own code where that is faster."""
        whole = prompt_call(fast, self.example)

        def own_code() -> Tensor:
            program, fast._sparta.program = fast._sparta.program, None
            try:
                return whole()
            finally:
                fast._sparta.program = program

        if pairs_of(timed({"program": whole, "own": own_code})).won:
            ids = self.example.get("input_ids")
            tokens = ids.numel() if isinstance(ids, Tensor) else 1
            fast._sparta.longest = max(1, tokens // 2)
            self.session.note(f"more than {fast._sparta.longest} tokens at once run in the model's own code")

    def _totals(self, fast: GenerativeModel) -> Totals:
        tensors = {id(t): t for t in [*self.base.parameters(), *self.base.buffers()]}.values()
        pruned = sum(tesa.numel - tesa.count("live") for tesa in self.tesas.values())
        count, memory = sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)
        held = {id(t): t for t in [*fast.parameters(), *fast.buffers()]}.values()
        now = sum(t.numel() * t.element_size() for t in held)
        now += sum(module.matrix.nbytes for module in fast.modules() if isinstance(module, PackedLinear))
        now += sum(module.nbytes for module in fast.modules() if isinstance(module, PackedExperts))
        now += sum(module.kernel.nbytes for module in fast.modules() if isinstance(module, SparseLayer))
        sizes = [int(weight_of(m).numel()) for m in self.base.modules() if is_linear(m)]
        flops = 2 * sum(sizes)
        return Totals(count, count - pruned, memory, now, flops, flops - 2 * pruned, _since(self.session))


def _since(session: Session) -> float:
    return time.perf_counter() - session.started


def _masked(base: nn.Module, spec: Spec | None) -> dict[str, TeSA]:
    """Return what is known of the weights (N, K) of linear layers by layer, and set what is pruned to zero in `base`.

    Tensors that change are replaced, for the model shares them with the user's.
    """
    known = {} if spec is None else spec.resolve(base)
    with torch.no_grad():
        for name, tesa in known.items():
            tensor = base.get_parameter(name)
            if tesa.violations(tensor):
                masked = nn.Parameter(tesa.apply(tensor.detach()), requires_grad=tensor.requires_grad)
                _replace_everywhere(base, tensor, masked)
    found: dict[str, TeSA] = {}
    for name, module in base.named_modules():
        if not is_linear(module):
            continue
        given = known.get(f"{name}.weight")
        if given is not None:
            found[name] = _turned(given) if is_transposed(module) else given
            continue
        live = weight_of(module) != 0
        if int(live.sum()) < _SPARSE * live.numel():
            found[name] = TeSA.from_mask(live.contiguous().cpu())
    return found


def _turned(tesa: TeSA) -> TeSA:
    """Return what is known of a transposed matrix."""
    return TeSA.from_mask(tesa.mask().t().contiguous())


def _replace_everywhere(base: nn.Module, tensor: Tensor, masked: nn.Parameter) -> None:
    """Put a parameter in the place of another under all its names."""
    names = [name for name, each in base.named_parameters(remove_duplicate=False) if each is tensor]
    for name in names:
        set_member(base, name, masked)


def _moved(model: nn.Module, device: str | torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of the model, on another device or in another dtype where one is asked for."""
    if device is None and dtype is None:
        return shared_copy(model)
    return deepcopy(model).to(device=device, dtype=dtype).eval()


def _moved_leaf(leaf: Any, base: nn.Module) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    like = next(base.parameters())
    return leaf.to(device=like.device, dtype=like.dtype if leaf.is_floating_point() else None)
