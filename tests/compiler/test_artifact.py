"""Artifacts: what is loaded computes what was saved, in any process; what is not as written is refused."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch import fx, nn

import sparta
from compiler import nets
from compiler.conftest import forcing
from sparta.compiler.artifact import FORMAT_VERSION
from sparta.compiler.graph.serialize import graph_from_json, graph_to_json
from sparta.errors import FileFormatError
from sparta.files import load_tensors, save_tensors
from sparta.specialize.implement import implement_named
from sparta.specialize.tuning.forgiving import ForgivingStore
from sparta.specialize.tuning.store import Entry


@pytest.fixture(scope="module")
def compiled():
    """Return a compiled model and its inputs, which no test may change."""
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    with forcing():
        return sparta.compile(model, x, tune="off"), x


@pytest.fixture
def saved(compiled, tmp_path):
    """Return a compiled model with its inputs, and the path that it was saved to."""
    fast, x = compiled
    fast.save(tmp_path / "model.sparta")
    return fast, x, tmp_path / "model.sparta"


def rewritten(path, change):
    """Write a file again after a change of its tensors and payload, with a checksum that is right."""
    tensors, payload = load_tensors(path, "model", FORMAT_VERSION)
    change(tensors, payload)
    save_tensors(path, "model", FORMAT_VERSION, tensors, payload)
    return path


def test_what_is_loaded_is_what_was_saved(saved):
    fast, x, path = saved
    again = sparta.load(path)
    assert torch.equal(again(x), fast(x))
    assert set(again.kernels) == set(fast.kernels)
    assert again.report.to_dict() == fast.report.to_dict()
    assert again.spec == fast.spec
    assert again.report.certificate == fast.report.certificate
    assert again.provenance == fast.provenance
    again.save(path)
    assert torch.equal(sparta.load(path)(x), fast(x))


def test_weights_are_stored_without_their_zeros(forced, tmp_path):
    model, x = nets.pruned(nets.Mlp(256, 256), sparsity=0.95), torch.randn(6, 256)
    sparta.compile(model, x, tune="off").save(tmp_path / "model.sparta")
    dense = sum(p.numel() * 4 for p in model.parameters())
    assert (tmp_path / "model.sparta").stat().st_size < 0.35 * dense


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nets.Attention, lambda: {"x": torch.randn(2, 6, 32), "mask": torch.zeros(6, 6), "scale": 0.5}),
        (nets.Cnn, lambda: {"x": torch.randn(2, 3, 16, 16)}),
    ],
)
def test_models_of_all_kinds_come_back(forced, tmp_path, model, inputs):
    model, inputs = nets.pruned(model()), inputs()
    fast = sparta.compile(model, inputs, tune="off")
    fast.save(tmp_path / "model.sparta")
    one, two = fast(**inputs), sparta.load(tmp_path / "model.sparta")(**inputs)
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_dynamic_sizes_come_back(forced, tmp_path):
    model = nets.pruned(nets.Attention())
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=64)
    fast = sparta.compile(
        model,
        {"x": torch.randn(3, 7, 32)},
        tune="off",
        dynamic_shapes={"x": {0: batch, 1: length}},
        more_inputs=[{"x": torch.randn(2, 40, 32)}],
    )
    fast.save(tmp_path / "model.sparta")
    again = sparta.load(tmp_path / "model.sparta")
    x = torch.randn(5, 11, 32)
    torch.testing.assert_close(again(x), fast(x), rtol=0, atol=0)
    assert all(len(module.choices) == 2 for module in again.kernels.values())


def test_a_fresh_process_loads_without_the_models_code(saved, tmp_path):
    """Nor does it need the classes of results: a model of transformers returns the same fields without it."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    fast, x, path = saved
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    bert, ids = transformers.BertModel(config).eval(), torch.randint(0, 50, (2, 7))
    sparta.compile(bert, ids, tune="off").save(tmp_path / "bert.sparta")
    save_file({"x": x, "ids": ids}, tmp_path / "x.safetensors")
    code = (
        "import sys; from safetensors.torch import load_file, save_file; import sparta; "
        "given = load_file(sys.argv[3]); y = sparta.load(sys.argv[1])(given['x']); "
        "found = sparta.load(sys.argv[2])(given['ids']); "
        "save_file({'y': y, 'state': found.last_hidden_state, 'first': found['pooler_output']}, sys.argv[4]); "
        "assert not {'compiler.nets', 'transformers'} & set(sys.modules)"
    )
    files = [path, *(tmp_path / name for name in ("bert.sparta", "x.safetensors", "y.safetensors"))]
    command = [sys.executable, "-c", code, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "y.safetensors")
    assert torch.equal(found["y"], fast(x))
    with torch.no_grad():
        expected = bert(ids)
    torch.testing.assert_close(found["state"], expected.last_hidden_state, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["first"], expected.pooler_output, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("again", [{"tune": "quick"}, {"retune": True}])
def test_kernels_can_be_tuned_for_another_machine(saved, own_stores, again):
    fast, x, path = saved
    again = sparta.load(path, **again)
    torch.testing.assert_close(again(x), fast(x), rtol=1e-4, atol=1e-5)
    assert any(own_stores[1].iterdir())


# ---------------------------------------------------------------------- machines that differ


def test_another_machine_is_noted(saved):
    _, _, path = saved

    def elsewhere(_tensors, payload):
        payload["provenance"]["machine"] = "a machine far away"

    again = sparta.load(rewritten(path, elsewhere))
    assert 'tune="quick"' in again.report.full


@pytest.mark.parametrize("config", [{"_name": "future"}, {"_name": "cpu", "tile": "panel:3:77:1:0:0"}])
def test_kernels_that_do_not_fit_are_chosen_anew(saved, config):
    fast, x, path = saved

    def change(_tensors, payload):
        for kernel in payload["kernels"].values():
            for choice in kernel["choices"].values():
                choice["choice"]["config"] = config

    rewritten(path, change)
    with pytest.warns(UserWarning, match="does not run here"):
        again = sparta.load(path)
    torch.testing.assert_close(again(x), fast(x), rtol=1e-4, atol=1e-5)
    assert "does not run here" in again.report.full


def test_a_kernel_of_another_version_runs_with_parameters_of_its_own(own_stores, tmp_path):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    path = tmp_path / "model.sparta"
    with forcing("cpu"):
        fast = sparta.compile(model, x, tune="off")
    fast.save(path)

    def change(_tensors, payload):
        for kernel in payload["kernels"].values():
            for choice in kernel["choices"].values():
                choice["version"] += 1

    rewritten(path, change)
    with pytest.warns(UserWarning, match="another version of cpu is installed.*with other parameters"):
        again = sparta.load(path)
    assert {layer.first.implement for layer in again.report.plan.layers} == {"cpu"}
    torch.testing.assert_close(again(x), fast(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stored", ["cpu", "dense", "torch-csr", None])
@pytest.mark.parametrize("lost", ["version", "parameters"])
def test_what_was_measured_here_goes_before_parameters_of_its_own(own_stores, tmp_path, stored, lost):
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    path = tmp_path / "model.sparta"
    with forcing("cpu"):
        fast = sparta.compile(model, x, tune="off")
    fast.save(path)
    specs = [spec for module in fast.kernels.values() for spec, _ in module.choices.values()]
    for spec in specs if stored else ():
        params = implement_named(stored, spec.op).default(spec)
        ForgivingStore().put(spec, Entry(stored, params, 1.0, 1.0 if stored == "dense" else 2.0))

    def change(_tensors, payload):
        for kernel in payload["kernels"].values():
            for choice in kernel["choices"].values():
                if lost == "version":
                    choice["version"] += 1
                else:
                    choice["choice"]["config"] = {"_name": "cpu", "tile": "panel:3:77:1:0:0"}

    with pytest.warns(UserWarning, match="does not run here"):
        again = sparta.load(rewritten(path, change))
    found = [choice for module in again.kernels.values() for _, choice in module.choices.values()]
    assert {choice.implement for choice in found} == {stored or "cpu"}
    own = {choice.reason for choice in found if choice.reason.startswith("its best guess here")}
    assert bool(own) is (stored is None)
    assert not any("version" in choice.reason for choice in found)
    torch.testing.assert_close(again(x), fast(x), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- files that are not as written


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(saved, keep):
    _, _, path = saved
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FileFormatError, match=path.name):
        sparta.load(path)


def test_an_edited_file_is_refused(saved):
    _, _, path = saved
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match="checksum"):
        sparta.load(path)


def test_newer_and_foreign_files_are_refused(saved, tmp_path):
    _, _, path = saved
    tensors, payload = load_tensors(path, "model", FORMAT_VERSION)
    save_tensors(tmp_path / "newer", "model", FORMAT_VERSION + 1, tensors, payload)
    with pytest.raises(FileFormatError, match="upgrade"):
        sparta.load(tmp_path / "newer")
    save_tensors(tmp_path / "other", "spec", 1, tensors, payload)
    with pytest.raises(FileFormatError, match="a sparta spec file"):
        sparta.load(tmp_path / "other")
    with pytest.raises(FileFormatError, match="cannot read"):
        sparta.load(tmp_path / "missing")


def _without(*path):
    def change(_tensors, payload):
        for part in path[:-1]:
            payload = payload[part]
        del payload[path[-1]]

    return change


def _target(name):
    def change(_tensors, payload):
        payload["graph"].insert(
            -1, {"op": "call_function", "name": "bad", "target": name, "args": {"tuple": []}, "kwargs": {"dict": {}}}
        )

    return change


def _fewer_weights(tensors, _payload):
    name = next(name for name in tensors if name.startswith("live/"))
    tensors[name] = tensors[name][:-1]


def _missing_tensor(tensors, _payload):
    del tensors[next(name for name in tensors if name.startswith("live/"))]


@pytest.mark.parametrize(
    "change",
    [
        _without("graph"),
        _without("signature", "in_spec"),
        _without("report", "plan"),
        _without("kernels", "first.weight_kernel"),
        _without("provenance"),
        _target("os.system"),
        _target("operator.call"),
        _target("aten.from_file.default"),
        _target("aten.add_.Tensor"),
        _target("aten.no_such_op.default"),
        _fewer_weights,
        _missing_tensor,
        lambda _t, payload: payload["graph"][0].update(op="call_method"),
        lambda _t, payload: payload["signature"]["inputs"][0].update(dtype="load"),
        lambda _t, payload: payload["kernels"]["first.weight_kernel"].update(choices={}),
    ],
)
def test_a_file_that_does_not_fit_together_is_refused(saved, change):
    _, _, path = saved
    rewritten(path, change)
    with pytest.raises(FileFormatError, match=path.name):
        sparta.load(path)


# ---------------------------------------------------------------------- graphs


def test_graphs_survive_json():
    class Odd(nn.Module):
        def forward(self, x):
            y = x[:, ::2, None].to(torch.float64).masked_fill(x[:, ::2, None] > 1.0, float("-inf"))
            return torch.zeros(3, dtype=torch.int64, device=x.device), y.contiguous(
                memory_format=torch.contiguous_format
            )

    from sparta.propagation import capture

    graph = capture(Odd(), torch.randn(2, 4)).graph
    plain = fx.Graph()
    plain.output(plain.graph_copy(graph, {}))
    for node in list(plain.nodes):
        if node.op == "call_module" or "_assert" in str(node.target):
            plain.erase_node(node)
    again = graph_from_json(json.loads(json.dumps(graph_to_json(plain))))
    x = torch.randn(2, 4)
    one, two = (fx.GraphModule(nn.Module(), each)(x) for each in (plain, again))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_calls_that_are_no_tensor_ops_are_not_written():
    graph = fx.Graph()
    graph.output((graph.call_function(print, (graph.placeholder("x"),)),))
    with pytest.raises(FileFormatError, match="cannot be written"):
        graph_to_json(graph)


def test_structures_that_cannot_be_written_are_named(tmp_path):
    from torch.utils import _pytree as pytree

    class Box:
        def __init__(self, value):
            self.value = value

    pytree.register_pytree_node(Box, lambda box: ([box.value], None), lambda values, _: Box(*values))

    class Boxed(nn.Module):
        def forward(self, x):
            return Box(x + 1)

    fast = sparta.compile(Boxed(), torch.zeros(2), tune="off")
    assert torch.equal(fast(torch.zeros(2)).value, torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(FileFormatError, match="wrap the model"):
            fast.save(tmp_path / "model.sparta")
    assert not list(tmp_path.iterdir())
