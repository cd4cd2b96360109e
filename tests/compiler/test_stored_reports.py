"""What a file says of plan, figures and signature is looked at when it is loaded, not when it is printed or called."""

import pytest
import torch

import sparta
from compiler import nets
from compiler.conftest import forcing
from sparta.compiler.artifact import FORMAT_VERSION
from sparta.errors import FileFormatError
from sparta.files import load_tensors, save_tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, x = nets.pruned(nets.Attention()), torch.randn(2, 5, 32)
    path = tmp_path_factory.mktemp("saved") / "model.sparta"
    with forcing():
        sparta.compile(model, (x, torch.zeros(2, 1, 5, 5)), tune="off").save(path)
    return path


def edited(saved, tmp_path, change):
    tensors, payload = load_tensors(saved, "model", FORMAT_VERSION)
    change(payload)
    path = tmp_path / "edited.sparta"
    save_tensors(path, "model", FORMAT_VERSION, tensors, payload)
    return path


def at(*places, value):
    """Return an edit: another value at a place of the payload."""

    def change(payload):
        inner = payload
        for place in places[:-1]:
            inner = inner[place]
        inner[places[-1]] = value

    return change


ODD = ["1", [1], {"a": 1}, True, -1, 10**30, float("inf"), None]
COUNTS = ["parameters", "live_parameters", "memory", "compiled_memory", "flops", "live_flops"]


def test_the_file_itself_loads(saved):
    assert "verified" in str(sparta.load(saved).report)


FIGURES = [
    (name, value) for name in [*COUNTS, "compile_seconds"] for value in ODD if (name, value) != ("compile_seconds", -1)
]


@pytest.mark.parametrize(("name", "value"), FIGURES, ids=str)
def test_figures_must_be_numbers(saved, tmp_path, name, value):
    with pytest.raises(FileFormatError, match=r"edited\.sparta.*number"):
        sparta.load(edited(saved, tmp_path, at("report", "totals", name, value=value)))


@pytest.mark.parametrize("value", ["1", [1], {"a": 1}, 10**30], ids=str)
def test_seconds_of_the_first_compilation_are_a_number_or_nothing(saved, tmp_path, value):
    with pytest.raises(FileFormatError, match=r"edited\.sparta"):
        sparta.load(edited(saved, tmp_path, at("report", "totals", "first_compile_seconds", value=value)))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("choices",), {}),
        (("density",), "0.1"),
        (("density",), float("nan")),
        (("shape",), [2, -1]),
        (("flops",), 2.5),
        (("best_ratio",), 0),
        (("best_ratio",), "2"),
    ],
)
def test_layers_have_choices_and_numbers(saved, tmp_path, place, value):
    with pytest.raises(FileFormatError, match=r"edited\.sparta"):
        sparta.load(edited(saved, tmp_path, at("report", "plan", "layers", 0, *place, value=value)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", "turbo"),
        ("host", ["eager"]),
        ("base", "another"),
        ("milliseconds", {"model as given": 0}),
        ("milliseconds", {"model as given": "fast"}),
        ("ratio", "1000x"),
        ("interval", [1]),
        ("interval", ["low", "high"]),
        ("bound", [2]),
        ("loaded", "yes"),
    ],
)
def test_the_whole_is_what_it_can_be(saved, tmp_path, name, value):
    with pytest.raises(FileFormatError, match=r"edited\.sparta"):
        sparta.load(edited(saved, tmp_path, at("report", "plan", "whole", name, value=value)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("error", "small"), ("tolerance", None), ("outputs", 1.5), ("passed", 1), ("seeds", [0.5])],
)
def test_a_certificate_says_numbers(saved, tmp_path, name, value):
    with pytest.raises(FileFormatError, match=r"edited\.sparta"):
        sparta.load(edited(saved, tmp_path, at("report", "certificate", name, value=value)))


LEAF = None
TWO = {"tuple": [LEAF, LEAF]}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_spec", TWO),
        ("in_spec", {"tuple": [TWO]}),
        ("in_spec", {"list": [TWO, {"dict": []}]}),
        ("in_spec", {"tuple": [{"list": [LEAF, LEAF]}, {"dict": []}]}),
        ("in_spec", {"tuple": [TWO, {"tuple": []}]}),
        ("in_spec", {"tuple": [TWO, {"dict": []}, {"dict": []}]}),
        ("in_spec", {"tuple": [{"tuple": [LEAF]}, {"dict": [[0, LEAF]]}]}),
        ("positional", 1),
        ("positional", 3),
        ("positional", -1),
        ("positional", "2"),
        ("positional", True),
        ("keywords", ["scale"]),
        ("keywords", ["scale", "scale"]),
        ("keywords", [0]),
        ("keywords", "scale"),
        ("parameters", "xy"),
        ("parameters", [1, 2]),
        ("parameters", {"x": 1}),
        ("parameters", ["x", "x"]),
        ("cast", "no"),
        ("cast", 1),
    ],
)
def test_a_signature_fits_its_structure(saved, tmp_path, name, value):
    with pytest.raises(FileFormatError, match=r"edited\.sparta"):
        sparta.load(edited(saved, tmp_path, at("signature", name, value=value)))


@pytest.mark.parametrize("parameters", [[], ["x"], ["a", "b"], ["mask", "x"]])
def test_names_of_parameters_that_are_not_the_models_raise_ours(saved, tmp_path, parameters):
    fast = sparta.load(edited(saved, tmp_path, at("signature", "parameters", value=parameters)))
    x, mask = torch.randn(2, 5, 32), torch.zeros(2, 1, 5, 5)
    fast(x, mask)
    for args, kwargs in [((x,), {}), ((x,), {"mask": mask}), ((), {"x": x, "mask": mask}), ((x, mask, x), {})]:
        try:
            fast(*args, **kwargs)
        except sparta.errors.SpartaError:
            continue


def test_results_that_are_no_list_are_the_files_fault(tmp_path):
    path, x = tmp_path / "model.sparta", torch.randn(2, 4)
    sparta.compile(torch.nn.Linear(4, 3), x, tune="off").save(path)

    def change(payload):
        output = payload["graph"][-1]
        ((_, (results,)),) = output["args"].items()
        ((_, nodes),) = results.items()
        output["args"] = {"tuple": [{"dict": {"y": nodes[0]}}]}

    bad = edited(path, tmp_path, change)
    with pytest.raises(FileFormatError, match=r"edited\.sparta"):
        sparta.load(bad)(x)
