"""On CUDA, a language model keeps its `generate`: greedily, the same tokens as the masked dense model."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sparta

transformers = pytest.importorskip("transformers")


def pruned(pattern, sparsity, kind="Llama"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).cuda().eval()
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    include = [f"{name}.weight" for name in layers if "lm_head" not in name]
    sparta.Spec.from_pattern(model, pattern, sparsity, include=include).apply(model)
    return model


@pytest.mark.parametrize(("pattern", "sparsity"), [(sparta.Block(32, 32), 0.8), (sparta.NM(2, 4), 0.5)])
def test_the_same_tokens_as_the_dense_model(pattern, sparsity):
    model = pruned(pattern, sparsity)
    prompt = torch.randint(3, 128, (2, 9), device="cuda")
    fast = sparta.compile(model, {"input_ids": prompt}, budget_s=30)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(fast.generate(prompt, **options), model.generate(prompt, **options))
    with torch.no_grad():
        torch.testing.assert_close(fast(prompt).logits, model(prompt).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_replayed_from_a_graph(dtype):
    model = pruned(sparta.Block(32, 32), 0.8).to(dtype)
    prompt = torch.randint(3, 128, (2, 9), device="cuda")
    fast = sparta.compile(model, {"input_ids": prompt}, budget_s=30)
    assert fast._sparta.graph is not None, fast.report.notes
    before = fast._sparta.graph.replays
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "attention_mask": mask}
    found = fast.generate(prompt, do_sample=False, **options)
    assert fast._sparta.graph.replays - before == 21
    if dtype == torch.float32:
        assert torch.equal(found, model.generate(prompt, do_sample=False, **options))
    again = fast.generate(prompt, do_sample=False, **options)  # over another cache
    assert torch.equal(found, again)
    drawn = fast.generate(prompt, do_sample=True, **options)
    assert drawn.shape == found.shape


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])  # masks as a tensor, and in a dict
def test_greedy_tokens_follow_each_other_on_the_device(kind):
    model = pruned(sparta.Block(32, 32), 0.8, kind)
    prompt = torch.randint(3, 128, (2, 9), device="cuda")
    fast = sparta.compile(model, {"input_ids": prompt}, budget_s=30)
    graph = fast._sparta.graph
    assert graph is not None, fast.report.notes
    assert graph.follows
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "do_sample": False}

    def both(**more):
        """Return the tokens of transformers' own loop over replays, and those that follow by themselves."""
        found = []
        for graph.follows in (False, True):
            found.append(fast.generate(prompt, **options, **more))
        return found

    before = graph.replays
    expected, found = both(max_new_tokens=50, eos_token_id=127)
    assert torch.equal(expected, found)
    assert expected.shape[1] < 59 or graph.replays - before == 94  # the prompt gives a token, two steps come before
    for at in (12, 40):
        assert torch.equal(*both(max_new_tokens=50, eos_token_id=int(expected[0, min(at, expected.shape[1] - 1)])))
    beams = fast.generate(prompt, max_new_tokens=16, num_beams=3, **options)
    fast._sparta.graph = None
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(beams, fast.generate(prompt, max_new_tokens=16, num_beams=3, **options, **static))


def test_a_model_from_a_file_replays_its_steps(tmp_path):
    model = pruned(sparta.Block(32, 32), 0.8)
    prompt = torch.randint(3, 128, (2, 9), device="cuda")
    fast = sparta.compile(model, {"input_ids": prompt}, budget_s=30)
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 30}
    assert again._sparta.graph.follows
    assert torch.equal(again.generate(prompt, **options), fast.generate(prompt, **options))
    assert again._sparta.graph.replays > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_on_another_device_than_the_current_one_run_as_they_are():
    model = pruned(sparta.Block(32, 32), 0.8).to("cuda:1")
    prompt = torch.randint(3, 128, (2, 9), device="cuda:1")
    with torch.cuda.device(1):
        fast = sparta.compile(model, {"input_ids": prompt}, budget_s=30)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 30}
    assert torch.equal(fast.generate(prompt, **options), model.generate(prompt, **options))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)
@pytest.mark.parametrize(("pattern", "sparsity"), [(sparta.Block(64, 64), 0.75), (sparta.NM(2, 4), 0.5)])
def test_a_language_model_in_fp8(pattern, sparsity, tmp_path):
    model = pruned(pattern, sparsity)
    prompt = torch.randint(3, 128, (2, 9), device="cuda")
    fast = sparta.compile(model, {"input_ids": prompt}, precision="fp8", budget_s=30, max_loss=0.2)
    assert fast.provenance["precision"] == "fp8", fast.report.notes
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    found = fast.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert found.shape == (2, 21)
    with torch.no_grad():
        exact, close = model(prompt).logits, fast(prompt).logits.float()
    assert float((close - exact).norm() / exact.norm()) < 0.2
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    with torch.no_grad():
        torch.testing.assert_close(again(prompt).logits.float(), close, rtol=0.05, atol=0.05)
    assert again.generate(prompt, attention_mask=torch.ones_like(prompt), **options).shape == found.shape


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_prompts_are_replayed_from_graphs(kind, tmp_path):
    model = pruned(sparta.Block(32, 32), 0.8, kind)
    prompt = torch.randint(3, 128, (2, 9), device="cuda")
    fast = sparta.compile(model, {"input_ids": prompt}, tune="off")
    assert fast._sparta.prompts is not None, fast.report.notes
    for tokens in (9, 12, 16, 5, 33, 40, 36):
        ids = torch.randint(3, 128, (2, tokens), device="cuda")
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20}
        assert torch.equal(fast.generate(ids, **options), model.generate(ids, **options))
    assert fast._sparta.prompts.replays == 5
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    assert again._sparta.prompts is not None
    for _ in range(2):
        assert torch.equal(again.generate(ids, **options), fast.generate(ids, **options))
    assert again._sparta.prompts.replays > 0


def test_prompts_of_several_threads_do_not_mix():
    model = pruned(sparta.Block(32, 32), 0.8)
    prompts = [torch.randint(3, 128, (1, tokens), device="cuda") for tokens in (9, 11, 14, 16)]
    fast = sparta.compile(model, {"input_ids": prompts[0]}, tune="off")
    expected = [fast(ids, logits_to_keep=1).logits for ids in prompts]

    def ask(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [fast(prompts[number], logits_to_keep=1).logits for _ in range(50)]
            torch.cuda.synchronize()
        return all(torch.allclose(each, expected[number], rtol=1e-3, atol=1e-3) for each in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(4)))
    assert fast._sparta.prompts.replays > 100
