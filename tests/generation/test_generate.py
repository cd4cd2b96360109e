"""A compiled language model generates what the masked dense one does, in every way that transformers knows."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from transformers import DynamicCache, StoppingCriteria, TextStreamer

import sparta
from generation.language_models import MODELS, PROGRAMS, llama, pruned
from sparta.errors import SpartaError, ValueRangeError
from sparta.generation import compile_generator

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def both():
    model = pruned("llama")
    return model, sparta.compile(model, torch.randint(3, 96, (1, 6)), tune="off")


def attended(ids):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_output_class(name, ids):
    model = pruned(name)
    state = copy.deepcopy(model.state_dict())
    fast = sparta.compile(model, ids, tune="off")
    assert isinstance(fast, type(model))
    assert (fast.program is not None) == (name in PROGRAMS)
    assert torch.equal(model.generate(**attended(ids), **GREEDY), fast.generate(**attended(ids), **GREEDY))
    more = {"decoder_input_ids": ids[:, :3]} if model.config.is_encoder_decoder else {}
    expected, found = model(input_ids=ids, **more), fast(input_ids=ids, **more)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "ways",
    [
        {"num_beams": 3},
        {"do_sample": True, "top_k": 5},
        {"cache_implementation": "static"},
        {"num_return_sequences": 2, "num_beams": 2},
        {"use_cache": False},
        {"repetition_penalty": 1.3},
        {"prompt_lookup_num_tokens": 3, "input": 1},
        {"output_scores": True, "return_dict_in_generate": True, "input": 1},
    ],
    ids=lambda ways: next(iter(ways)),
)
def test_every_way_to_generate(both, ids, ways):
    ways = dict(ways)
    given = attended(ids[: ways.pop("input", 2)])
    results = []
    for model in both:
        torch.manual_seed(0)
        found = model.generate(**given, **{**GREEDY, **ways})
        results.append(found if isinstance(found, torch.Tensor) else found.sequences)
    assert torch.equal(*results)


def test_left_padding(both, ids):
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids = torch.where(mask == 0, 0, ids)
    model, fast = both
    assert torch.equal(
        model.generate(ids, attention_mask=mask, **GREEDY), fast.generate(ids, attention_mask=mask, **GREEDY)
    )
    alone = fast.generate(ids[:1, 4:], attention_mask=mask[:1, 4:], **GREEDY)
    assert torch.equal(fast.generate(ids, attention_mask=mask, **GREEDY)[0, 9:], alone[0, 5:])


def test_assisted_decoding_and_stop_criteria(both, ids):
    _, fast = both

    class AfterThree(StoppingCriteria):
        def __call__(self, input_ids, scores, **more):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 12)

    given = attended(ids[:1])
    stopped = [each.generate(**given, stopping_criteria=[AfterThree()], **GREEDY) for each in both]
    assert torch.equal(*stopped)
    assert stopped[0].shape[1] == 12
    helped = [each.generate(**given, assistant_model=fast, **GREEDY) for each in both]
    assert torch.equal(*helped)


def test_streamers(both, ids):
    class Tokens(TextStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value.flatten().tolist())

        def end(self):
            pass

    given, seen = attended(ids[:1]), []
    for each in both:
        streamer = Tokens()
        each.generate(**given, streamer=streamer, **GREEDY)
        seen.append(streamer.seen)
    assert seen[0] == seen[1]


def test_a_cache_goes_from_call_to_call_and_is_transformers_own(both, ids):
    model, fast = both
    cache, expected = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for start, end in ((0, 5), (5, 6), (6, 9)):
        left = fast(ids[:, start:end], past_key_values=cache).logits
        right = model(ids[:, start:end], past_key_values=expected).logits
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(cache.layers[1].keys, expected.layers[1].keys, atol=1e-4, rtol=1e-4)
    for each in (cache, expected):
        each.crop(-4)
        each.reorder_cache(torch.tensor([1, 0]))
    left, right = (m(ids[:, 5:7], past_key_values=c).logits for m, c in ((fast, cache), (model, expected)))
    torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_calls_that_only_the_models_code_takes(both, ids):
    model, fast = both
    asked = {"output_hidden_states": True, "use_cache": False}
    expected, found = model(ids, **asked), fast(ids, **asked)
    torch.testing.assert_close(found.hidden_states[-1], expected.hidden_states[-1], atol=1e-4, rtol=1e-4)
    # A cache that the program filled is one that the model's own code goes on with, and the other way round.
    cache = fast(ids).past_key_values
    more = fast(ids[:, :1], past_key_values=cache, output_hidden_states=True).logits
    torch.testing.assert_close(more, model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:], atol=1e-4, rtol=1e-4)
    last = fast(ids[:, :1], past_key_values=cache).logits
    both_more = torch.cat([ids, ids[:, :1], ids[:, :1]], 1)
    torch.testing.assert_close(last, model(both_more).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_embeddings_labels_and_kept_logits(both, ids):
    model, fast = both
    embeds = model.get_input_embeddings()(ids).detach()
    torch.testing.assert_close(fast(inputs_embeds=embeds).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fast(ids, labels=ids).loss, model(ids, labels=ids).loss, atol=1e-4, rtol=1e-4)
    for keep in (1, 4, 50):
        assert torch.allclose(fast(ids, logits_to_keep=keep).logits, model(ids, logits_to_keep=keep).logits, atol=1e-4)


def test_what_the_model_refuses_is_refused(both, ids):
    for model in both:
        with pytest.raises((RuntimeError, IndexError)):
            model(inputs_embeds=torch.randn(2, 3, 16))  # half of what a token has
        with pytest.raises(IndexError):
            model(torch.tensor([[96]]))
    end = int(both[0].generate(**attended(ids), max_new_tokens=1, do_sample=False)[0, -1])
    for model in both:  # a padding token that has no embedding, asked for when the first sequence has ended
        with pytest.raises(IndexError):
            model.generate(**attended(ids), max_new_tokens=6, do_sample=False, eos_token_id=end, pad_token_id=96)


def test_long_prompts_are_run_in_parts(both):
    ids = torch.randint(3, 96, (2, 130))
    model, fast = both
    torch.testing.assert_close(fast(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.allclose(fast(ids, logits_to_keep=60).logits, model(ids).logits[:, -60:], atol=1e-4)


@pytest.mark.parametrize("pattern", [sparta.Unstructured(), sparta.Block(16, 1), sparta.NM(2, 4), sparta.Block(4, 4)])
def test_patterns_and_int8(ids, pattern):
    model = pruned("llama", pattern, None if isinstance(pattern, sparta.NM) else 0.5)
    for precision in (None, "int8"):
        fast = compile_generator(model, ids, tune="off", precision=precision)
        assert fast.program is not None
        assert fast.report.certificate.passed
    # In int8 it is the rounded model that is met exactly.
    rounded = copy.deepcopy(model)
    rounded.lm_head = torch.nn.Linear(*fast.lm_head.matrix.shape[::-1], bias=False)  # no longer the embedding
    rounded.load_state_dict(fast.state_dict())
    torch.testing.assert_close(fast(ids).logits, rounded(ids).logits, atol=1e-4, rtol=1e-4)


def test_int8_tokens_are_those_of_the_rounded_model_in_real_numbers(ids):
    model = pruned("llama", sparta.Block(4, 1), 0.8)
    fast = sparta.compile(model, ids, tune="off", precision="int8")
    rounded = copy.deepcopy(model).double()
    rounded.lm_head.weight = torch.nn.Parameter(rounded.lm_head.weight.clone())  # no longer the embedding
    with torch.no_grad():
        for layer in rounded.modules():
            if isinstance(layer, torch.nn.Linear):
                step = layer.weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
                layer.weight.copy_((layer.weight / step).round() * step)
    found = fast.generate(**attended(ids), max_new_tokens=24, do_sample=False)
    with torch.no_grad():
        expected = rounded(found[:, :-1]).logits[:, ids.shape[1] - 1 :]
    chosen = expected.gather(2, found[:, ids.shape[1] :, None])[..., 0]
    assert float((expected.amax(2) - chosen).max()) < 1e-3 * float(expected.abs().max())


def test_a_spec_prunes_what_the_weights_have_not(ids):
    torch.manual_seed(0)
    model = llama()
    before = copy.deepcopy(model.state_dict())
    spec = sparta.Spec.from_pattern(model, sparta.Block(4, 1), 0.75)
    fast = sparta.compile(model, ids, spec, tune="off")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    spec.apply(model)
    torch.testing.assert_close(fast(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    assert fast.spec.density < 0.3


def test_scaled_positions(ids):
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    torch.manual_seed(0)
    model = llama(rope_parameters=scaling)
    fast = sparta.compile(model, ids, tune="off")
    assert fast.program is not None
    torch.testing.assert_close(fast(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_what_is_almost_such_a_decoder_is_found_out(ids):
    config = transformers.GraniteConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        logits_scaling=7.0,
        residual_multiplier=0.5,
    )
    model = transformers.GraniteForCausalLM(config).eval()
    fast = sparta.compile(model, ids, tune="off")
    assert fast.program is None
    assert any("no decode program" in note for note in fast.report.notes)
    torch.testing.assert_close(fast(ids).logits, model(ids).logits)


def test_auto_precision_stays_within_the_loss(ids):
    model = pruned("llama")
    assert compile_generator(model, ids, tune="off", precision="auto").lm_head.matrix.scales is not None
    strict = compile_generator(model, ids, tune="off", precision="auto", max_loss=1e-9)
    assert strict.lm_head.matrix.scales is None
    assert any("not in int8" in note for note in strict.report.notes)
    falling = compile_generator(model, ids, tune="off", precision="auto", metric=lambda m: float(m is model))
    assert falling.program is not None


def test_calibration_prompts_measure_what_int8_costs(ids):
    model = pruned("llama")
    prompts = [torch.randint(0, 96, ids.shape) for _ in range(3)]
    fast = sparta.compile(model, ids, tune="off", precision="int8", calibration=prompts)
    assert any("logits of 3 calibration batches differ" in note for note in fast.report.notes)
    for wrong in ([], ids, [{"input_ids": ids, "labels": ids}]):
        with pytest.raises(SpartaError, match="calibration"):
            sparta.compile(model, ids, tune="off", precision="int8", calibration=wrong)


def test_what_it_refuses(both, ids):
    _, fast = both
    with pytest.raises(ValueRangeError, match="train the original"):
        fast.train()
    with pytest.raises(ValueRangeError, match="dtype="):
        fast.half()
    assert fast.to("cpu") is fast
    with pytest.raises(ValueRangeError, match="can generate"):
        compile_generator(torch.nn.Linear(2, 2), ids)
    with pytest.raises(ValueRangeError, match="precision"):
        compile_generator(pruned("llama"), ids, precision="int4")
    with pytest.raises(ValueRangeError, match="does not take"):
        compile_generator(pruned("llama"), {"tokens_of": ids}, tune="off")


def test_copies_and_dense_state(both, ids):
    model, fast = both
    twin = copy.deepcopy(fast)
    assert torch.equal(twin.generate(**attended(ids), **GREEDY), fast.generate(**attended(ids), **GREEDY))
    state = fast.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value), key


def test_calls_from_several_threads(both, ids):
    _, fast = both
    prompts = [torch.randint(3, 96, (1, length)) for length in (5, 40, 11, 70)]
    expected = [fast.generate(**attended(prompt), **GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: fast.generate(**attended(prompt), **GREEDY), prompts * 3))
    assert all(torch.equal(one, other) for one, other in zip(found, expected * 3, strict=True))


def test_without_a_cache_a_graph_is_compiled(ids):
    fast = sparta.compile(pruned("llama"), {"input_ids": ids, "use_cache": False}, tune="off")
    assert isinstance(fast, sparta.compiler.CompiledModel)
