"""Steps that are replayed: the same tokens as without, over one static cache, and nothing else is taken for a step."""

import copy

import pytest
import torch

from sparta.generation import graphs
from sparta.generation.graphs import DecodeGraph, with_static_cache
from sparta.generation.model import Compiled, compiled_class, shared_copy
from sparta.generation.trials import replayed_call

transformers = pytest.importorskip("transformers")


class Replayed:
    """What stands for a graph on the CPU: it runs a call again and writes to the memory of the first result."""

    def __init__(self, call):
        self.call, self.result = call, call()

    def replay(self):
        self.result.copy_(self.call())


def recorded(call, *_held):
    call()  # as where a graph is recorded, the call is run once before
    for layer in Replayed.cache.layers:
        layer.cumulative_length.sub_(1)
    graph = Replayed(call)
    return graph, graph.result


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    fast = shared_copy(made)
    fast.__class__ = compiled_class(type(made))
    return made, fast


@pytest.fixture
def model(compiled, monkeypatch):
    made, fast = compiled
    output = transformers.modeling_outputs.CausalLMOutputWithPast
    object.__setattr__(fast, "_sparta", Compiled(output=output, graph=DecodeGraph()))
    monkeypatch.setattr(graphs, "_on_device", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr(graphs, "recorded", recorded)
    plain = DecodeGraph._record

    def record(self, forward, cache, leaves, structure):
        Replayed.cache = cache
        return plain(self, forward, cache, leaves, structure)

    monkeypatch.setattr(DecodeGraph, "_record", record)
    return made, fast


@pytest.mark.parametrize("padded", [False, True])
def test_the_same_tokens_as_without(model, padded):
    made, fast = model
    prompt = torch.randint(3, 96, (2, 7))
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :3] = 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    assert torch.equal(fast.generate(prompt, **options), made.generate(prompt, **options))
    assert fast._sparta.graph.replays == 9  # the prompt gives a token, and two steps come before one is recorded
    assert fast._sparta.graph._recorded is None


def test_sampling_draws_the_same(model):
    made, fast = model
    prompt = torch.randint(3, 96, (1, 5))
    options = {"max_new_tokens": 10, "do_sample": True, "attention_mask": torch.ones_like(prompt)}
    found = []
    for each in (made, fast):
        torch.manual_seed(1)
        found.append(each.generate(prompt, **options))
    assert torch.equal(*found)
    assert fast._sparta.graph.replays > 0


def test_a_step_that_is_timed_leaves_the_cache_as_it_was(model):
    made, fast = model
    ids = torch.randint(3, 96, (2, 6))
    call = replayed_call(fast, {"input_ids": ids})
    first = call()
    torch.testing.assert_close(call(), first)
    expected = made(torch.cat([ids, ids[:, -1:]], 1)).logits[:, -1:]
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_recorded_runs_as_it_is(model, monkeypatch):
    made, fast = model

    def fails(call, *_held):
        call()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "recorded", fails)
    prompt = torch.randint(3, 96, (1, 5))
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(fast.generate(prompt, **options), made.generate(prompt, **options))
    assert "not permitted" in fast._sparta.graph.problem
    assert not fast._sparta.graph.replays
    assert not copy.deepcopy(fast._sparta).graph.problem  # a copy may be on another device


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"max_new_tokens": 3}, {"max_new_tokens": 64, "num_beams": 2}, {"max_new_tokens": 64, "use_cache": False},
        {"max_new_tokens": 64, "past_key_values": "a cache"}, {"max_new_tokens": 64, "cache_implementation": "dynamic"},
        {"max_new_tokens": 64, "assistant_model": "another"}, {"max_new_tokens": 64, "disable_compile": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_else_is_asked_for_stays(asked):
    assert with_static_cache(transformers.GenerationConfig(), asked) == asked


def test_a_generation_config_of_the_callers_is_not_changed():
    own = transformers.GenerationConfig(max_new_tokens=64)
    found = with_static_cache(transformers.GenerationConfig(), {"generation_config": own})
    assert found["generation_config"].cache_implementation == "static"
    assert own.cache_implementation is None
    assert with_static_cache(own, {"max_new_tokens": 64})["cache_implementation"] == "static"
