"""Clocks for contests: what each variant takes is said by a test and not by the machine."""

from collections.abc import Callable

from sparta.compiler.api import compile_in
from sparta.compiler.session import Session
from sparta.compiler.variant import Base, Variant


class Clock:
    """Says that a call takes what `cost` says of its variant, times what `noise` says of the round and the call.

    Calls are made, once for each comparison, so that what does not run is noticed.
    """

    def __init__(self, cost, noise: Callable[[int, int], float] = lambda _round, _place: 1.0, rounds=21):
        self.cost, self.noise, self.rounds = cost, noise, rounds
        self.asked, self.done = [], 0

    def __call__(self, calls, seconds):
        self.asked.append((list(calls), seconds))
        for call in calls.values():
            call()
        found = {key: [] for key in calls}
        for number in range(self.done, self.done + self.rounds):
            for place, key in enumerate(calls):
                found[key].append(self.cost(key) * self.noise(number, place))
        self.done += self.rounds
        return found


def plain_cost(given=10.0, original=10.0, sparse=4.0, layers=8.0, others=12.0):
    """Return what variants take: the model as given, the original graph, the sparse one by its eager host."""

    def cost(key):
        if not isinstance(key, Variant):
            return layers
        if key.base is Base.GIVEN:
            return given
        if key.host.value != "eager":
            return others
        return sparse if key.kernels else original

    return cost


def compiled(model, x, clock, **options):
    """Compile a model with a clock of the test's own; that of the machine, which may be busy, has no say."""
    sizes = options.pop("sizes", [x])
    settings = {name: options.pop(name) for name in ("tune", "budget_s") if name in options}
    return compile_in(Session(measure=clock, now=lambda: 0.0, **settings), model, sizes, **options)
