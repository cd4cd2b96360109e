"""The heart of propagation: on random graphs, no fact is ever wrong, and the compact model is the masked model."""

import os

import torch
from hypothesis import HealthCheck, assume, given, settings
from torch.func import functional_call
from torch.utils import _pytree as pytree

from propagation.random_graphs import Witness, random_models, random_sequences
from sparta.propagation import propagate
from sparta.propagation.compact import masked_tensors

# SPARTA_EXAMPLES=500 looks longer than CI can.
EXAMPLES = int(os.environ.get("SPARTA_EXAMPLES", "8"))
SLOW = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def check_facts(model, x, *, train=False):
    result = propagate(model, x, train=train)
    masked = masked_tensors(result.captured, result.facts)
    for _ in range(2):
        other = torch.randn_like(x) * 2
        expected = model(other)
        assume(bool(expected.isfinite().all()))  # what is known holds for finite values: inf times a zero is none
        with torch.no_grad():
            Witness(result, masked, scramble=False).run(other)
            scrambled = Witness(result, masked, scramble=True).run(other)
        torch.testing.assert_close(pytree.tree_leaves(scrambled)[0], expected, rtol=1e-6, atol=1e-9)
    return result


def check_compact(model, x, result):
    small = result.compact(allow_empty=True)
    other = torch.randn_like(x).requires_grad_()
    torch.testing.assert_close(small(other), model(other), rtol=1e-6, atol=1e-9)
    weight = torch.randn_like(model(other))
    (one,) = torch.autograd.grad((model(other) * weight).sum(), other)
    (two,) = torch.autograd.grad((small(other) * weight).sum(), other)
    torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-9)
    more = torch.cat([x, x[:1] + 1])
    torch.testing.assert_close(small(more), model(more), rtol=1e-6, atol=1e-9)
    if not any(bool((tesa.value.cells != 0).any()) for tesa in result.activations.values()):
        # Folded constants are frozen, and with them the parameters that they were made of.
        check_parameter_gradients(model, small, other.detach(), weight)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert all(p.numel() <= sizes[name] for name, p in small.named_parameters() if name in sizes)


def check_parameter_gradients(model, small, x, weight):
    (model(x) * weight).sum().backward()
    (small(x) * weight).sum().backward()
    dense = dict(model.named_parameters())
    for name, parameter in small.named_parameters():
        origin = small.mapping[name]
        if parameter.grad is None:
            continue
        live = parameter.detach() != 0
        torch.testing.assert_close(
            parameter.grad[live], origin.take(dense[origin.name].grad)[live], rtol=1e-6, atol=1e-9
        )
    model.zero_grad()


@SLOW
@given(random_models(images=False))
def test_vectors(drawn):
    model, x = drawn
    check_compact(model, x, check_facts(model, x))


@SLOW
@given(random_models(images=True))
def test_images(drawn):
    model, x = drawn
    check_compact(model, x, check_facts(model, x))


@SLOW
@given(random_sequences())
def test_sequences(drawn):
    model, x = drawn
    check_compact(model, x, check_facts(model, x))


@settings(SLOW, max_examples=max(1, EXAMPLES // 2))
@given(random_models(images=True))
def test_train_mode(drawn):
    """Batch norms with the batch's statistics: outputs, gradients and the running statistics afterwards."""
    model, x = drawn
    model.train()
    result = check_facts(model, x, train=True)
    model.zero_grad()
    check_compact(model, x, result)
    small, y = result.compact(allow_empty=True), torch.randn_like(x)
    model(y)
    small(y)
    state = dict(model.named_buffers())
    for name, buffer in small.named_buffers():
        if "running" in name:
            torch.testing.assert_close(buffer, small.mapping[name].take(state[name]), rtol=1e-6, atol=1e-9)


@settings(max_examples=6)
@given(random_models(images=False))
def test_propagation_is_deterministic_and_idempotent(drawn):
    model, x = drawn
    first, second = propagate(model, x), propagate(model, x)
    assert first.spec == second.spec
    masked = {name: first.spec[name].apply(p.detach()) for name, p in model.named_parameters() if name in first.spec}
    torch.testing.assert_close(functional_call(model, masked, (x,)), model(x), rtol=1e-6, atol=1e-9)
