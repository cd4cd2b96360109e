"""Prompts that are replayed: filled up on the right, they give what the model's own code gives, and their cache."""

import copy
from types import SimpleNamespace

import pytest
import torch

from generation.language_models import SIZES, STACK, pruned
from sparta.errors import CheckError
from sparta.generation import api, prompts, recording
from sparta.generation.graphs import DecodeGraph
from sparta.generation.model import Compiled, compiled_class, shared_copy
from sparta.generation.prompts import PromptGraphs, filled_length
from sparta.generation.recording import let_replay, prompts_agree

transformers = pytest.importorskip("transformers")


prompts_fill = prompts._fill


class Replayed:
    """What stands for a graph on the CPU: it runs a call again and writes to the memory of the first results."""

    def __init__(self, call):
        self.call = call
        self.logits, self.memory = call()

    def replay(self):
        logits, memory = self.call()
        self.logits.copy_(logits)
        for old, new in zip(self.memory, memory, strict=True):
            for mine, fresh in zip(old, new, strict=True):
                mine.copy_(fresh)


def recorded(call, *_held):
    call()  # as where a graph is recorded, the call is run once before
    graph = Replayed(call)
    return graph, (graph.logits, graph.memory)


@pytest.fixture(autouse=True)
def _stands_for_cuda(monkeypatch):
    monkeypatch.setattr(prompts, "can_read", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr(prompts, "recorded", recorded)


def twins(name="qwen2"):
    """Return a model and its compiled twin, which replays prompts."""
    return twins_of(pruned(name))


def twins_of(made):
    fast = shared_copy(made)
    fast.__class__ = compiled_class(type(made))
    output = transformers.modeling_outputs.CausalLMOutputWithPast
    held = Compiled(output=output, graph=DecodeGraph(problem="none on the CPU"), prompts=PromptGraphs(fast.config))
    object.__setattr__(fast, "_sparta", held)
    return made, fast


@pytest.mark.parametrize("tokens", range(1, 700, 7))
def test_lengths_are_few_and_near(tokens):
    length = filled_length(tokens)
    assert tokens <= length <= max(16, 1.25 * tokens)
    assert filled_length(length) == length


def test_there_are_few_lengths():
    assert len({filled_length(tokens) for tokens in range(1, 1025)}) <= 25


@pytest.mark.parametrize("static", [False, True])
def test_logits_and_cache_are_those_of_the_model(static):
    made, fast = twins()
    for number, tokens in enumerate((9, 7, 16, 3, 30, 32, 29)):
        ids = torch.randint(3, 96, (2, tokens), generator=torch.Generator().manual_seed(tokens))
        found = []
        for model in (made, fast):
            cache = transformers.StaticCache(config=made.config, max_cache_len=48) if static else None
            with torch.no_grad():
                first = model(ids, past_key_values=cache, logits_to_keep=1)
                more = model(ids[:, -1:], past_key_values=first.past_key_values)
            found.append((first.logits, more.logits))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        assert fast._sparta.prompts.replays == (0, 1, 2, 3, 3, 4, 5)[number]  # the first of a length runs as it is
    assert not fast._sparta.prompts.problem


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_generate_gives_the_same_tokens(name):
    made, fast = twins(name)
    options = {"max_new_tokens": 10, "do_sample": False}
    for tokens in (9, 12, 11):
        ids = torch.randint(3, 96, (2, tokens))
        given = {"attention_mask": torch.ones_like(ids), **options}
        assert torch.equal(fast.generate(ids, **given), made.generate(ids, **given))
    assert fast._sparta.prompts.replays == 2


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_padded_prompts_are_replayed_with_their_masks(name):
    made, fast = twins(name)
    for number, (tokens, padding) in enumerate(((9, 3), (11, 5), (16, 1), (7, 0), (13, 12))):
        ids = torch.randint(3, 96, (2, tokens))
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
        assert torch.equal(fast.generate(ids, **options), made.generate(ids, **options))
        with torch.no_grad():
            found = [m(ids, attention_mask=mask, logits_to_keep=1).logits for m in (made, fast)]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        assert fast._sparta.prompts.replays >= number
    assert not fast._sparta.prompts.problem


def test_static_caches_have_masks_of_their_length():
    made, fast = twins("llama")
    ids = torch.randint(3, 96, (2, 9))
    mask = torch.ones(2, 1, 9, 20, dtype=torch.bool).tril()
    mask[0, :, :, :4] = False
    mask[0, :, :4, 0] = True
    for opened in (False, True):
        mask[..., 15] = opened  # nobody is there: such a call is not understood
        before = fast._sparta.prompts.replays
        for _ in range(2):
            found = []
            for model in (made, fast):
                cache = transformers.StaticCache(config=made.config, max_cache_len=20)
                with torch.no_grad():
                    found.append(model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits)
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        assert (fast._sparta.prompts.replays > before) == (not opened)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logits_to_keep": 2},
        {"logits_to_keep": 1, "output_hidden_states": True},
        {"logits_to_keep": 1, "use_cache": False},
        {"logits_to_keep": 1, "attention_mask": torch.ones(1, 1, 9, 9)},
        {"logits_to_keep": 1, "attention_mask": {"full_attention": None, "sliding_attention": None}},
    ],
    ids=str,
)
def test_other_calls_run_as_they_are(asked):
    made, fast = twins()
    ids = torch.randint(3, 96, (1, 9))
    for _ in range(3):
        with torch.no_grad():
            expected, found = (model(ids, **asked) for model in (made, fast))
        torch.testing.assert_close(found.logits, expected.logits)
        assert (found.past_key_values is None) == (expected.past_key_values is None)
    assert not fast._sparta.prompts.replays


def test_positions_are_kept():
    made, fast = twins("llama")
    ids, positions = torch.randint(3, 96, (1, 9)), torch.arange(9)[None] * 2 + 1
    for _ in range(3):
        with torch.no_grad():
            found = [m(ids, position_ids=positions, logits_to_keep=1).logits for m in (made, fast)]
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert fast._sparta.prompts.replays == 2


def test_masks_that_hide_nothing_but_what_is_ahead_are_taken():
    made, fast = twins()
    ids = torch.randint(3, 96, (1, 9))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    for mask in (torch.ones(1, 9, dtype=torch.long), causal, {"full_attention": causal}, {"full_attention": None}):
        before = fast._sparta.prompts.replays
        for _ in range(2):
            with torch.no_grad():
                found = [m(ids, attention_mask=mask, logits_to_keep=1).logits for m in (made, fast)]
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        assert fast._sparta.prompts.replays > before


def test_a_cache_with_a_window_is_left_alone():
    config = transformers.MistralConfig(**SIZES, **STACK, num_key_value_heads=2, sliding_window=8)
    _, fast = twins_of(transformers.MistralForCausalLM(config).eval())
    ids = torch.randint(3, 96, (1, 9))
    with torch.no_grad():
        for _ in range(3):
            fast(ids, logits_to_keep=1)
    assert "does not keep every token" in fast._sparta.prompts.problem
    assert not fast._sparta.prompts.replays


def test_a_cache_that_holds_something_is_left_alone():
    made, fast = twins()
    ids = torch.randint(3, 96, (1, 9))
    for _ in range(3):
        found = []
        for model in (made, fast):
            with torch.no_grad():
                cache = model(ids).past_key_values
                found.append(model(ids, past_key_values=cache, logits_to_keep=1).logits)
        torch.testing.assert_close(found[1], found[0])
    assert not fast._sparta.prompts.replays


def test_there_are_no_positions_beyond_the_last():
    config = transformers.GPT2Config(**SIZES, n_embd=32, n_layer=1, n_head=4, n_positions=22)
    made, fast = twins_of(transformers.GPT2LMHeadModel(config).eval())
    for tokens, replays in ((21, 0), (15, 2)):  # filled up to 24 and 16
        ids = torch.randint(3, 96, (1, tokens))
        for _ in range(3):
            with torch.no_grad():
                found = [m(ids, logits_to_keep=1).logits for m in (made, fast)]
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        assert fast._sparta.prompts.replays == replays
    assert not fast._sparta.prompts.problem


def test_few_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(prompts, "_MOST_GRAPHS", 2)
    _, fast = twins()
    with torch.no_grad():
        for batch in (1, 2, 3):
            for _ in range(2):
                fast(torch.randint(3, 96, (batch, 9)), logits_to_keep=1)
    held = fast._sparta.prompts
    assert [key[0] for key in held._known] == [2, 3]
    assert held.replays == 3
    assert not copy.deepcopy(held)._known


def test_long_prompts_run_as_they_are(monkeypatch):
    monkeypatch.setattr(prompts, "_MOST_TOKENS", 31)
    _, fast = twins()
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randint(3, 96, (2, 9)), logits_to_keep=1)
    assert not fast._sparta.prompts.replays


class _Session:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_what_is_replayed_is_compared_first(monkeypatch):
    _, fast = twins()
    ids = torch.randint(3, 96, (1, 16))
    assert prompts_agree(fast, ids)
    assert prompts_agree(fast)
    assert prompts_agree(fast, torch.randint(3, 96, (2, 1500)))  # more than is replayed: a shorter one is tried
    monkeypatch.setattr(recording, "_let_steps", lambda *_, **__: "")
    session = _Session()
    let_replay(fast, {"input_ids": ids}, session, check=True)
    assert fast._sparta.prompts is not None
    monkeypatch.setattr(prompts, "_fill", lambda cache, memory: prompts_fill(cache, memory[::-1]))  # layers mixed up
    with pytest.raises(CheckError, match="differs"):
        prompts_agree(fast, ids)
    let_replay(fast, {"input_ids": ids}, session, check=True)
    assert fast._sparta.prompts is None
    assert "filled up" in session.notes[1]
    assert "differs" in session.notes[3]


@pytest.mark.parametrize("won", [False, True])
def test_prompts_are_replayed_where_that_is_faster(monkeypatch, won):
    _, fast = twins()
    compilation = SimpleNamespace(example={"input_ids": torch.randint(3, 96, (1, 9))}, session=_Session())
    monkeypatch.setattr(api, "timed", lambda calls: [call() for call in calls.values()])
    monkeypatch.setattr(api, "pairs_of", lambda _: SimpleNamespace(won=won))
    api._Compilation._choose_prompts(compilation, fast, fast._sparta.prompts)
    assert (fast._sparta.prompts is not None) == won
    assert bool(compilation.session.notes) != won


def test_an_example_that_is_not_replayed_decides_nothing(monkeypatch):
    monkeypatch.setattr(prompts, "_MOST_TOKENS", 31)
    _, fast = twins()
    compilation = SimpleNamespace(example={"input_ids": torch.randint(3, 96, (2, 30))}, session=_Session())
    api._Compilation._choose_prompts(compilation, fast, fast._sparta.prompts)
    assert fast._sparta.prompts is not None
