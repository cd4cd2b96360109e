"""Time is real optimizer steps: accumulation, skipped steps, closures, wrappers, compiled steps, plain steps after."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from create.models import CNN, MODELS, loss_of, prunable, sparsity, take_steps
from sparta.create import Manager, initialize, modifier_named
from sparta.errors import ValueRangeError

QUICK = {"num_epochs": 4, "sparsity": 0.8}
STEPS = 4


def begin(model, optimizer, steps=STEPS, **options):
    return initialize(model, optimizer, steps, quantization=False, recipe_variables=QUICK, **options)


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


# ---------------------------------------------------------------------- the optimizer stays an optimizer


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_optimizer_comes_back_as_itself_and_schedulers_take_it(model):
    model = model()
    optimizer = Adam(model.parameters(), lr=0.01)
    manager, returned = begin(model, optimizer, lr=None)
    assert returned is optimizer
    assert isinstance(returned, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(returned, 16)
    for step in range(16):
        take_steps(model, returned, 1, step)
        schedule.step()
    assert manager.epoch == 4.0
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)


def test_copies_of_the_optimizer_are_plain():
    model = CNN()
    manager, optimizer = begin(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    take_steps(model, optimizer, 1)
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):  # noqa: S301 - our own bytes
        twin.step()
    assert manager.step == 1
    take_steps(model, optimizer, 1)
    assert manager.step == 2


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_every_kind_of_step_is_heard(options):
    model = CNN()
    manager, optimizer = begin(model, AdamW(model.parameters(), lr=0.01, **options))
    take_steps(model, optimizer, 4 * STEPS)
    assert manager.epoch == 4.0
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer in name, with the real one inside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_a_wrapped_optimizer_is_seen_through_and_returned_as_given():
    model = CNN()
    wrapper = Wrapper(SGD(model.parameters(), lr=0.1))
    manager, returned = begin(model, wrapper)
    assert returned is wrapper
    take_steps(model, returned, STEPS)
    assert manager.epoch == 1.0


def test_what_is_no_optimizer_is_refused():
    model = CNN()
    with pytest.raises(ValueRangeError, match="optimizer is a list"):
        begin(model, list(model.parameters()))
    with pytest.raises(ValueRangeError, match="model is a function"):
        begin(lambda x: x, SGD(model.parameters(), lr=0.1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_step_runs_the_recipe_too():
    plain, compiled = CNN(), CNN()
    managers = []
    for model, compile_ in ((plain, False), (compiled, True)):
        manager, optimizer = begin(model, SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9))
        managers.append(manager)
        step = torch.compile(optimizer.step, backend="eager") if compile_ else optimizer.step
        for count in range(3):
            optimizer.zero_grad()
            loss_of(model, count).backward()
            step()
    assert [manager.step for manager in managers] == [3, 3]
    for one, two in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one == 0, two == 0)
        assert torch.allclose(one, two)


# ---------------------------------------------------------------------- closures


@pytest.mark.parametrize("name", ["magnitude", "movement", "mfac"])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_is_the_same_as_a_backward_pass_before(name, keyword):
    plain, closed = CNN(), CNN()
    _, optimizer = begin(plain, SGD(plain.parameters(), lr=0.1, momentum=0.9), pruning=name)
    take_steps(plain, optimizer, 3 * STEPS)
    _, optimizer = begin(closed, SGD(closed.parameters(), lr=0.1, momentum=0.9), pruning=name)
    for step in range(3 * STEPS):
        losses = []

        def closure(step=step, losses=losses):
            optimizer.zero_grad()
            losses.append(loss_of(closed, step))
            losses[-1].backward()
            return losses[-1]

        returned = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert len(losses) == 1
        assert returned is losses[0]
    assert same(plain, closed)


def test_an_optimizer_that_calls_its_closure_again_can():
    model = CNN()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, lr=0.1)
    manager = Manager([modifier_named("GlobalMagnitudePruning")(final_sparsity=0.8, end_epoch=1)])
    manager.attach(model, optimizer, 4)
    calls = itertools.count()

    def closure():
        next(calls)
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert next(calls) > 4
    assert manager.epoch == 1.0
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)


# ---------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_accumulation_gives_the_same_schedule(model):
    traces = []
    for accumulate in (1, 2, 4):
        trained = model()
        optimizer = SGD(trained.parameters(), lr=0.1)
        manager, _ = begin(trained, optimizer, STEPS * accumulate, accumulation_steps=accumulate)
        trace = []
        for batch in range(4 * STEPS * accumulate):
            loss_of(trained, batch).backward()
            if (batch + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                trace.append((manager.epoch, optimizer.param_groups[0]["lr"], manager.spec().density))
        traces.append(trace)
    assert traces[0] == traces[1] == traces[2]
    assert traces[0][-1][0] == 4.0


def test_accumulation_that_does_not_divide_an_epoch_is_refused_with_the_fix():
    model = CNN()
    with pytest.raises(ValueRangeError, match="97 if it drops the rest, 98 if not"):
        begin(model, SGD(model.parameters(), lr=0.1), 391, accumulation_steps=4)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, None])
def test_epochs_without_steps_are_refused(steps):
    model = CNN()
    with pytest.raises(ValueRangeError, match="steps_per_epoch is"):
        begin(model, SGD(model.parameters(), lr=0.1), steps)


# ---------------------------------------------------------------------- mixed precision


def scaled_step(model, optimizer, scaler, step, *, overflow=False):
    optimizer.zero_grad()
    loss = loss_of(model, step)
    scaler.scale(loss).backward()
    if overflow:
        next(model.parameters()).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["magnitude", "movement", "mfac", "rigl"])
def test_steps_that_a_scaler_skips_take_no_time(fused, name):
    model, twin = CNN(), CNN()
    with torch.no_grad():  # statistics of a forward pass are not undone by a skipped step
        model.norm.momentum = twin.norm.momentum = 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000, backoff_factor=1.0 - 1e-9)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    manager, returned = begin(model, optimizer, scaler=scaler, pruning=name)
    assert returned is scaler
    plain = AdamW(twin.parameters(), lr=0.01, fused=fused)
    begin(twin, plain, pruning=name)
    for step in range(2 * STEPS):
        scaled_step(model, optimizer, scaler, step, overflow=True)
        assert manager.step == step, "skipped"
        scaled_step(model, optimizer, scaler, step)
        assert manager.step == step + 1, "taken"
        take_steps(twin, plain, 1, step)
    gone = {n: w == 0 for n, w in prunable(model).items()}
    assert all(torch.equal(gone[n], w == 0) for n, w in prunable(twin).items()), "the same masks as without a scaler"


def test_the_scaler_is_still_a_scaler():
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    manager, scaler = begin(model, optimizer, scaler=scaler)
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()
    scaled = model.fc2.weight.grad.clone()
    scaler.unscale_(optimizer)
    assert torch.allclose(model.fc2.weight.grad * 8, scaled)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert manager.step == 1
    with pytest.raises(ValueRangeError, match="without `step`"):
        begin(CNN(), optimizer, scaler=object())


# ---------------------------------------------------------------------- the end


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_steps_after_the_end_are_plain_steps(model):
    model = model()
    optimizer = SGD(model.parameters(), lr=0.1)
    manager, optimizer = begin(model, optimizer)
    take_steps(model, optimizer, 4 * STEPS)
    manager.finalize()
    assert sparsity(model) == pytest.approx(0.8, abs=0.01)
    rate = optimizer.param_groups[0]["lr"] = 0.05
    twin = copy.deepcopy(model)
    plain = SGD(twin.parameters(), lr=0.05)
    take_steps(model, optimizer, 3)
    take_steps(twin, plain, 3)
    assert same(model, twin)
    assert optimizer.param_groups[0]["lr"] == rate
    assert manager.step == 4 * STEPS
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    manager.finalize()  # again: nothing left to do


def test_a_run_that_lost_some_steps_is_completed():
    """Steps that a scaler skipped are missing at the end of the last epoch."""
    model = CNN()
    optimizer = SGD(model.parameters(), lr=0.1)
    manager = Manager([modifier_named("GlobalMagnitudePruning")(final_sparsity=0.8, end_epoch=2)])
    manager.attach(model, optimizer, STEPS)
    take_steps(model, optimizer, 2 * STEPS - 2)
    assert sparsity(model) < 0.799
    manager.finalize()
    assert sparsity(model) == pytest.approx(0.8, abs=1e-3)


def test_a_run_that_stopped_early_stays_as_it_is_and_says_so():
    model = CNN()
    manager, optimizer = begin(model, SGD(model.parameters(), lr=0.1))
    take_steps(model, optimizer, 2)
    before = sparsity(model)
    with pytest.warns(UserWarning, match="ends at epoch 0.5 of 4, before GlobalMagnitudePruning did"):
        manager.finalize()
    assert sparsity(model) == before


# ---------------------------------------------------------------------- names under wrappers


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["dp", "compile"])
def test_names_are_those_of_the_bare_model(model, wrap):
    model = model()
    wrapped = wrap(model)
    name = next(iter(prunable(model)))
    entry = modifier_named("MagnitudePruning")(params=[name], final_sparsity=0.5, end_epoch=1)
    manager = Manager([entry])
    optimizer = SGD(wrapped.parameters(), lr=0.1)
    manager.attach(wrapped, optimizer, STEPS)
    take_steps(model, optimizer, STEPS)
    weight = prunable(model)[name]
    assert int((weight == 0).sum()) == weight.numel() // 2
    assert list(manager.spec()) == [name]


def test_a_recipe_counted_in_steps_runs():
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = """
    modifiers:
      - EpochRange: {start_epoch: 0.0, end_epoch: 2.0}
      - MagnitudePruning: {init_sparsity: 0.0, final_sparsity: 0.5, end_epoch: 6 steps, update_frequency: 1 steps}
    """
    _, optimizer = initialize(model, optimizer, 4, recipe=recipe)
    for _ in range(7):
        optimizer.zero_grad()
        model(torch.randn(3, 16)).square().mean().backward()
        optimizer.step()
    assert (model.weight == 0).sum() == 128
