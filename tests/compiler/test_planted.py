"""An exception in any step of a compilation costs speed: the step before it is what runs, and the report says so."""

import pytest
import torch

import sparta
from compiler import nets
from compiler.clocks import Clock, compiled, plain_cost
from sparta.compiler.run.kernel_module import KernelModule

pytestmark = pytest.mark.usefixtures("forced", "own_stores")


class Planted(Exception):  # noqa: N818 - of no kind that anyone expects
    """What nobody foresaw."""


def plant(monkeypatch, place, error=Planted):
    def fail(*_args, **_kwargs):
        raise error("planted")

    monkeypatch.setattr(place, fail)


STEPS = [
    ("sparta.compiler.job.derive", "nothing was propagated: Planted: planted"),
    ("sparta.compiler.job.reduced_program", "nothing was cut out: Planted: planted"),
    ("sparta.compiler.job.fold_batch_norms", "no BatchNorm was folded: Planted: planted"),
    ("sparta.compiler.job.fold_constants", "no mask was folded: Planted: planted"),
    ("sparta.compiler.job.with_operators", "attention, products and experts stay as they are: Planted: planted"),
    ("sparta.compiler.job.partition", "no layer was looked at: Planted: planted"),
    ("sparta.compiler.job.size_samples", "no layer was looked at: Planted: planted"),
    ("sparta.compiler.choose.precision.Calibration.quantized", "no layer runs in int8: Planted: planted"),
    ("sparta.compiler.job.choose_layers", "no layer was chosen for: Planted: planted"),
    ("sparta.compiler.choose.layers.tune_kernel", "dense: measuring failed (Planted: planted)"),
    ("sparta.compiler.choose.workshop.KernelModule.of", "dense: the kernel does not run (Planted: planted)"),
    ("sparta.compiler.choose.end_to_end.Trim.trimmed", "choosing end to end failed (Planted: planted)"),
    ("sparta.compiler.choose.judge.fastest", "choosing end to end failed (Planted: planted)"),
    ("sparta.compiler.choose.workshop.Workshop.layers_alone", "choosing end to end failed (Planted: planted)"),
    ("sparta.compiler.run.kernel_module.KernelModule.forward", "dense: the kernel does not run (Planted: planted)"),
    ("sparta.compiler.choose.workshop.combined", "choosing end to end failed (Planted: planted)"),
]


@pytest.mark.parametrize("net", [nets.Mlp, nets.Cnn])
@pytest.mark.parametrize(("place", "line"), STEPS, ids=[place for place, _ in STEPS])
def test_any_exception_in_a_step_falls_back_and_is_told(monkeypatch, place, line, net):
    model = nets.pruned(net())
    x = torch.randn(6, 32) if net is nets.Mlp else torch.randn(2, 3, 16, 16)
    expected = model(x).detach()
    plant(monkeypatch, place)
    fast = compiled(model, x, Clock(plain_cost()))
    torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
    assert line in fast.report.full
    assert fast.report.certificate.passed


def test_a_rule_that_fails_leaves_the_spec_to_the_layers(monkeypatch):
    plant(monkeypatch, "sparta.propagation.engine._forward")
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = compiled(model, x, Clock(plain_cost()))
    assert "nothing was propagated" in fast.report.full
    assert all(layer.sparse for layer in fast.report.plan.layers)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_masked_spec_holds_without_propagation(monkeypatch):
    model, x = nets.Mlp().eval(), torch.randn(6, 32)
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.8)
    plant(monkeypatch, "sparta.compiler.job.derive")
    fast = compiled(model, x, Clock(plain_cost()), spec=spec)
    spec.apply(model)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_one_kernel_that_does_not_run_leaves_the_others(monkeypatch):
    made = KernelModule.of

    def of(subgraph, choices):
        if subgraph.name == "second":
            raise Planted("planted")
        return made(subgraph, choices)

    monkeypatch.setattr("sparta.compiler.choose.workshop.KernelModule.of", of)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = compiled(model, x, Clock(plain_cost()))
    assert set(fast.kernels) == {"first.weight_kernel", "last.weight_kernel"}
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_what_is_remembered_and_does_not_run_any_more_is_searched_for_again(monkeypatch):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    compiled(model, x, Clock(plain_cost()))
    plant(monkeypatch, "sparta.compiler.choose.end_to_end.Contest.again")
    fast = compiled(model, x, Clock(plain_cost()))
    assert "what was remembered does not run: Planted: planted" in fast.report.full
    assert fast.report.speedup == pytest.approx(2.5)


@pytest.mark.parametrize(
    "place", ["sparta.compiler.job.derive", "sparta.compiler.job.partition", "sparta.compiler.job.choose_layers"]
)
def test_an_interrupt_outside_of_measuring_comes_through(monkeypatch, place):
    plant(monkeypatch, place, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        compiled(nets.pruned(nets.Mlp()), torch.randn(6, 32), Clock(plain_cost()))


def test_wrong_arguments_raise_as_they_are():
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    with pytest.raises(sparta.errors.SpartaError):
        sparta.compile(model, x, spec=sparta.Spec({"nowhere.weight": sparta.TeSA.dense((2, 2))}))
    with pytest.raises((sparta.errors.SpartaError, RuntimeError)):
        sparta.compile(model, torch.randn(6, 31))
