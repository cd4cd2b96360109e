"""Good files of every kind that the package reads, made on the fly: what the mutator starts from."""

import json

import torch
from torch import nn

import sparta
from compiler import nets
from compiler.conftest import forcing
from generation.language_models import pruned
from sparta.compiler.exchange.interface import write_exchange
from sparta.create.loop.state_file import save_state
from sparta.create.manager import Manager
from sparta.create.recipe import Recipe
from sparta.specialize.implement import implement_named
from sparta.specialize.linear.spec import linear_spec
from sparta.specialize.tuning.store import Entry, TuningStore, key_of
from sparta.tesa.attribute import TeSA
from sparta.tesa.spec import Spec

RECIPES = {
    "recipe-own.yaml": """
version: 1
metadata: {author: someone, tags: [a, b]}
variables: {num_epochs: 8, final: 0.75, half: "${num_epochs / 2}", names: ["re:.*weight"], lr: 1e-3}
modifiers:
- EpochRange: {start_epoch: 0, end_epoch: "${num_epochs}"}
- MagnitudePruning:
    {start_epoch: 1, end_epoch: "${max(2, round(half, 1))}", final_sparsity: "${final}", update_frequency: 0.5,
     params: "${names}", mask_type: "2:4"}
- SetLearningRate: {start_epoch: 0, learning_rate: "${lr * 2}"}
""",
    "recipe-stages.yaml": """
variables: &shared {epochs: 4}
stages:
  first:
    variables: {<<: *shared, final: 0.5}
    modifiers:
    - MagnitudePruning: {start_epoch: 0, end_epoch: "${epochs - 1}", final_sparsity: "${final}", update_frequency: 1}
  second: {after: first, modifiers: [EpochRange: {start_epoch: 0, end_epoch: "20 steps"}]}
""",
    "recipe-front.md": """<!-- a licence -->
---
num_epochs: 5
pruning_modifiers:
  - !MagnitudePruningModifier
    params: __ALL_PRUNABLE__
    init_sparsity: 0.05
    final_sparsity: 0.8
    start_epoch: 0.0
    end_epoch: eval(num_epochs - 1)
    update_frequency: 0.5
training_modifiers:
  - !EpochRangeModifier
    start_epoch: 0.0
    end_epoch: eval(num_epochs)
---
# A title

Words.
""",
    "recipe-legacy.yaml": """
version: 1.1.0
modifiers:
  - !EpochRangeModifier {start_epoch: 0.0, end_epoch: 10.0}
  - !GMPruningModifier
      params: ['re:.*weight']
      init_sparsity: 0.05
      final_sparsity: 0.85
      start_epoch: 1.0
      end_epoch: 8.0
      update_frequency: 0.5
      inter_func: cubic
      mask_type: unstructured
  - !QuantizationModifier {start_epoch: 8.0, submodules: [seq]}
  - !LearningRateFunctionModifier
      {start_epoch: 0.0, end_epoch: 10.0, lr_func: linear, init_lr: 0.1, final_lr: 0.001}
""",
}
STATE_RECIPE = """
modifiers:
- EpochRange: {end_epoch: 4}
- MagnitudePruning: {start_epoch: 0, end_epoch: 3, final_sparsity: 0.5, update_frequency: 0.5}
"""


class Masked(nn.Module):
    """Attention of 2 heads with a mask in a buffer, and a linear layer before it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        place = torch.arange(32) // 8
        self.register_buffer("mask", (place[:, None] - place[None, :]).abs() <= 1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[..., :t, :t])


class Deciding(nn.Module):
    """Its path depends on values, so it is compiled in parts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nets.Mlp(outputs=32), nn.Linear(32, 8)

    def forward(self, x):
        y = self.first(x)
        return self.second(y * 2 if y.sum() > 0 else y)


def tuned_spec():
    """Return the kernel spec that the tuning entries are for."""
    mask = torch.rand(64, 64, generator=torch.manual_seed(0)) > 0.9
    return linear_spec(TeSA.from_mask(mask, format="fp32"), 16, torch.float32)


def attached_manager():
    """Return a manager in the midst of nothing, to load states into."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(Recipe.from_yaml(STATE_RECIPE).modifiers(4))
    manager.attach(model, optimizer, steps_per_epoch=4)
    return manager, model, optimizer


def make_corpus(folder):
    """Write the good files; returns (kind, path) of each."""
    found = [("artifact", path) for path in _artifacts(folder)]
    found += [("language model", path) for path in _language_models(folder)]
    with forcing():
        sparta.compile(nets.pruned(Deciding()), torch.randn(6, 32), tune="off").save(folder / "parts.sparta")
    found.append(("parts", folder / "parts.sparta"))
    write_exchange(sparta.load(folder / "linear.sparta"), folder / "model.exchange")
    found.append(("exchange", folder / "model.exchange"))
    _spec().save(folder / "a.spec")
    found.append(("spec", folder / "a.spec"))
    save_state(folder / "a.state", _state())
    found.append(("state", folder / "a.state"))
    for name, text in RECIPES.items():
        (folder / name).write_text(text)
        found.append(("recipe", folder / name))
    found += [("export", folder / "a.export"), ("entry", folder / "a.entry")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # entries are kept by the number of threads, and the readers have one
    try:
        _entries(folder)
    finally:
        torch.set_num_threads(threads)
    return found


def _entries(folder):
    spec = tuned_spec()
    implement = implement_named("cpu", spec.op)
    name, params = ("cpu", implement.default(spec)) if implement.answer(spec) else ("dense", {})
    entry = Entry(name, params, 1.0, 2.0)
    store = TuningStore(folder / "store")
    store.put(spec, entry)
    store.export(folder / "a.export")
    (folder / "a.entry").write_text(json.dumps({"version": 1, "key": key_of(spec), "entry": entry.to_dict()}))


def _artifacts(folder):
    from compiler.choose.test_precision import quantized

    torch.manual_seed(0)
    x = torch.randn(6, 32)
    with forcing():
        sparta.compile(nets.pruned(nets.Mlp()), x, tune="off").save(folder / "linear.sparta")
        sparta.compile(nets.pruned(nets.Cnn()), torch.randn(2, 3, 16, 16), tune="off").save(folder / "conv.sparta")
    with forcing("cpu-int8"):
        model = nets.pruned(nets.Mlp(), sparsity=0.6)
        fast = sparta.compile(model, x, quantized(model), tune="off")
        fast.save(folder / "int8.sparta")
    with forcing("blocks"):
        sparta.compile(nets.pruned(Masked()), torch.randn(2, 32, 16), tune="off").save(folder / "attention.sparta")
    return [folder / f"{name}.sparta" for name in ("linear", "conv", "int8", "attention")]


def _language_models(folder):
    ids = torch.randint(3, 96, (1, 6))
    sparta.compile(pruned("llama"), ids, tune="off", precision="int8").save(folder / "program.sparta")
    with forcing():
        sparta.compile(pruned("gpt2"), ids, tune="off").save(folder / "layers.sparta")
    return [folder / "program.sparta", folder / "layers.sparta"]


def _spec():
    chance = torch.manual_seed(0)
    mask = torch.rand(16, 24, generator=chance) > 0.5
    return Spec(
        {
            "fc.weight": TeSA.from_mask(mask),
            "conv.weight": TeSA.from_mask(mask.reshape(4, 4, 4, 6), pruned="dead"),
            "rows.weight": TeSA.from_mask(mask[:, :1].expand(16, 24)).with_format("int8", scale=torch.rand(16) + 0.1),
            "x": TeSA.dense((4, 8), format="fp16", dynamic=[0]),
            "one": TeSA.constant((3,), 2.5),
        }
    )


def _state():
    manager, model, optimizer = attached_manager()
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().sum().backward()
        optimizer.step()
    return manager.state_dict()
