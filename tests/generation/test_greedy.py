"""Greedy tokens that C++ decodes by itself are those of transformers' own loop, and end where it ends."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, TextStreamer

import sparta
from generation.language_models import pruned

GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def both():
    model = pruned("llama")
    return model, sparta.compile(model, torch.randint(3, 96, (1, 6)), tune="off")


@pytest.fixture
def calls(both, monkeypatch):
    """What the program is called for: steps of forward, and runs of tokens."""
    program, seen = both[1].program, []

    def watched(name):
        real = getattr(program, name)

        def call(*args):
            seen.append(name)
            return real(*args)

        monkeypatch.setattr(program, name, call)

    watched("step")
    watched("follow")
    return seen


def generated(both, ids, mask=None, **ways):
    mask = torch.ones_like(ids) if mask is None else mask
    return [each.generate(ids, attention_mask=mask, **{**GREEDY, **ways}) for each in both]


def test_runs_of_tokens_are_one_call(both, ids, calls):
    expected, found = generated(both, ids[:1])
    assert torch.equal(expected, found)
    assert calls == ["step", "follow", "follow", "follow"]  # the prompt, and 39 tokens by 16


@pytest.mark.parametrize("count", [1, 2, 17, 18])
def test_any_number_of_tokens(both, ids, count):
    assert torch.equal(*generated(both, ids, max_new_tokens=count))


def test_sequences_that_are_padded(both, ids):
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert torch.equal(*generated(both, torch.where(mask == 0, 0, ids), mask))


@pytest.mark.parametrize("at", [0, 1, 9, 16])
def test_a_sequence_ends_with_its_token_and_is_padded_from_there(both, ids, at):
    free = generated(both, ids, eos_token_id=None)[0][:, ids.shape[1] :]
    expected, found = generated(both, ids, eos_token_id=[int(free[0, at]), 95])
    assert torch.equal(expected, found)
    expected, found = generated(both, ids[:1], eos_token_id=int(free[0, at]))
    assert torch.equal(expected, found)
    first = (free[0] == free[0, at]).nonzero()[0]
    assert found.shape[1] == ids.shape[1] + int(first) + 1


def test_a_cache_that_is_given_holds_what_was_decoded(both, ids):
    free = generated(both, ids[:1], eos_token_id=None)[0][0, ids.shape[1] :]
    lengths = []
    for each in both:
        cache = DynamicCache(config=each.config)
        found = generated([each], ids[:1], eos_token_id=int(free[7]), past_key_values=cache)[0]
        lengths.append(cache.get_seq_length())
        again = generated([each], found, eos_token_id=None, past_key_values=cache, max_new_tokens=3)[0]
        lengths.append(again.tolist())
    assert lengths[:2] == lengths[2:]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_find_the_same_tokens(both, ids, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(*generated(both, ids))
    finally:
        torch.set_num_threads(before)


def test_streamed_tokens_come_one_by_one(both, ids, calls):
    class Counting(TextStreamer):
        def __init__(self):
            self.sizes, self.ended = [], False

        def put(self, value):
            self.sizes.append(value.numel())

        def end(self):
            self.ended = True

    streamer = Counting()
    generated(both[1:], ids[:1], streamer=streamer, max_new_tokens=5)
    assert streamer.sizes == [ids.shape[1], 1, 1, 1, 1, 1]
    assert streamer.ended
    assert calls.count("follow") == 4


def test_what_transformers_must_see_is_left_to_it(both, ids, calls):
    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    expected, found = generated(both, ids[:1], logits_processor=[Nothing()])
    assert torch.equal(expected, found)
    generated(both[1:], ids[:1], do_sample=True)
    generated(both[1:], ids[:1], return_dict_in_generate=True)
    assert set(calls) == {"step"}


def test_the_first_of_equal_logits_is_taken(ids):
    model = pruned("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    fast = sparta.compile(model, ids, tune="off")
    expected, found = generated((model, fast), ids, max_new_tokens=4)
    assert torch.equal(expected, found)
    assert bool((found[:, ids.shape[1] :] == 0).all())


def test_a_cache_is_copied_and_pickled_with_what_it_holds(both, ids):
    model, fast = both
    cache = fast(ids).past_key_values
    fast(ids[:, :1], past_key_values=cache)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):  # noqa: S301 - our own
        assert other.get_seq_length() == ids.shape[1] + 1
        assert torch.equal(other.layers[1].values, cache.layers[1].values)
        fast(ids[:, :2], past_key_values=other)
        assert other.get_seq_length() == ids.shape[1] + 3
    assert cache.get_seq_length() == ids.shape[1] + 1
    expected = model(torch.cat([ids, ids[:, :1], ids[:, 2:4]], 1)).logits[:, -2:]
    torch.testing.assert_close(fast(ids[:, 2:4], past_key_values=cache).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_cache_that_is_reset_or_goes_back_is_filled_again(both, ids):
    model, fast = both
    cache = fast(ids).past_key_values
    before = cache.layers[0].keys.clone()
    for _ in range(3):
        fast(ids[:, :2], past_key_values=cache)
        cache.crop(-2)
    assert torch.equal(cache.layers[0].keys, before)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.layers[0].keys is None  # and not a tensor of zeros, whatever layers of transformers do
    found = fast(ids, past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids).logits, atol=1e-4, rtol=1e-4)
