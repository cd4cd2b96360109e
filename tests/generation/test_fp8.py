"""Language models in fp8: what is rounded, what keeps its weight, and what they are compared with."""

import pytest
import torch

import sparta
from sparta.compiler.session import Session
from sparta.errors import FileFormatError, ValueRangeError
from sparta.files import Budget, load_tensors, save_tensors
from sparta.generation import api, artifact, fp8, layers
from sparta.generation.artifact import KIND
from sparta.generation.fp8_files import fp8_fields, fp8_weight
from sparta.generation.layers import SparseLayer, kernel_of, layer_spec, put_layers
from sparta.specialize.scaled_linear.inputs import InputRounding, RoundsInputs, rounding_is_shared
from sparta.specialize.scaled_linear.spec import rounded_weight, scaled_weight
from sparta.specialize.tuning.select import DENSE, Choice
from sparta.specialize.tuning.store import key_of

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).bfloat16().eval()
    include = [f"model.layers.{at}.mlp.{name}_proj.weight" for at in range(2) for name in ("gate", "up", "down")]
    sparta.Spec.from_pattern(made, sparta.NM(2, 4), include=include).apply(made)
    return made


@pytest.fixture
def anywhere(monkeypatch):
    """Let models in fp8 run here, with kernels of fp8 in all layers but queries."""
    monkeypatch.setattr(api, "fp8_obstacle", lambda _model: "")

    def chosen(layer, tesa, rows, _known):
        if layer.out_features == 32 and tesa.density == 1 and chosen.calls % 7 == 0:
            chosen.calls += 1
            return None
        chosen.calls += 1
        choices = {count: (layer_spec(layer, tesa, count), Choice(DENSE, {}, "forced")) for count in rows}
        return kernel_of(layer, tesa, choices)

    chosen.calls = 0
    monkeypatch.setattr(layers, "_chosen", chosen)


def test_every_linear_layer_is_rounded_but_the_last_and_patterns_stay(model, anywhere, tmp_path):
    ids = torch.randint(3, 96, (2, 7))
    fast = sparta.compile(model, {"input_ids": ids}, precision="fp8", tune="off")
    put = {name: module for name, module in fast.named_modules() if isinstance(module, SparseLayer)}
    assert len(put) == 12  # of 14, two of which keep their weights
    assert not any("lm_head" in name for name in put)
    for name, layer in put.items():
        known = layer.kernel.fused.weight
        assert str(known.format) == "fp8_e4m3"
        assert known.density == (0.5 if "mlp" in name else 1.0)
        before = model.get_submodule(name).weight.detach()
        assert 0 < float((layer.weight.detach() - before).norm() / before.norm()) < 0.05
    kept = [name for name, module in fast.named_modules() if type(module) is torch.nn.Linear]
    assert all(torch.equal(fast.get_submodule(name).weight, model.get_submodule(name).weight) for name in kept)
    assert fast.report.certificate.passed
    assert any(note.startswith("fp8: logits of the example differ") for note in fast.report.notes)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert fast.generate(ids, **options).shape == model.generate(ids, **options).shape
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, fast(ids).logits)
    assert torch.equal(again.generate(ids, **options), fast.generate(ids, **options))
    assert again.provenance["precision"] == "fp8"
    for name, layer in put.items():
        other = again.get_submodule(name)
        assert torch.equal(other.weight, layer.weight)
        assert str(other.kernel.fused.weight.format) == "fp8_e4m3"
        assert torch.equal(other.kernel.fused.weight.mask(), layer.kernel.fused.weight.mask())
    assert {name: tesa.density for name, tesa in again.spec.items()} == {n: t.density for n, t in fast.spec.items()}
    again.save(tmp_path / "again.sparta")  # as often as one likes


class Rounding(RoundsInputs):
    """The product of codes in real numbers."""

    def __init__(self, tesa):
        self._tesa, self._round = tesa, InputRounding(None)

    def pack(self, operand):
        return (rounded_weight(operand, self._tesa),)

    def run_rounded(self, packed, x, bias, residual):
        return torch.nn.functional.linear(x[0].float() * x[1][:, None], packed[0], bias).bfloat16()


def test_inputs_are_rounded_once_in_a_call_and_again_in_the_next(model, anywhere, monkeypatch):
    ids = torch.randint(3, 96, (2, 7))
    fast = sparta.compile(model, {"input_ids": ids}, precision="fp8", tune="off")
    for module in fast.modules():
        if isinstance(module, SparseLayer):
            kernel = Rounding(module.kernel.fused.weight)
            module.kernel._built = [(1, kernel, kernel.pack(module.kernel.weight()))]
    rounded = []
    plain = InputRounding.__call__
    monkeypatch.setattr(InputRounding, "__call__", lambda self, x: rounded.append(x) or plain(self, x))
    with torch.no_grad():
        first = fast(ids).logits
        assert len(rounded) == 8  # in each block: what q, k and v read, and o, and gate and up, and down
        assert torch.equal(fast(ids).logits, first)
    assert len(rounded) == 16
    assert not rounding_is_shared()


def test_a_layer_of_a_file_has_a_kernel(model, anywhere, tmp_path):
    fast = sparta.compile(model, {"input_ids": torch.randint(3, 96, (2, 7))}, precision="fp8", tune="off")
    fast.save(tmp_path / "model.sparta")
    tensors, payload = load_tensors(tmp_path / "model.sparta", KIND, 1)
    first = next(iter(payload["fp8"]))
    payload["fp8"][first]["choices"] = {}
    save_tensors(tmp_path / "changed.sparta", KIND, 1, tensors, payload)
    with pytest.raises(FileFormatError, match=f"no kernel for {first}"):
        sparta.load(tmp_path / "changed.sparta")


def test_what_is_known_of_dense_layers_is_small_while_a_file_is_read(model, anywhere, tmp_path, monkeypatch):
    fast = sparta.compile(model, {"input_ids": torch.randint(3, 96, (2, 7))}, precision="fp8", tune="off")
    fast.save(tmp_path / "model.sparta")
    readers = []
    tell = artifact._Reader.tell
    monkeypatch.setattr(artifact._Reader, "tell", lambda self, *given: readers.append(self) or tell(self, *given))
    again = sparta.load(tmp_path / "model.sparta")
    assert again.spec == fast.spec
    held = [each for values in vars(readers[0]).values() if isinstance(values, dict) for each in values.items()]
    masks = {name for name, value in held if isinstance(value, torch.Tensor) and value.dtype == torch.bool}
    cells = {name: value.state.cells.numel() for name, value in held if isinstance(value, sparta.TeSA)}
    assert not masks
    assert {count for name, count in cells.items() if "attn" in name} == {1}


def test_a_loss_beyond_what_is_allowed_leaves_the_model_as_it_was(model, anywhere):
    ids = torch.randint(3, 96, (2, 7))
    fast = sparta.compile(model, {"input_ids": ids}, precision="fp8", tune="off", max_loss=0.0)
    assert any(note.startswith("not in fp8") for note in fast.report.notes)
    assert fast.provenance["precision"] == "as given"
    assert torch.equal(fast.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_a_model_that_takes_fewer_calls_than_before_stays_as_it_was(model, anywhere, monkeypatch):
    ids = torch.randint(3, 96, (2, 7))
    whole = api.outputs

    def fewer(asked, named):
        rounded = any(isinstance(module, SparseLayer) for module in asked.modules())
        simulated = any(isinstance(module, fp8._Simulated) for module in asked.modules())
        return whole(asked, named)[: 1 if rounded or simulated else 2]

    monkeypatch.setattr(api, "outputs", fewer)
    fast = sparta.compile(model, {"input_ids": ids}, precision="fp8", tune="off")
    assert any(note.startswith("not in fp8: ") for note in fast.report.notes)
    assert fast.provenance["precision"] == "as given"


def test_rounded_inputs_are_simulated_where_kernels_round_them(model, monkeypatch):
    layer = model.model.layers[0].mlp.up_proj
    tesa = fp8.round_weights(model, {})["model.layers.0.mlp.up_proj"]
    x = torch.randn(3, 32).bfloat16()
    sparse = SparseLayer(layer, kernel_of(layer, tesa, {3: (layer_spec(layer, tesa, 3), Choice(DENSE, {}, ""))}))
    plain = fp8._Simulated(sparse)(x)
    torch.testing.assert_close(plain, sparse(x))
    monkeypatch.setattr(fp8, "FP8_IMPLEMENTS", frozenset({DENSE}))
    assert not torch.equal(fp8._Simulated(sparse)(x), plain)


def test_weights_in_fp8_take_a_byte_and_damaged_ones_are_refused():
    layer = torch.nn.Linear(48, 40, bias=False).bfloat16()
    for mask in (torch.ones(40, 48, dtype=torch.bool), torch.rand(40, 48) < 0.3):
        tesa = scaled_weight(layer.weight.detach() * mask, sparta.TeSA.from_mask(mask))
        choices = {1: (layer_spec(layer, tesa, 1), Choice(DENSE, {}, ""))}
        tensors = {}
        fields = fp8_fields("fc", SparseLayer(layer, kernel_of(layer, tesa, choices)), tensors)
        assert tensors["fp8/fc/codes"].nbytes == int(mask.sum())
        weight, known = fp8_weight("fc", fields, tensors, (40, 48), Budget(10**6, "a file"))
        assert torch.equal(weight, rounded_weight(layer.weight.detach().float() * mask, tesa))
        assert torch.equal(known.mask(), mask)
        changes = {"codes": torch.zeros(3, dtype=torch.uint8), "scales": torch.zeros(40)}
        if fields["pruned"]:
            changes["mask"] = torch.ones(40, 5, dtype=torch.uint8)
        for part, bad in changes.items():
            with pytest.raises(FileFormatError):
                fp8_weight("fc", fields, tensors | {f"fp8/fc/{part}": bad}, (40, 48), Budget(10**6, "a file"))
        with pytest.raises(FileFormatError, match=r"a weight of"):
            fp8_weight("fc", fields, tensors, (48, 40), Budget(10**6, "a file"))


def test_layers_that_cost_alike_are_measured_once(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)], torch.nn.Linear(64, 32))
    masks = {name: sparta.NM(2, 4).project(each.weight.detach().abs()) for name, each in model.named_children()}
    tesas = {name: sparta.TeSA.from_mask(mask) for name, mask in masks.items()}
    measured = []

    def measure(spec, problem, known, _session, *, share):
        assert problem().expected.shape == (spec["input"].shape[0], spec["weight"].shape[0])
        assert 0 < share <= 1
        known[key_of(spec)] = Choice(DENSE, {}, "")
        measured.append((spec["weight"].shape, spec["input"].shape[0]))

    monkeypatch.setattr(layers, "choice_for", measure)
    assert not put_layers(model, tesas, {name: [1, 8] for name in tesas}, Session())
    assert measured == [((64, 64), 8), ((32, 64), 8), ((64, 64), 1), ((32, 64), 1)]  # what costs most first


def test_it_says_what_fp8_needs(model):
    with pytest.raises(ValueRangeError, match=r"a model on cpu.*precision='int8'"):
        sparta.compile(model, {"input_ids": torch.ones(1, 4, dtype=torch.int64)}, precision="fp8")
