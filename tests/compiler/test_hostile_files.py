"""Artifacts of a stranger: no edited file with a right checksum runs code, reads other models or takes all memory."""

import json
import sys

import pytest
import torch

import sparta
from compiler import nets
from compiler.conftest import forcing
from sparta.compiler.artifact import FORMAT_VERSION
from sparta.compiler.graph.allowed import allowed_overloads, function_named
from sparta.compiler.graph.trees import tree_from_json
from sparta.errors import FileFormatError
from sparta.files import load_tensors, save_tensors


@pytest.fixture(scope="module")
def compiled():
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    with forcing():
        return sparta.compile(model, x, tune="off"), x


@pytest.fixture
def edited(compiled, tmp_path, monkeypatch):
    """Return a function that edits a saved model's payload and returns the path; the working folder is empty."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.sparta"
    compiled[0].save(path)

    def edit(change):
        tensors, payload = load_tensors(path, "model", FORMAT_VERSION)
        change(tensors, payload)
        save_tensors(path, "model", FORMAT_VERSION, tensors, payload)
        return path

    return edit


def first(payload, op):
    return next(node for node in payload["graph"] if node["op"] == op)


def calling(*calls):
    """Return an edit: the graph makes these calls (name, target, args, kwargs) and returns the last one's result."""

    def change(_tensors, payload):
        nodes = [
            {"op": "call_function", "name": name, "target": target, "args": list(args), "kwargs": {"dict": kwargs}}
            for name, target, args, kwargs in calls
        ]
        payload["graph"][-1:-1] = nodes
        payload["graph"][-1]["args"] = {"tuple": [{"tuple": [{"node": nodes[-1]["name"]}]}]}

    return change


PLANT = "__import__('pathlib').Path('PWNED').touch()"


def test_the_name_of_an_input_runs_nothing(edited, compiled, tmp_path):
    def change(_tensors, payload):
        node = first(payload, "placeholder")
        old, node["target"] = node["target"], node["target"] + f", _={PLANT}"
        assert old

    fast, x = compiled
    again = sparta.load(edited(change))
    assert torch.equal(again(x), fast(x))  # the name is one of ours
    assert not (tmp_path / "PWNED").exists()


def test_the_name_of_a_node_runs_nothing(edited, compiled, tmp_path):
    def change(_tensors, payload):
        for place, node in enumerate(payload["graph"]):
            if node["op"] == "placeholder":
                old, new = node["name"], f"x{place}); {PLANT}; (0"
                text = json.dumps(payload["graph"]).replace(json.dumps({"node": old}), json.dumps({"node": new}))
                payload["graph"][:] = json.loads(text)
                payload["graph"][place]["name"] = new

    fast, x = compiled
    assert torch.equal(sparta.load(edited(change))(x), fast(x))
    assert not (tmp_path / "PWNED").exists()


def test_the_name_of_a_keyword_is_one_of_the_schema(edited, tmp_path):
    path = edited(calling(("r", "aten.relu.default", [{"node": "x"}], {f"a={PLANT}, b": 1})))
    with pytest.raises(FileFormatError, match="argument"):
        sparta.load(path)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("quote", ['"', "'", "\\", "\n", " ", "é", "-"])
def test_the_name_of_a_tensor_has_letters_and_digits_only(edited, tmp_path, quote):
    def change(tensors, payload):
        name = f"w{quote}, {PLANT}, {quote}"
        tensors[f"tensor/{name}"] = torch.zeros(2)
        payload["graph"].insert(
            0, {"op": "get_attr", "name": "bad", "target": name, "args": {"tuple": []}, "kwargs": {"dict": {}}}
        )

    with pytest.raises(FileFormatError, match="names"):
        sparta.load(edited(change))
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("name", ["forward", "__class__.x", "training.x", "_buffers.x", "a..b", "lambda", ""])
def test_the_name_of_a_tensor_takes_no_place_of_pytorchs(edited, name):
    def change(tensors, payload):
        tensors[f"tensor/{name}"] = torch.zeros(6, 4)
        payload["graph"].insert(
            0, {"op": "get_attr", "name": "bad", "target": name, "args": {"tuple": []}, "kwargs": {"dict": {}}}
        )
        payload["graph"][-1]["args"] = {"tuple": [{"tuple": [{"node": "bad"}]}]}

    with pytest.raises(FileFormatError):
        sparta.load(edited(change))


@pytest.mark.parametrize("place", ["in_spec", "out_spec"])
@pytest.mark.parametrize(
    "spec",
    [
        {
            "type": "collections.defaultdict",
            "context": {"default_factory_module": "planted", "default_factory_name": "E", "dict_context": ["a"]},
            "children_spec": [{"type": None, "context": None, "children_spec": []}],
        },
        {"type": "planted.E", "context": '{"__enum__": true, "fqn": "planted:E", "name": "A"}', "children_spec": []},
    ],
)
def test_a_structure_imports_nothing(edited, tmp_path, monkeypatch, place, spec):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "planted.py").write_text("import pathlib; pathlib.Path('PWNED').touch()\nE = dict\n")
    path = edited(lambda _t, payload: payload["signature"].update({place: json.dumps([1, spec])}))
    with pytest.raises(FileFormatError):
        sparta.load(path)
    assert "planted" not in sys.modules
    assert not (tmp_path / "PWNED").exists()


def test_structures_of_the_version_before_are_read():
    leaf = {"type": None, "context": None, "children_spec": []}
    inner = {"type": "builtins.dict", "context": '["a"]', "children_spec": [leaf]}
    tree = tree_from_json(
        json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": [leaf, inner]}])
    )
    assert tree.num_leaves == 2
    assert tree.unflatten([1, 2]) == (1, {"a": 2})


def test_a_structure_may_not_be_endless():
    tree = None
    for _ in range(5000):
        tree = {"list": [tree]}
    with pytest.raises(FileFormatError):
        tree_from_json(tree)


REFUSED = [
    "aten.max_pool2d_with_indices_backward.default",
    "aten.adaptive_max_pool2d_backward.default",
    "aten._convert_indices_from_coo_to_csr.default",
    "aten.segment_reduce.default",
    "aten._segment_reduce_backward.default",
    "aten._sparse_csr_tensor_unsafe.default",
    "aten._ctc_loss.default",
    "aten._pack_padded_sequence.default",
    "aten.empty.memory_format",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.from_file.default",
    "aten.save.default",
    "aten._print.default",
    "aten.add.str",
    "aten.mul.left_t",
    "aten.quantize_per_tensor.default",
    "aten.to_sparse.default",
    "sparta.subgraph.default",
    "sparta.linear.default",
    "sparta.conv.default",
    "sparta.int8_linear.default",
    "sparta_aot.linear.default",
    "sparta_cuda.launch.default",
    "prims.add.default",
    "operator.call",
    "operator.concat",
    "builtins.print",
]


@pytest.mark.parametrize("name", REFUSED)
def test_ops_beyond_the_list_are_refused(edited, name):
    with pytest.raises(FileFormatError, match="calls"):
        function_named(name)
    with pytest.raises(FileFormatError, match="calls"):
        sparta.load(edited(calling(("bad", name, [{"node": "x"}], {}))))


def test_the_list_has_no_op_that_trusts_its_arguments():
    names = [str(function) for function in allowed_overloads()]
    assert len(names) > 300
    for part in ("backward", "unsafe_", "sparse", "quantized", "nested", "empty", "_foreach", "resize", "set_", "file"):
        assert [name for name in names if part in name and name != "aten._unsafe_view.default"] == []


def test_another_models_weights_stay_its_own(edited):
    other = sparta.compile(torch.nn.Linear(64, 64), torch.randn(2, 64), tune="off")
    for handle in range(1, 50):
        with pytest.raises(FileFormatError, match="calls"):
            sparta.load(edited(calling(("s", "sparta.subgraph.default", [{"node": "x"}, None, handle], {}))))
    assert other is not None


def test_memory_of_others_is_not_shown(edited):
    """A model that makes room before it fills it is written with zeros there."""

    class Filling(torch.nn.Module):
        def forward(self, x):
            return torch.empty_like(x).fill_(2.0) + x

    fast = sparta.compile(Filling(), torch.zeros(3), tune="off")
    fast.save("filling.sparta")
    assert torch.equal(sparta.load("filling.sparta")(torch.zeros(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    "calls",
    [
        [("p", "operator.pow", [10, 10**9], {}), ("r", "aten.add.Tensor", [{"node": "x"}, {"node": "p"}], {})],
        [("c", "aten.chunk.default", [{"node": "x"}, 2], {}), ("p", "operator.mul", [{"node": "c"}, 10**9], {})],
    ],
)
def test_arithmetic_is_on_numbers_of_some_size(edited, compiled, calls):
    _, x = compiled
    with pytest.raises(FileFormatError):
        sparta.load(edited(calling(*calls)))(x)


@pytest.mark.parametrize(
    "calls",
    [
        [("f", "aten.full.default", [[1 << 20, 1 << 20], 1.0], {"dtype": {"dtype": "float32"}})],
        [("f", "aten.repeat.default", [{"node": "x"}, [1 << 15, 1 << 15]], {})],
        [("f", "aten.arange.default", [1 << 40], {})],
        [
            ("a", "aten.expand.default", [{"node": "x"}, [1 << 30, 6, 32]], {}),
            ("f", "aten.mul.Tensor", [{"node": "a"}] * 2, {}),
        ],
        [
            ("n", "aten.nonzero.default", [{"node": "x"}], {}),
            ("f", "aten.repeat.default", [{"node": "n"}, [1 << 20, 1 << 20]], {}),
        ],
    ],
)
def test_a_small_file_may_not_ask_for_all_memory(edited, compiled, calls):
    with pytest.raises(FileFormatError, match="max_bytes"):
        sparta.load(edited(calling(*calls)))


def test_a_mask_may_not_be_larger_than_the_file_by_far(edited):
    def change(tensors, payload):
        meta = payload["kernels"]["first.weight_kernel"]["weight"]
        meta["shape"] = [1 << 16, 1 << 16]
        for name in ("state", "code", "value", "scale", "zero_point"):
            meta[name]["block"] = [1 << 16, 1 << 16]
        tensors["mask/first.weight_kernel/live"] = torch.zeros(1, dtype=torch.uint8)
        tensors["live/first.weight_kernel"] = torch.zeros(0)

    with pytest.raises(FileFormatError, match="max_bytes"):
        sparta.load(edited(change))


def test_a_trusted_file_may_be_given_room(edited, compiled):
    _, x = compiled
    path = edited(calling(("f", "aten.full.default", [[1 << 13, 1 << 13], 1.0], {"dtype": {"dtype": "float32"}})))
    with pytest.raises(FileFormatError, match="max_bytes"):
        sparta.load(path)
    assert sparta.load(path, max_bytes=1 << 29)(x).shape == (1 << 13, 1 << 13)


@pytest.mark.parametrize("text", ["'); import os; ('", "a\\x41", "\n", "x" * 5000])
def test_text_is_that_of_modes_and_equations(edited, text):
    path = edited(calling(("g", "aten.gelu.default", [{"node": "x"}], {"approximate": text})))
    with pytest.raises(FileFormatError, match="text"):
        sparta.load(path)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([{"node": "x"}], {"dtype": {"dtype": "load"}}),
        ([{"node": "x"}], {"dtype": {"dtype": "quint8"}}),
        ([{"node": "x"}], {"device": {"device": "xla"}}),
        ([{"node": "x"}], {"layout": {"layout": "sparse_coo"}}),
        ([{"node": "x"}], {"dtype": {"module": "os"}}),
        ([{"node": "x"}], {"dtype": 1 << 70}),
        ([{"node": "gone"}], {}),
    ],
)
def test_literals_are_numbers_and_constants_of_torch(edited, args, kwargs):
    with pytest.raises(FileFormatError):
        sparta.load(edited(calling(("z", "aten.zeros_like.default", args, kwargs))))


def test_a_graph_that_cannot_run_is_the_files_fault(edited, compiled):
    _, x = compiled
    again = sparta.load(edited(calling(("v", "aten.view.default", [{"node": "x"}, [7, 7]], {}))))
    with pytest.raises(FileFormatError, match="does not run"):
        again(x)


def test_parameters_of_a_kernel_lie_in_its_search_space(edited, compiled):
    fast, x = compiled

    def change(_tensors, payload):
        for kernel in payload["kernels"].values():
            for stored in kernel["choices"].values():
                stored["choice"]["config"] |= {"tile": "x; system(1)", "more": [1] * 10}

    with pytest.warns(UserWarning, match="does not run here"):
        again = sparta.load(edited(change))
    torch.testing.assert_close(again(x), fast(x), rtol=1e-4, atol=1e-5)
