"""A report made by hand, with all that a report can hold."""

from sparta.compiler.certificate import Certificate
from sparta.compiler.plan import EndToEnd, LayerPlan, Plan
from sparta.compiler.report import Report, Totals
from sparta.specialize.tuning.select import Choice
from sparta.specialize.tuning.store import Entry


def layer(name: str, dense_ms: float, ms: float, *, sparse: bool = True, why: str = "") -> LayerPlan:
    """Return a layer that runs sparse, or dense with a reason."""
    entry = Entry("cpu", {}, ms, dense_ms, 128)
    if sparse:
        choice = Choice("cpu", {"tile": "panel:4:1:1:0:0"}, why or f"{dense_ms / ms:.2f}x dense", entry)
    else:
        choice = Choice("dense", {}, why or "dense: the best candidate reached 0.80x", entry)
    grid = ((0.1, 0.2), (0.0, 1.0))
    return LayerPlan(name, "linear", "block 4×1", 0.1, (64, 64), {128: choice}, 1000, 100, ms / dense_ms, picture=grid)


def made(*, ratio: float | None = 2.63, layers: int = 2, notes: tuple[str, ...] = ()) -> Report:
    """Return a report of a model with so many layers; without a ratio its timing was unstable."""
    plans = tuple(layer(f"encoder.{n}.up", 2.0 + n, 0.5 + n, sparse=n % 3 != 2) for n in range(layers))
    times = {} if ratio is None else {"model as given": 0.071, "sparse": 0.027}
    reason = "timing unstable (load 17 on 2 cores): no ratio is claimed" if ratio is None else "sparse: 2.63x"
    whole = EndToEnd(milliseconds=times, reason=reason, chosen="" if ratio is None else "sparse", ratio=ratio)
    totals = Totals(1000, 100, 8 * 2**20, 2**20, 2000, 200, 1.5)
    certificate = Certificate((0, 1), "float32", 1e-4, 2.5e-7, 3e-7, 1, passed=True)
    return Report(Plan(plans, whole), totals, certificate, notes, {"machine": "a processor", "threads": "2 threads"})
