"""Every error that a user can cause is one of ours: public functions and classes are called with what they do not take.

One parameter after the other gets values of a wrong type, shape, dtype, device, name or count, while the others get
plain ones. A call may succeed, or raise a `SpartaError`; anything else that comes out is a defect. Python's own error
for a wrong number of arguments is Python's.
"""

import inspect
import io
import math
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn

import sparta
from sparta.errors import SpartaError

ROOMS = ("", "nn", "create", "sparsify", "testing", "scheduler", "propagation", "compiler", "signing", "recovery")
# Results that a user reads and does not make; bases that others derive from; decorators, which take any class.
NOT_CALLED_BY_USERS = {
    "Adapters", "Agreement", "Allocation", "Backend", "Candidate", "CaptureError", "Captured", "Certificate",
    "CompactModel", "Comparison", "CompiledModel", "EndToEnd", "Environment", "Exported", "Layer", "LayerPlan",
    "MaskedLoRA", "MethodComparison", "MethodResult", "OperatorBase", "Origin", "PartialModel", "Pattern", "Plan",
    "PropagationResult", "PruningReport", "RecoveryLog", "Report", "Run", "Score", "StageLog", "TeSA", "Timing",
    "Totals", "modifier", "register_fake_sparse", "register_mask_generator", "register_scheduler", "rule",
}  # fmt: skip
METHODS = {
    "Spec": ("from_zeros", "from_pattern", "from_masks", "load", "save", "apply", "check"),
    "TeSA": ("from_mask", "from_pattern", "constant", "dense"),
    "NM": ("project", "validate", "check"),
    "VNM": ("project", "validate", "check"),
    "Block": ("project", "validate", "check"),
    "Channel": ("project", "validate", "check"),
    "Unstructured": ("project", "validate", "check"),
    "Recipe": ("from_yaml",),
    "Sparsifier": ("step", "load_state_dict"),
    "Masks": ("update", "load_state_dict"),
    "PublicKey": ("of", "save"),
    "SigningKey": ("of", "load", "save", "signature"),
    "SparseLinear": ("build", "tune", "forward"),
    "SparseConv2d": ("build", "tune", "forward"),
    "SparseSoftmax": ("build", "forward"),
    "SparseAttention": ("build", "forward"),
    "SparseBatchMatMul": ("build", "forward"),
    "DynamicSparseMoE": ("forward",),
    "ThresholdLinear": ("forward",),
    "SparseInt8Linear": ("build", "forward", "from_float"),
    "SeqlenDynamicSparseAttention": ("forward",),
}


class Stranger:
    """A value of a type that nobody expects."""

    def __repr__(self):
        return "Stranger()"


WRONG = {
    "stranger": Stranger,
    "None": lambda: None,
    "negative": lambda: -3,
    "nan": lambda: math.nan,
    "huge": lambda: 10**30,
    "empty list": list,
    "list": lambda: [Stranger()],
    "mapping": lambda: {Stranger(): 1},
    "name": lambda: "no such thing",
    "empty name": lambda: "",
    "0-d": lambda: torch.tensor(1.0),
    "shape": lambda: torch.randn(3, 5, 7, 2),
    "dtype": lambda: torch.zeros(8, 8, dtype=torch.complex64),
    "meta": lambda: torch.zeros(8, 8, device="meta"),
    "module": nn.Dropout,
}


def plain_model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


def pruned_linear():
    layer = nn.Linear(8, 8)
    sparta.Spec.from_pattern(layer, sparta.Block(4, 1), 0.5).apply(layer)
    return layer.eval()


def pruned_model():
    model = plain_model()
    sparta.Spec.from_pattern(model, "2:4").apply(model)
    return model


def trained(start, _seed):
    model = plain_model()
    start(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, recipe_variables={"num_epochs": 1})
    return model


def mask():
    return torch.ones(8, 8, dtype=torch.bool).triu()


def layers():
    return sparta.sparsify.find_layers(plain_model())


# A plain value for each parameter, by its name; without one, the parameter keeps its default.
PLAIN = {
    "A": lambda: torch.randn(2, 8, 8),
    "A_mask": mask,
    "B": lambda: torch.randn(2, 8, 8),
    "K": lambda: torch.randn(1, 2, 8, 4),
    "Q": lambda: torch.randn(1, 2, 8, 4),
    "V": lambda: torch.randn(1, 2, 8, 4),
    "actual": lambda: torch.ones(3),
    "block": lambda: 2,
    "calibration": lambda: [torch.randn(4, 8)],
    "config": lambda: None,
    "cls": lambda: Stranger,
    "dense": lambda: nn.Linear(8, 8),
    "evaluate": lambda: lambda: 0.5,
    "example_inputs": lambda: torch.randn(4, 8),
    "exp_modules": lambda: [nn.Linear(8, 8), nn.Linear(8, 8)],
    "expected": lambda: torch.ones(3, dtype=torch.float64),
    "expert_ids": lambda: torch.zeros(4, dtype=torch.long),
    "expert_weights": lambda: torch.randn(2, 8, 8),
    "final": lambda: 0.5,
    "fn": lambda: lambda: None,
    "functions": lambda: {"f": lambda: None},
    "grad": lambda: torch.randn(8, 8),
    "h": lambda: 4,
    "input_scale": lambda: 0.1,
    "inputs": lambda: (torch.randn(4, 8),),
    "iters": lambda: 2,
    "k": lambda: torch.randn(1, 2, 8, 4),
    "layers": layers,
    "levels": lambda: 3,
    "m": lambda: 4,
    "mask": mask,
    "masks": lambda: {"weight": mask()},
    "matrix": lambda: torch.randn(8, 8),
    "max_seconds": lambda: 0.05,
    "max_trials": lambda: 2,
    "model": plain_model,
    "modifiers": list,
    "module": lambda: nn.Sequential(sparta.nn.SparseLinear(nn.Linear(8, 8), weight_mask=mask())),
    "n": lambda: 2,
    "name": lambda: "m4n2_1d",
    "optimizer": lambda: torch.optim.SGD(plain_model().parameters(), lr=0.1),
    "output": lambda: torch.randn(8, 8),
    "path": lambda: Path("missing") / "file",
    "pattern": lambda: sparta.Block(4, 1),
    "q": lambda: torch.randn(1, 2, 8, 4),
    "raw_module": lambda: nn.Linear(8, 8),
    "sample_inputs": lambda: (torch.randn(4, 8),),
    "score": lambda: torch.rand(8, 8),
    "schedule": lambda: 0.5,
    "shape": lambda: (8, 8),
    "shapes": lambda: [(8, 8)],
    "sparsity": lambda: 0.5,
    "steps_per_epoch": lambda: 10,
    "stages": tuple,
    "teacher": plain_model,
    "state": dict,
    "store": lambda: False,
    "tensor": lambda: torch.randn(8, 8),
    "threshold": lambda: 0.1,
    "tokens": lambda: torch.randn(4, 8),
    "total": lambda: 100,
    "tune": lambda: "off",
    "v": lambda: torch.randn(1, 2, 8, 4),
    "w": lambda: 1,
    "weight": lambda: torch.zeros(8, 8, dtype=torch.int8),
    "weight_mask": mask,
    "weight_scale": lambda: torch.ones(8),
    "x": lambda: torch.randn(8, 8),
}
# Where a name means something else.
SPECIAL = {
    ("SparseConv1d", "raw_module"): lambda: nn.Conv1d(4, 8, 2),
    ("SparseConv1d", "weight_mask"): lambda: torch.ones(8, 4, 2, dtype=torch.bool),
    ("SparseConv2d", "raw_module"): lambda: nn.Conv2d(4, 8, 2),
    ("SparseConv2d", "weight_mask"): lambda: torch.ones(8, 4, 2, 2, dtype=torch.bool),
    ("SparseConv2d.forward", "x"): lambda: torch.randn(1, 4, 6, 6),
    ("Schedule", "shape"): lambda: "cubic",
    ("VNM", "v"): lambda: 4,
    ("VNM", "m"): lambda: 8,
    ("conv_reference", "x"): lambda: torch.randn(1, 4, 6, 6),
    ("conv_reference", "weight"): lambda: torch.randn(8, 4, 2, 2),
    ("conv_reference", "weight_mask"): lambda: None,
    ("modifier_named", "name"): lambda: "MagnitudePruningModifier",
    ("make_score", "score"): lambda: "magnitude",
    ("Sparsifier", "score"): lambda: "magnitude",
    ("make_masks", "score"): lambda: lambda layer: layer.parameter.abs(),
    ("measure_sensitivity", "score"): lambda: None,
    ("measure_sensitivity", "levels"): lambda: (0.5,),
    ("prune_structured", "score"): lambda: "l2",
    ("add_lora", "model"): pruned_linear,
    ("compare", "methods"): lambda: ["magnitude"],
    ("compare", "sparsities"): lambda: [0.5],
    ("compare", "train"): lambda: trained,
    ("compare", "evaluate"): lambda: lambda _model: 0.5,
    ("recover", "model"): pruned_model,
    ("recover", "data"): lambda: [torch.randn(4, 8)],
    ("recover", "steps"): lambda: 2,
    ("recover", "block_steps"): lambda: 2,
    ("block_mask", "score"): lambda: None,
    ("along_inputs", "layer"): lambda: layers()[0],
    ("build_sparse_scheduler", "config"): lambda: {"scheduler": {"type": "ADMMScheduler"}},
    ("moe_reference", "expert_ids"): lambda: torch.zeros(4, dtype=torch.long),
    ("Random", "seed"): lambda: 0,
    ("FakeSparse", "weight"): lambda: torch.randn(8, 8),
    ("STRFakeSparse", "weight"): lambda: torch.randn(8, 8),
    ("ProbMaskFakeSparse", "weight"): lambda: torch.randn(8, 8),
    ("SparseInt8Linear", "input_scale"): lambda: 0.1,
    ("SparseInt8Linear.from_float", "input_scale"): lambda: None,
    **{(name, "number"): lambda: bytes(8) for name in ("PublicKey", "SigningKey")},
    ("PublicKey", "point"): lambda: bytes(32),
    ("SigningKey", "seed"): lambda: bytes(32),
    ("SparseLinear", "weight_mask"): mask,
    ("SparseBatchMatMul", "A_mask"): mask,
}


# One name for two things in two rooms.
OTHER_THINGS = {("testing", "compare"): "compare times"}


def public():
    """Yield the name and the callable of everything that a user may call, once, whatever it is called elsewhere."""
    seen, walked = set(), set()
    for room in ROOMS:
        module = getattr(sparta, room) if room else sparta
        for name in module.__all__:
            thing = getattr(module, name)
            name = OTHER_THINGS.get((room, name), name)  # noqa: PLW2901
            if not callable(thing) or inspect.ismodule(thing) or name in seen:
                continue
            seen.add(name)
            if name not in NOT_CALLED_BY_USERS and id(thing) not in walked:
                walked.add(id(thing))
                yield name, thing
            for method in METHODS.get(name, ()):
                if hasattr(thing, method):
                    yield f"{name}.{method}", getattr(thing, method)


CALLS = dict(public())


def plain(name, parameter):
    """Return a plain value for a parameter, or its default."""
    for key in ((name, parameter.name), (name.partition(".")[0], parameter.name)):
        if key in SPECIAL:
            return SPECIAL[key]()
    if parameter.default is not inspect.Parameter.empty and parameter.name not in (
        "tune",
        "iters",
        "max_seconds",
        "store",
    ):
        return parameter.default
    return PLAIN[parameter.name]() if parameter.name in PLAIN else None


def parameters_of(thing):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one for one in inspect.signature(thing).parameters.values() if one.kind not in kinds]


def bound(name, thing):
    """Return what to call: a method of a plain object for an unbound method."""
    owner, _, method = name.partition(".")
    if method and not inspect.ismethod(thing):
        made = CALLS[owner]
        return getattr(made(**{p.name: plain(owner, p) for p in parameters_of(made)}), method)
    return thing


# What still escapes, by callable and parameter ("*" for all), with the reason.
USERS_CODE = "the user's own model or callable is run on it, and its error comes out as it was raised"
LEFT = {
    ("compile", "example_inputs"): USERS_CODE,
    ("compile_model", "example_inputs"): USERS_CODE,
    ("compile", "progress"): USERS_CODE,
    ("compile_model", "progress"): USERS_CODE,
    ("prune_structured", "score"): USERS_CODE,
    ("prune_structured", "data"): USERS_CODE,
    ("prune", "progress"): USERS_CODE,
    ("recover", "progress"): USERS_CODE,
    ("make_masks", "score"): USERS_CODE,
    ("measure_sensitivity", "evaluate"): USERS_CODE,
    ("compare", "train"): USERS_CODE,
    ("compare", "evaluate"): USERS_CODE,
    ("compare", "progress"): USERS_CODE,
    ("compare times", "inputs"): USERS_CODE,
    ("profile", "inputs"): USERS_CODE,
    ("profile", "fn"): USERS_CODE,
    ("search_permutation", "escapes"): "takes as many escapes as asked, for as long as that takes",
}


def escaped(call, arguments):
    """Return the exception that is not ours, or None."""
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            call(**arguments)
    except SpartaError:
        return None
    except Exception as error:  # noqa: BLE001 - which exceptions come out is what is asked
        return error
    return None


def findings(name):
    """Return what escapes from one public callable, by parameter and kind of wrong value."""
    call, found = bound(name, CALLS[name]), {}
    for parameter in parameters_of(call):
        if {(name, parameter.name), (name, "*")} & LEFT.keys():
            continue
        for kind, make in WRONG.items():
            arguments = {p.name: plain(name, p) for p in parameters_of(call)}
            arguments[parameter.name] = make()
            error = escaped(call, arguments)
            if error is not None:
                found[f"{parameter.name}={kind}"] = f"{type(error).__name__}: {error}"[:160]
    return found


@pytest.mark.parametrize("name", CALLS)
def test_nothing_but_our_errors_escapes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not findings(name)


def test_a_foreign_error_would_be_noticed():
    def half(x: object) -> object:
        return x / 2

    assert isinstance(escaped(half, {"x": "no such thing"}), TypeError)
    assert escaped(sparta.load, {"path": "missing"}) is None


def test_what_is_left_is_still_there():
    assert {name for name, _ in LEFT} <= CALLS.keys() | {"compile_model", "prune"}
