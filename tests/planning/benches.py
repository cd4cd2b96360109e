"""A bench without a clock: times follow a formula, and the whole is not the sum of its layers."""

from collections import Counter
from dataclasses import dataclass, field

from sparta.planning.bench import Whole

GAIN = {"unstructured": 0.6, "4x1": 1.0, "2:4": 0.5}  # how much of its zeros a pattern turns into speed
SHORTER = 1.6  # how many times faster layers are that are rounded
IN_BF16 = 1.35  # and those in bfloat16


@dataclass
class FakeBench:
    """Layers take their weights' size; in the whole, sparse layers take `slower` times what they take alone.

    Dense layers take `compiled` times what they take alone, and so does the rest.
    """

    targets: dict
    rest: float = 2.0
    slower: float = 1.3
    compiled: float = 1.0
    always_dense: frozenset = frozenset()
    device: str = "cpu"
    calls: Counter = field(default_factory=Counter)
    interrupt_at: str = ""
    writers: dict = field(default_factory=dict)  # by the layer whose inputs may go: the layers that make them

    def _size(self, name):
        return self.targets[name].parameter.numel() / 1000

    def given_ms(self):
        return self.rest + sum(self._size(name) for name in self.targets)

    def dense_ms(self, name):
        return self._size(name)

    def kind(self, name):
        return str(self._size(name))

    def option_ms(self, name, option):
        self.calls["option"] += 1
        if self.interrupt_at == "option" and self.calls["option"] > 3:
            raise KeyboardInterrupt
        faster = {None: 1.0, "bf16": IN_BF16}.get(option.precision, SHORTER)
        short = self._size(name) / faster
        if not option.prunes:
            return short
        return short * (1 - GAIN.get(option.pattern, 0.5) * (option.sparsity or 0.5)) * 1.05

    def narrow_ms(self, name, *, rows, columns):
        self.calls["narrow"] += 1
        return self._size(name) * rows * columns

    def whole(self, masks):
        self.calls["whole"] += 1
        if self.interrupt_at == "whole" and self.calls["whole"] > 1:
            raise KeyboardInterrupt
        total, held = self.compiled * self.rest, 0.0
        narrower = {name: masks[reader][0].density for reader in masks for name in self.writers.get(reader, ())}
        for name in self.targets:
            size = self._size(name)
            option = masks[name][0] if name in masks else None
            short = 1.0 if option is None or option.precision is None else 1 / SHORTER
            if name in narrower:
                total += self.slower * size * narrower[name] * short
                held += size * narrower[name] * (1.0 if short == 1 else 0.25)
                continue
            if name not in masks or name in self.always_dense:
                total, held = total + self.compiled * size, held + size
                continue
            if option.pattern == "channels":
                total += self.slower * size * option.density * short
                held += size * option.density * (1.0 if short == 1 else 0.25)
            else:
                total += self.slower * self.option_ms(name, option)
                held += size * option.density * (1.0 if option.precision is None else 0.25)
        dense = frozenset(masks) & self.always_dense
        return Whole(self.given_ms(), total, self.given_ms() / total, 0.004 * held, dense)
