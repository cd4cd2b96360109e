"""The whole model, measured end to end: wins of single layers can lose together, so the combination is timed too.

Graphs (original, or compact and folded) and hosts (eager, Inductor for what lies between the kernels, either replayed
from a CUDA graph) compete with the plan's kernels in and out, interleaved with the model as it was given. That model is
a rival as well, so the result is never chosen to be slower than it, and it is the measure of what can be claimed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparta.compiler.choose import judge
from sparta.compiler.choose.decisions import Decision
from sparta.compiler.choose.judge import LAYERS
from sparta.compiler.choose.outcome import Outcome
from sparta.compiler.choose.siblings import apart, rejoined, running
from sparta.compiler.choose.timer import ROUNDS, Timer
from sparta.compiler.choose.trim import Trim, made_dense
from sparta.compiler.choose.workshop import Plans, Workshop, called, sparse_names
from sparta.compiler.clock import Call, Rounds
from sparta.compiler.plan import EndToEnd, LayerPlan
from sparta.compiler.run.chain.chained import chainable
from sparta.compiler.run.host import Host
from sparta.compiler.run.panels import panelled
from sparta.compiler.session import Session, in_words
from sparta.compiler.variant import GIVEN, ORIGINAL, Base, Variant

__all__ = ["Contest"]

_TUNED_LONGER = 8.0  # how much longer it takes when it tries all that it can
_TRIES, _BRIEF_TRIES = 4, 8  # more, where timing is unstable; the latter where each takes little
_BRIEF_SECONDS = 0.3
_MOST_COPIED = 1 << 30  # bytes of weights that are packed once more, for a rival that hardly ever wins
_AGREES = 2.0  # the factor within which a fresh time of the model as given must agree with the stored one


@dataclass(frozen=True)
class _Result:
    """The rounds of the variants, those that decide last, with what runs and why no ratio is claimed, if so."""

    rounds: tuple[Rounds, ...]
    best: Variant
    doubt: str
    bound: float | None = None
    beyond: str = ""

    @property
    def last(self) -> Rounds:
        return self.rounds[-1]


@dataclass
class Contest:
    """Everything that competes for one model.

    Parameters
    ----------
    given
        A call of the model as the user gave it.
    workshop
        Makes the variants.
    plans
        What was chosen for the sub-graphs one by one.
    inputs
        The flat inputs, for each size that is measured.
    timer
        The clock and its budget.
    inductor
        Whether `torch.compile` competes as a host. CUDA graphs do where the session says so.
    """

    given: Call
    workshop: Workshop
    plans: tuple[LayerPlan, ...]
    inputs: Sequence[Sequence[Any]]
    timer: Timer
    inductor: bool = False

    @property
    def session(self) -> Session:
        """The compilation that it is part of."""
        return self.timer.session

    # ------------------------------------------------------------------ deciding

    def decide(self) -> Outcome:
        """Time the variants, leave out layers that lose together, and return what runs."""
        try:
            return self._decided()
        except KeyboardInterrupt:
            self.session.interrupted = True
            reason = "interrupted: the best layer by layer, not timed end to end"
            return Outcome.untimed(self._sparse(self.plans), self.plans, reason)
        except Exception as error:  # noqa: BLE001 - whatever a candidate does, the original graph remains
            why = f"dense: choosing end to end failed ({in_words(error)})"
            return Outcome.untimed(ORIGINAL, made_dense(self.plans, sparse_names(self.plans), why), why)

    def _decided(self) -> Outcome:
        if not self._can_time():
            self.session.hurried |= not self.session.interrupted
            why = "interrupted" if self.session.interrupted else "the budget was spent"
            # Without a kernel there is nothing to gain.
            variant = self._sparse(self.plans) if sparse_names(self.plans) else ORIGINAL
            return Outcome.untimed(variant, self.plans, f"not timed end to end: {why}")
        plans = self._working(self._in_integers(self.plans))
        if self.timer.slow:
            result = self._settled_briefly(plans)
        elif self.session.brief:
            result = self._settled_at_a_look(plans)
        else:
            host = Host.GRAPH if self.session.in_graphs else Host.EAGER
            trim = Trim(self.timer, host, self._call, self.workshop.forget)
            plans = rejoined(trim.trimmed(apart(plans)), plans)
            result = self._questioned(self._settled(plans), plans)
        if result.best.host is Host.PANELS:
            plans = self.workshop.aligned(plans)
        whole = self._whole(result)
        plans = running(plans, result.best.kernels)
        if not result.best.kernels:
            plans = made_dense(plans, sparse_names(plans), _lost(result))
        plans = self._other_sizes(plans)
        given = result.last.median(GIVEN)
        self.session.hurried |= self.timer.hurried
        lasting = not (result.doubt or self.timer.hurried or self.session.interrupted or self.session.brief)
        variant = replace(result.best, kernels=result.best.kernels & sparse_names(plans))
        self.workshop.keep(variant, plans)
        return Outcome(variant, plans, whole, given, lasting)

    def _can_time(self) -> bool:
        """Whether there is time to compare anything; of slow calls, those of kernels are the short ones."""
        session = self.session
        if not self.timer.slow:
            return self.timer.affords(2)
        fits = session.budget_s is None or self.timer.call_seconds <= session.budget_s
        return not session.interrupted and fits and (session.left > 0 or bool(sparse_names(self.plans)))

    def again(self, decision: Decision) -> Outcome | None:
        """Take a stored decision, after a look at whether it still holds; None where it does not.

        It holds if the model as given takes about as long as it did, and neither that nor the original graph nor the
        kernels that win one by one, eagerly or as a chain, are faster than what was decided.
        """
        self.plans = self._in_integers(self.plans)
        plans = made_dense(
            self.plans, frozenset(decision.dense), "dense: remembered, it does not win in the whole model"
        )
        if decision.host is Host.PANELS:
            plans = self.workshop.aligned(plans)
        if decision.host.compiles and self.session.in_graphs and not decision.host.graphed:
            return None  # which does not compete here
        kernels = sparse_names(plans) if decision.base is Base.REDUCED else frozenset()
        variant = Variant(decision.base, kernels, decision.host)
        if not self.timer.affords(2):
            fresh = 1e3 * self.timer.call_seconds
            if not _agree(fresh, decision.given_milliseconds):
                return None
            return Outcome.untimed(variant, plans, "remembered; not timed again, the budget was spent")
        calls = {GIVEN: self.given, ORIGINAL: self._call(ORIGINAL, plans)}
        calls[variant] = self.given if variant == GIVEN else self._call(variant, plans)
        full = self._sparse(self.plans)
        if full.kernels != variant.kernels and full.kernels:
            calls[full] = self._call(full, self.plans)
        for chain in self._chains(self.plans)[:1]:
            calls.setdefault(chain, self._call(chain, self.plans))
        if self.timer.slow:
            calls[variant]()  # which makes it
        rounds = self.timer.few(calls) if self.timer.slow else self.timer.rounds(calls, ROUNDS)
        given = rounds.median(GIVEN)
        better = any(rounds.ratio(variant, each).sure for each in calls if each != variant)
        if not _agree(given, decision.given_milliseconds) or better:
            return None
        whole = self._whole(_Result((rounds,), variant, judge.doubt(rounds, variant)))
        whole = replace(whole, reason=f"remembered: {whole.reason}")
        return Outcome(variant, plans, whole, given, lasting=False)

    def _in_integers(self, plans: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """Return plans in which quantised convolutions compute in integers, where chains are faster beyond doubt so."""
        other = self.workshop.in_integers(plans)
        chains = self._chains(other)[:1] if other != plans and self.timer.affords(_TRIES) else []
        if not chains or self.timer.slow:
            return plans
        try:
            both = {"chosen": plans, "integers": other}
            calls = {name: self._call(self._sparse(each, Host.CHAIN), each) for name, each in both.items()}
            return other if self.timer.rounds(calls, ROUNDS).ratio("chosen", "integers").sure else plans
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises, the plans before remain
            self.session.gave_up("integers in all convolutions", error)
            return plans

    def _working(self, plans: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """Return plans in which layers whose kernels cannot be made, or do not run, are dense."""
        for name in sorted(sparse_names(plans)):
            try:
                self.workshop.try_kernel(plans, name)
            except Exception as error:  # noqa: BLE001 - whatever a kernel does, the layer has a dense one
                plans = made_dense(plans, frozenset({name}), f"dense: the kernel does not run ({in_words(error)})")
        return plans

    def _settled(self, plans: Plans) -> _Result:
        """Time the variants; where several are close, or timing is unstable, those that matter compete again."""
        calls = self._variants(plans)
        alone = self.workshop.layers_alone(plans)
        first = self.timer.rounds({**calls, LAYERS: alone} if alone is not None else calls, ROUNDS)
        best, doubt = self._verdict(first)
        bound = judge.bound(first, self._dense_graph(first))
        close = judge.close_ones(first)
        rounds = [first]
        if len(close) > 1 and self.timer.affords(2 + len(close)):
            rounds.append(self.timer.rounds({key: calls[key] for key in (GIVEN, ORIGINAL, *close)}, 2 * ROUNDS))
            best, doubt = self._verdict(rounds[-1])
        again = {key: calls[key] for key in rounds[-1].samples if key in calls}
        brief = 2 * ROUNDS * len(again) * self.timer.call_seconds < _BRIEF_SECONDS
        for _ in range(_BRIEF_TRIES if brief else _TRIES):
            if not doubt or not self.timer.affords(len(again)):
                break
            rounds.append(rounds[-1].joined(self.timer.rounds(again, 2 * ROUNDS)))
            best, doubt = self._verdict(rounds[-1])
        if doubt:
            best = self._surest(rounds[-1], plans)
        return _Result(tuple(rounds), best, doubt, bound)

    def _settled_briefly(self, plans: Plans) -> _Result:
        """Time few calls, where each takes long: what should be fast first, then the fastest of it and the original.

        One call of each is enough to choose by where they are far apart; three are needed to claim a ratio.
        """
        fast = self._promising(plans)
        rounds = [self.timer.few(fast, 1)] if fast else []
        near = judge.near_ones(rounds[0]) if fast else []
        if len(near) > 1 and self.session.affords(1e-3 * sum(rounds[0].median(key) for key in near)):
            rounds.append(self.timer.few({key: fast[key] for key in near}))
        best = min(rounds[-1].samples, key=rounds[-1].median) if fast else ORIGINAL
        known = 1e3 * self.timer.call_seconds
        ours = rounds[-1].median(best) if fast else known
        if self.session.affords(1e-3 * (2 * known + ours)):
            rivals = {GIVEN: self.given, ORIGINAL: self._call(ORIGINAL, plans), best: self._call_of(best, plans)}
            rounds.append(self.timer.few(rivals))
        else:
            self.timer.hurried = True
            rounds.append(Rounds({GIVEN: [known], ORIGINAL: [known], best: [ours]}))
        chosen = judge.fastest(rounds[-1], given=self.workshop.given is not None)
        doubt = judge.doubt_of_few(rounds[-1], chosen)
        if doubt and not judge.are_few(rounds[-1]):
            chosen = self._surest(rounds[-1], plans)
        return _Result(tuple(rounds), chosen, doubt)

    def _settled_at_a_look(self, plans: Plans) -> _Result:
        """Time the variants once; where timing is unstable, a few times more."""
        calls = self._variants(plans)
        rounds = self.timer.rounds(calls)
        best, doubt = self._verdict(rounds)
        for _ in range(_TRIES):
            if not doubt or not self.timer.affords(len(calls)):
                break
            rounds = rounds.joined(self.timer.rounds(calls))
            best, doubt = self._verdict(rounds)
        return _Result((rounds,), self._surest(rounds, plans) if doubt else best, doubt)

    def _verdict(self, rounds: Rounds) -> tuple[Variant, str]:
        """Return what is fastest, and why that cannot be claimed, if so."""
        best = judge.fastest(rounds, given=self.workshop.given is not None)
        return best, judge.doubt(rounds, best)

    def _surest(self, rounds: Rounds, plans: Plans) -> Variant:
        """Return what runs where timing is unstable."""
        return judge.surest(rounds, layers_win=judge.layers_win(plans))

    def _questioned(self, result: _Result, plans: Plans) -> _Result:
        """Measure a ratio beyond what sparse layers can account for again; if it stays, say what else was gained."""
        reduced = self.workshop.reduced is not self.workshop.original
        claim = result.last.ratio(GIVEN, result.best)
        if result.doubt or result.best == GIVEN:
            return result
        if judge.explained(claim, result.best, result.bound) or not self.timer.affords(4):
            return replace(
                result, beyond=judge.gained_elsewhere(result.last, result.best, reduced=reduced, all_of_it=False)
            )
        dense = self._dense_graph(result.rounds[0])
        calls = {GIVEN: self.given, ORIGINAL: self._call(ORIGINAL, plans), dense: self._call(dense, plans)}
        calls[result.best] = self._call_of(result.best, plans)
        alone = self.workshop.layers_alone(plans)
        rounds = self.timer.rounds({**calls, LAYERS: alone} if alone is not None else calls, 2 * ROUNDS)
        bound, doubt = judge.bound(rounds, dense), judge.doubt(rounds, result.best)
        best = self._surest(rounds, plans) if doubt else result.best
        alike = judge.explained(rounds.ratio(GIVEN, best), best, bound)
        beyond = judge.gained_elsewhere(rounds, best, reduced=reduced, all_of_it=not alike)
        return _Result((*result.rounds, rounds), best, doubt, bound, beyond)

    def _whole(self, result: _Result) -> EndToEnd:
        """Return what is said of the whole model."""
        best, last = result.best, result.last
        if result.doubt:
            return EndToEnd(best.base, best.host, reason=f"{best}; {result.doubt}")
        times, claim = judge.times_of(result.rounds), last.ratio(GIVEN, best)
        after, before = last.median(best), last.median(GIVEN)
        reason = f"{best}: {after:.4g} ms, {claim.value:.2f}x the model as given ({before:.4g} ms)"
        if best == GIVEN:
            reason = f"{best}: {before:.4g} ms; no graph of it is as fast"
        interval = (claim.low, claim.high)
        bound = result.bound if best.kernels else None
        return EndToEnd(best.base, best.host, times, reason, str(best), claim.value, interval, bound, result.beyond)

    # ------------------------------------------------------------------ what competes

    def _sparse(self, plans: Plans, host: Host = Host.EAGER) -> Variant:
        return Variant(Base.REDUCED, sparse_names(plans), host)

    def _dense_graph(self, rounds: Rounds) -> Variant:
        """Return the reduced graph without a kernel where there is one, else the original."""
        plain = Variant(Base.REDUCED)
        return plain if plain in rounds.samples else ORIGINAL

    def _variants(self, plans: Plans) -> dict[Variant, Call]:
        calls: dict[Variant, Call] = {GIVEN: self.given, ORIGINAL: self._call(ORIGINAL, plans)}
        bases = [ORIGINAL]
        if self.workshop.reduced is not self.workshop.original:
            bases.append(Variant(Base.REDUCED))
        sparse = [self._sparse(each) for each in (apart(plans), plans) if sparse_names(each)]
        bases += dict.fromkeys(sparse)  # one by one, and siblings as one product
        for base in reversed(bases):  # where the budget pays for compiling once, it is the graph with kernels
            for host in self._hosts(base):
                variant = replace(base, host=host)
                if variant != ORIGINAL and (host is Host.EAGER or self._affords_preparing(variant, plans)):
                    self._add(calls, variant, plans)
        for chain in self._chains(plans):
            self._add(calls, chain, plans)
        self._add_panels(calls, plans)
        return calls

    def _promising(self, plans: Plans) -> dict[Variant, Call]:
        """Return what should be faster than the model as given, the likeliest first, as far as there is time."""
        calls: dict[Variant, Call] = {}
        base = self._sparse(plans) if sparse_names(plans) else Variant(Base.REDUCED)
        for chain in self._chains(plans)[:1]:
            self._add(calls, chain, plans)
        other = base.kernels or self.workshop.reduced is not self.workshop.original
        if other and (not calls or self.session.left > 0):
            self._add(calls, base, plans)
        self._add_panels(calls, plans)
        for graph in (base, ORIGINAL):
            for host in self._hosts(graph):
                variant = replace(graph, host=host)
                if host is not Host.EAGER and self.session.left > 0 and self._affords_preparing(variant, plans):
                    self._add(calls, variant, plans)
        return calls

    def _chains(self, plans: Plans) -> list[Variant]:
        """Return the graphs that compete as chains, where enough of them can be part of one.

        A chain of the graph with all kernels is the best that is known before anything is timed, so it competes
        whatever is left of the budget. What the layers win by was measured against PyTorch; in a chain their dense
        rivals are other kernels, so the graph without sparse ones is a chain as well, where its weights are not so
        large that another copy of them counts.
        """
        if self.session.in_graphs or self.session.interrupted:
            return []
        plain = Variant(Base.REDUCED) if self.workshop.reduced is not self.workshop.original else ORIGINAL
        first = self._sparse(plans) if sparse_names(plans) else plain
        found = [first] if chainable(self.workshop.graph(first, plans)) else []
        if first != plain and self.session.left > 0:
            graph = self.workshop.graph(plain, plans)
            nbytes = sum(tensor.nbytes for tensor in graph.buffers())
            found += [plain] if nbytes <= _MOST_COPIED and chainable(graph) else []
        return [replace(each, host=Host.CHAIN) for each in found]

    def _hosts(self, base: Variant) -> list[Host]:
        """Return the hosts that compete for a graph.

        Where graphs are replayed, Inductor compiles what lies between layers to be replayed, and nothing else of it
        competes: without a graph a model is compiled as a whole, which was not measured.
        """
        compiled = self.inductor and (base.base is Base.ORIGINAL or bool(base.kernels))
        if self.session.in_graphs:
            tuned = [Host.TUNED_GRAPH] if self.session.tune == "full" else []
            return [Host.EAGER, Host.GRAPH, *([Host.INDUCTOR_GRAPH, *tuned] if compiled else [])]
        return [Host.EAGER, Host.INDUCTOR] if compiled else [Host.EAGER]

    def _affords_preparing(self, variant: Variant, plans: Plans) -> bool:
        """Whether a host can be made ready in what is left of the budget: compiling cannot be cut short."""
        seconds = 0.0
        if variant.host.compiles:
            seconds = self.session.inductor_seconds * self.workshop.calls_to_compile(variant, plans)
            seconds *= _TUNED_LONGER if variant.host.plain is Host.TUNED else 1.0
        if self.session.affords(seconds):
            return True
        if seconds and not self.session.interrupted:
            self.timer.hurried = True
            self.session.note(
                f"{variant} was not tried: compiling takes about {seconds:.0f} s, more than the budget has left"
            )
        return False

    def _add(self, calls: dict[Variant, Call], variant: Variant, plans: Plans) -> None:
        """Add a variant that has to be prepared, unless that fails."""
        self.session.show(f"preparing {variant}")
        before = self.session.elapsed
        try:
            call = self._call(variant, plans)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
            problem = getattr(self.workshop.run(variant, plans), "problem", "")
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises, the others remain
            problem = in_words(error)
        if variant.host.plain is Host.INDUCTOR and not problem:  # what failed says nothing of what compiling takes
            count = max(1, self.workshop.calls_to_compile(variant, plans))
            self.session.inductor_seconds = max(1e-3, (self.session.elapsed - before) / count)
        if problem:
            self.session.note(f"{variant} does not run: {problem}")
        else:
            calls[variant] = call

    def _add_panels(self, calls: dict[Variant, Call], plans: Plans) -> None:
        """Add the sparse graph with activations in panels, where neighbouring layers can hand them over."""
        if self._sparse(plans) not in calls or not plans or not sparse_names(plans) or self.session.left <= 0:
            return
        other, variant = self.workshop.aligned(plans), self._sparse(plans, Host.PANELS)
        plain = self.workshop.graph(variant, other)
        if panelled(plain) is not plain:
            self._add(calls, variant, other)

    def _other_sizes(self, plans: tuple[LayerPlan, ...]) -> tuple[LayerPlan, ...]:
        """At the sizes beyond the first, keep the kernels only where they win together."""
        for inputs in self.inputs[1:]:
            sparse = self._sparse(plans)
            if not sparse.kernels or not self.timer.affords(2):
                break
            both = (Variant(Base.REDUCED), sparse)
            times = self.timer.rounds({each: self._call(each, plans, inputs) for each in both})
            if times.ratio(*both).value < 1:
                plans = self._dense_at(plans, inputs)
        return plans

    def _dense_at(self, plans: tuple[LayerPlan, ...], inputs: Sequence[Any]) -> tuple[LayerPlan, ...]:
        """Return plans that are dense at the size that layers have for these inputs, unless it is their first."""
        kernels = self.workshop.kernels(plans)
        seen = self.workshop.reduced.values(inputs, {subgraph.anchor.x for subgraph in kernels})
        sizes = {subgraph.name: subgraph.lowering.size(seen[subgraph.anchor.x]) for subgraph in kernels}
        note = "dense at this size: sparse kernels lose together"
        return tuple(
            plan.made_dense(note, sizes[plan.name])
            if plan.name in sizes and sizes[plan.name] != next(iter(plan.choices))
            else plan
            for plan in plans
        )

    def _call_of(self, variant: Variant, plans: Plans) -> Call:
        """Return a call of a variant with the tiles that its host wants."""
        return self._call(variant, self.workshop.aligned(plans) if variant.host is Host.PANELS else plans)

    def _call(self, variant: Variant, plans: Plans, inputs: Sequence[Any] | None = None) -> Call:
        if variant == GIVEN:
            return self.given
        return called(self.workshop.run(variant, plans), self.inputs[0] if inputs is None else inputs)


def _agree(fresh: float, stored: float) -> bool:
    return stored > 0 and fresh > 0 and max(fresh / stored, stored / fresh) <= _AGREES


def _lost(result: _Result) -> str:
    """Return why no layer runs sparse, in words."""
    if result.doubt:
        return "dense: end to end, nothing was faster beyond doubt while timing was unstable"
    found: Mapping[str, float] = judge.times_of(result.rounds)
    sparse = [key for rounds in result.rounds for key in rounds.samples if isinstance(key, Variant) and key.kernels]
    if not sparse:
        return "dense: end to end, the sparse plan does not run"
    times = min(found[str(key)] for key in sparse)
    return (
        f"dense: end to end, the {result.best} took {found[str(result.best)]:.4g} ms and the sparse plan {times:.4g} ms"
    )
