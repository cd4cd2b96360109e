"""Files of compiled language models: loaded in another process, refused where they do not fit together."""

import json
import math
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load as load_bytes

import sparta
from generation.language_models import pruned
from sparta.errors import FileFormatError, ValueRangeError
from sparta.files import load_tensors, save_tensors
from sparta.generation.artifact import KIND, load_generator
from sparta.generation.registry import architecture, config_from

LOADS = """
import sys, torch, sparta
fast = sparta.load(sys.argv[1])
print(fast.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, do_sample=False).tolist())
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model.sparta"
    fast = sparta.compile(pruned("llama"), torch.randint(3, 96, (1, 6)), tune="off", precision="int8")
    fast.save(path)
    return path, fast


def changed(path, folder, **changes):
    tensors, payload = load_tensors(path, KIND, 1)
    other = folder / "changed.sparta"
    save_tensors(other, KIND, 1, tensors, {**payload, **changes})
    return other


def test_another_process_generates_the_same(saved):
    path, fast = saved
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", LOADS, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = fast.generate(ids, max_new_tokens=6, do_sample=False).tolist()
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected


def test_what_was_known_is_known_again(saved):
    path, fast = saved
    again = sparta.load(path)
    assert again.spec == fast.spec
    assert again.report.to_dict() == fast.report.to_dict()
    assert again.program.nbytes == fast.program.nbytes
    assert again.generation_config.to_dict() == fast.generation_config.to_dict()
    assert again.get_input_embeddings().weight.requires_grad is False


def test_the_file_holds_each_weight_once(saved):
    path, fast = saved
    stored = sum(t.numel() * t.element_size() for t in load_bytes(path.read_bytes()).values())
    embedding = fast.get_input_embeddings().weight.numel() * 4
    assert stored < fast.program.nbytes + embedding + 4096


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "os.system"}, "class of llama"),
        ({"architecture": "LlamaPreTrainedModel"}, "class of llama"),
        ({"model_type": "../evil"}, "model type"),
        ({"config": {"vocab_size": "many"}}, "vocab_size"),
        ({"config": {"num_hidden_layers": 2000}}, "at most"),
        ({"config": {"is_encoder_decoder": 0.0001}}, "True or False"),
        ({"config": {"num_attention_heads": -1}}, "0 or more"),
        ({"generation": {"eos_token_id": math.nan}}, "eos_token_id=nan"),
        ({"generation": {"eos_token_id": [2, "x"]}}, "eos_token_id=x"),
        ({"generation": {"pad_token_id": 10**30}}, "pad_token_id"),
        ({"generation": {"num_beams": 10**6}}, "num_beams"),
        ({"ties": {"model.norm.weight": "no.such"}}, "save it again|no such"),
        ({"matrices": {}}, "no tensor for|decode program|lacks"),
        ({"experts": {"model.layers.0": True}}, "experts"),
    ],
)
def test_files_that_do_not_fit_together(saved, tmp_path, changes, said):
    with pytest.raises(FileFormatError, match=said):
        load_generator(changed(saved[0], tmp_path, **changes))


def test_a_configuration_out_of_all_proportion(saved, tmp_path):
    _, payload = load_tensors(saved[0], KIND, 1)
    config = {**payload["config"], "num_hidden_layers": 10**9}
    with pytest.raises(FileFormatError, match="num_hidden_layers"):
        load_generator(changed(saved[0], tmp_path, config=config))
    config = {**payload["config"], "hidden_size": 64}
    with pytest.raises(FileFormatError):
        load_generator(changed(saved[0], tmp_path, config=config))


def test_positions_of_another_size_than_heads(saved, tmp_path):
    path, _ = saved
    config = dict(load_tensors(path, KIND, 1)[1]["config"])
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    tensors, payload = load_tensors(path, KIND, 1)
    tensors = dict(tensors)
    for name in [name for name in tensors if "inv_freq" in name]:
        tensors[name] = tensors[name][: len(tensors[name]) // 2].contiguous()
    save_tensors(tmp_path / "changed.sparta", KIND, 1, tensors, {**payload, "config": config})
    with pytest.raises(FileFormatError):
        sparta.load(tmp_path / "changed.sparta")


def test_settings_that_name_code_elsewhere_are_dropped():
    kind, model = architecture("llama", "LlamaForCausalLM")
    assert model is transformers.LlamaForCausalLM
    fields = {"hidden_size": 32, "auto_map": {"AutoModel": "evil--code"}, "attn_implementation": "evil/kernel"}
    config = config_from(kind, {**fields, "_attn_implementation": "evil/kernel", "quantization_config": {"a": 1}})
    assert "evil" not in json.dumps(config.to_dict())
    assert config.hidden_size == 32


def test_models_with_code_of_their_own_are_not_saved(ids, tmp_path):
    class Own(transformers.LlamaForCausalLM):
        pass

    model = Own(pruned("llama").config).eval()
    fast = sparta.compile(model, ids, tune="off")
    with pytest.raises(ValueRangeError, match="save_pretrained"):
        fast.save(tmp_path / "own.sparta")


def test_a_graph_file_is_still_one(tmp_path):
    sparta.compile(torch.nn.Linear(4, 2), torch.randn(3, 4), tune="off").save(tmp_path / "linear.sparta")
    assert isinstance(sparta.load(tmp_path / "linear.sparta"), sparta.compiler.CompiledModel)
    with pytest.raises(FileFormatError, match="sparta model file"):
        load_generator(tmp_path / "linear.sparta")


def test_save_pretrained_writes_the_dense_model(saved, tmp_path, ids):
    fast = sparta.compile(pruned("llama"), ids, tune="off")
    fast.save_pretrained(tmp_path / "folder")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "folder").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, fast(ids).logits, atol=1e-4, rtol=1e-4)
