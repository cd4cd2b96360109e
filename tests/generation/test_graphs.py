"""Steps that are replayed: the same tokens as without, over one static cache, and nothing else is taken for a step."""

import copy
import functools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import sparta
from generation.language_models import pruned
from sparta.generation import artifact, graphs, replayed
from sparta.generation.graphs import DecodeGraph, RecordedStep, with_static_cache
from sparta.generation.model import Compiled, compiled_class, shared_copy
from sparta.generation.trials import follows_itself, replayed_call

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
    return made, twin(made)


def twin(made):
    fast = shared_copy(made)
    fast.__class__ = compiled_class(type(made))
    replaying(fast)
    return fast


def replaying(fast):
    output = transformers.modeling_outputs.CausalLMOutputWithPast
    object.__setattr__(fast, "_sparta", Compiled(output=output, graph=DecodeGraph()))


@pytest.fixture
def model(compiled, monkeypatch):
    made, fast = compiled
    replaying(fast)
    for module in (graphs, replayed):
        monkeypatch.setattr(module, "can_read", lambda tensor: isinstance(tensor, torch.Tensor))
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


def follow(both, prompt, **options):
    """Return the tokens of a model and of its compiled twin, and how many steps transformers prepared for it."""
    made, fast = both
    prepared = []
    own = type(fast).prepare_inputs_for_generation

    @functools.wraps(own)
    def watched(self, *args, **kwargs):
        prepared.append(kwargs)
        return own(self, *args, **kwargs)

    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, **options}
    expected = made.generate(prompt, **given)
    patched = pytest.MonkeyPatch()
    patched.setattr("transformers.generation.utils.GenerationMixin.prepare_inputs_for_generation", watched)
    found = fast.generate(prompt, **given)
    patched.undo()
    return expected, found, len(prepared)


@pytest.mark.parametrize("count", [8, 20, 21])
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_tokens_follow_each_other(model, count, padded):
    prompt = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(count))
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :3] = 0
    expected, found, prepared = follow(model, prompt, max_new_tokens=count, attention_mask=mask, eos_token_id=95)
    assert torch.equal(expected, found)
    assert prepared == min(4, count)  # the prompt and three steps
    assert model[1]._sparta.graph.replays == count - 3
    assert model[1]._sparta.graph._recorded is None


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.usefixtures("model")
def test_masks_in_containers_open_too(name, padded):
    made = pruned(name)
    fast = twin(made)
    prompt = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :3] = 0
    expected, found, prepared = follow((made, fast), prompt, max_new_tokens=24, attention_mask=mask, eos_token_id=95)
    assert torch.equal(expected, found)
    assert prepared == 4
    assert fast._sparta.graph.replays == 21


def test_tensors_out_of_sight_are_not_recorded(model):
    _, fast = model
    ids = torch.randint(3, 96, (1, 6))
    call = replayed_call(fast, {"input_ids": ids})
    assert call is not None

    class Mask:
        """What flex attention takes, say."""

        def __init__(self):
            self.places = torch.ones(1, 7, dtype=torch.bool)

    named = {"input_ids": ids[:, -1:], "past_key_values": fast._sparta.graph._recorded.cache}
    assert fast._sparta.graph.step(None, named) is not None
    for mask in (Mask(), [Mask()]):
        for _ in range(4):  # after two, one would be recorded
            assert fast._sparta.graph.step(None, {**named, "attention_mask": mask}) is None
    assert not fast._sparta.graph.problem


@pytest.mark.parametrize("at", [0, 2, 4, 20])
def test_sequences_end_with_their_token_and_are_padded_from_there(model, at):
    prompt = torch.randint(3, 96, (3, 5), generator=torch.Generator().manual_seed(2))
    tokens = model[0].generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=95)
    ends = [int(row[min(5 + at + more, 34)]) for more, row in enumerate(tokens)]  # one for each sequence
    for chosen in (ends[0], ends):
        expected, found, _ = follow(model, prompt, max_new_tokens=30, eos_token_id=chosen, pad_token_id=0)
        assert torch.equal(expected, found)


def test_a_cache_holds_no_more_than_was_decoded(model):
    prompt = torch.randint(3, 96, (1, 5), generator=torch.Generator().manual_seed(4))
    tokens = model[0].generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=95)[0, 5:].tolist()
    at = next(i for i in range(4, 30) if tokens[i] not in tokens[:i])
    cache = transformers.StaticCache(config=model[1].config, max_cache_len=40)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": tokens[at], "past_key_values": cache}
    found = model[1].generate(prompt, attention_mask=torch.ones_like(prompt), disable_compile=True, **options)
    assert found.shape[1] == 5 + at + 1
    assert int(cache.get_seq_length()) == found.shape[1] - 1


def test_tokens_follow_in_the_mode_that_transformers_decodes_in(model, monkeypatch):
    _, fast = model
    seen, inside = [], []

    @contextmanager
    def decoding(self):
        inside.append(self)
        try:
            yield
        finally:
            inside.remove(self)

    again = RecordedStep.again
    prepare = type(fast).prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepared(self, *args, **kwargs):
        seen.append(bool(inside))
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(RecordedStep, "again", lambda self: seen.append(bool(inside)) or again(self))
    mixin = "transformers.generation.utils.GenerationMixin"
    monkeypatch.setattr(f"{mixin}.prepare_inputs_for_generation", prepared)
    monkeypatch.setattr(f"{mixin}._optimize_model_for_decode", decoding, raising=False)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 95}
    ids = torch.randint(3, 96, (1, 5), generator=torch.Generator().manual_seed(6))
    first = fast.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert seen == [False] + [True] * 12  # the prompt; three steps, the last of which is also replayed; and the others
    assert not inside
    monkeypatch.delattr(f"{mixin}._optimize_model_for_decode")  # as in older releases
    assert torch.equal(fast.generate(ids, attention_mask=torch.ones_like(ids), **options), first)


def test_what_changes_otherwise_is_left_to_transformers(model, monkeypatch):
    monkeypatch.setattr(replayed._Changes, "seen", classmethod(lambda *_: None))
    prompt = torch.randint(3, 96, (2, 7))
    expected, found, prepared = follow(model, prompt, max_new_tokens=12, eos_token_id=95)
    assert torch.equal(expected, found)
    assert prepared == 12


def test_changes_that_are_not_understood():
    ids = torch.zeros(2, 1, dtype=torch.long)
    counted = [{"input_ids": ids, "position_ids": torch.full((2, 1), at)} for at in (4, 5, 6)]
    assert len(replayed._Changes.seen(counted[-1], counted).counted) == 1
    jumps = [*counted[:2], {"input_ids": ids, "position_ids": torch.full((2, 1), 9)}]
    assert replayed._Changes.seen(jumps[-1], jumps) is None
    grows = [{"input_ids": ids, "attention_mask": torch.ones(2, at)} for at in (4, 5, 6)]
    assert replayed._Changes.seen(grows[-1], grows) is None
    assert replayed._Changes.seen({"input_ids": ids}, counted) is None
    opened = [{"input_ids": ids, "attention_mask": (torch.arange(8) < at).expand(2, 1, 1, 8)} for at in (4, 5, 6)]
    changes = replayed._Changes.seen({name: t.clone() for name, t in opened[-1].items()}, opened)
    changes.advance(torch.tensor([7, 8]))
    assert changes.masks[0][0][1, 0, 0].tolist() == (torch.arange(8) < 7).tolist()
    assert changes.ids[:, 0].tolist() == [7, 8]


def test_it_is_tried_whether_tokens_follow(model, monkeypatch):
    _, fast = model
    ids = torch.randint(3, 96, (1, 6))
    assert follows_itself(fast, {"input_ids": ids})
    monkeypatch.setattr(replayed._Changes, "advance", lambda *_: None)
    assert not follows_itself(fast, {"input_ids": ids})


@pytest.mark.parametrize(
    "settings", [{"eos_token_id": list(range(96))}, {"repetition_penalty": 1.3}], ids=["ends at once", "penalty"]
)
def test_a_trial_in_which_nothing_follows_is_none(model, monkeypatch, settings):
    _, fast = model
    own = transformers.GenerationConfig(**settings, pad_token_id=0)
    monkeypatch.setattr(fast, "generation_config", own)
    ids = torch.randint(3, 96, (1, 6))
    assert follows_itself(fast, {"input_ids": ids})
    assert fast.generation_config is own
    with monkeypatch.context() as patched:
        patched.setattr(replayed._Changes, "advance", lambda *_: None)
        assert not follows_itself(fast, {"input_ids": ids})
    monkeypatch.setattr(replayed._Changes, "seen", classmethod(lambda *_: None))
    assert not follows_itself(fast, {"input_ids": ids})


@pytest.mark.parametrize(
    "ways", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_beams_are_brought_back_to_the_memory_of_the_step(model, ways):
    made, fast = model
    prompt = torch.randint(3, 96, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 12, "attention_mask": torch.ones_like(prompt), **ways}
    seen = []
    again = RecordedStep.again

    def watched(self):
        held = [(layer.keys, layer.values) for layer in self.cache.layers]
        seen.append(all(a is c and b is d for (a, b), (c, d) in zip(held, self.memory, strict=True)))
        return again(self)

    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RecordedStep, "again", watched)
        for each in (made, fast):
            torch.manual_seed(1)
            found.append(each.generate(prompt, **options))
    assert torch.equal(*found)
    assert seen
    assert all(seen)
    assert fast._sparta.graph._recorded is None


def test_two_answers_at_a_time(model):
    made, fast = model
    prompts = [torch.randint(3, 96, (1, 4 + i), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 95}
    expected = [made.generate(p, attention_mask=torch.ones_like(p), **options) for p in prompts]

    def meanwhile(self):  # another answer is begun and ended between two tokens of this one
        RecordedStep.again = again
        try:
            other = prompts[1]
            assert torch.equal(fast.generate(other, attention_mask=torch.ones_like(other), **options), expected[1])
        finally:
            RecordedStep.again = meanwhile
        Replayed.cache = self.cache
        return again(self)

    again = RecordedStep.again
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RecordedStep, "again", meanwhile)
        found = fast.generate(prompts[0], attention_mask=torch.ones_like(prompts[0]), **options)
    assert torch.equal(found, expected[0])


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_another_answer_that_ends_before_a_step_is_recorded(model, monkeypatch, before, padded):
    steps = []
    own = DecodeGraph.step

    def step(self, forward, named):
        if named["input_ids"].shape[1] == 1:
            steps.append(named)
            if len(steps) == before:
                self.forget()  # as the end of another answer does
        return own(self, forward, named)

    monkeypatch.setattr(DecodeGraph, "step", step)
    prompt = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :3] = 0
    expected, found, prepared = follow(model, prompt, max_new_tokens=24, attention_mask=mask, eos_token_id=95)
    assert torch.equal(expected, found)
    assert prepared == 3 + before  # the prompt, and what came before, and three steps


def test_a_model_from_a_file_replays_its_steps(model, monkeypatch, tmp_path):
    made = pruned("gpt2")
    ids = torch.randint(3, 96, (1, 6))
    fast = sparta.compile(made, ids, tune="off")
    fast.save(tmp_path / "plain.sparta")
    fast._sparta.graph = DecodeGraph()
    fast.save(tmp_path / "model.sparta")
    assert sparta.load(tmp_path / "model.sparta")._sparta.graph is None  # on the CPU there are no graphs
    monkeypatch.setattr(artifact, "_has_graphs", lambda device: True)
    assert sparta.load(tmp_path / "plain.sparta")._sparta.graph is None
    again = sparta.load(tmp_path / "model.sparta")
    assert again._sparta.graph.follows
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(again.generate(ids, **options), made.generate(ids, **options))
    assert again._sparta.graph.replays > 0
    monkeypatch.setattr(replayed._Changes, "advance", lambda *_: None)
    again = sparta.load(tmp_path / "model.sparta")  # what the file says is tried where it is loaded
    assert not again._sparta.graph.follows
    assert torch.equal(again.generate(ids, **options), made.generate(ids, **options))


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


def test_only_what_is_on_the_current_device_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    here, there = (SimpleNamespace(is_cuda=True, device=torch.device("cuda", index)) for index in range(2))
    assert graphs.can_read(here)
    assert not graphs.can_read(there)
    assert not graphs.can_read(torch.ones(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not graphs.can_read(here)


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
        {}, {"max_new_tokens": 3}, {"max_new_tokens": 64, "use_cache": False},
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
