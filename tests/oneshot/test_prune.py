"""`sparta.prune` on whole models: order, structure, allocation, refinement and resume."""

import copy
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sparta
from oneshot.models import Loose, make, same, tokens
from sparta.errors import (
    FileFormatError,
    MissingPackageError,
    ValueRangeError,
)
from sparta.oneshot import Problem, prune
from sparta.oneshot.calibrate import Grams
from sparta.oneshot.methods import sparsegpt
from sparta.oneshot.stages import find_chain, order
from sparta.oneshot.targets import find_targets
from sparta.tesa.patterns import NM

# ---------------------------------------------------------------- what is pruned


def test_heads_and_tied_embeddings_are_left_out_unless_named():
    model = make()
    found = [target.name for target in find_targets(model)]
    assert "lm_head.weight" not in found
    assert found[0] == "enter.weight"
    assert [t.name for t in find_targets(model, include="lm_head.weight")] == ["lm_head.weight"]
    spec, _ = prune(model, tokens(), "2:4", ignore="layers.0.*")
    assert min(spec) == "enter.weight"
    assert not any(name.startswith("layers.0") for name in spec)
    spec.check(model)


def test_the_pruned_model_obeys_the_spec_and_other_weights_are_untouched():
    model, dense = make(), make()
    spec, log = prune(model, tokens(), "2:4")
    spec.check(model)
    for tesa in spec.values():
        NM(2, 4).validate(tesa.mask())
    assert {layer.density for layer in log} == {0.5}
    pruned = set(spec)
    for (name, a), (_, b) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        assert torch.equal(a, b) != (name in pruned)
    assert sparta.prune is prune


def test_alps_is_the_default_with_data_and_magnitude_without():
    model, dense = make(), make()
    _, log = prune(model, None, "unstructured", 0.5)
    assert log.method == "magnitude"
    names = [target.name for target in find_targets(dense)]
    expected = sparta.Spec.from_pattern(dense, "unstructured", 0.5, include=names)
    expected.apply(dense)
    assert same(model, dense)
    assert prune(make(), tokens(), "unstructured", 0.5)[1].method == "alps"


def test_modes_and_settings_of_the_model_come_back():
    model = make().train()
    model.layers[0].eval()
    prune(model, tokens(), "2:4", method="wanda")
    assert model.training
    assert not model.layers[0].training
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---------------------------------------------------------------- order of calibration


def test_blocks_are_found_and_layers_before_and_after_them_too():
    model = make()
    targets = find_targets(model)
    chain = find_chain(model, targets, tokens()[0])
    assert chain.names == ["layers.0", "layers.1"]
    stages, unused = order(model, targets, tokens()[0], chain)
    assert [stage.name for stage in stages] == ["enter", "layers.0", "layers.1"]
    assert [len(stage.targets) for stage in stages] == [1, 6, 6]
    assert not unused


def test_each_layer_is_calibrated_with_all_before_it_pruned():
    """The whole run again, by hand: block by block, each with the inputs that the pruned model gives it."""
    model, by_hand = make(), make()
    data = tokens()
    prune(model, data, "2:4", method="sparsegpt")
    by_hand.eval()
    for names in (["enter"], *([f"layers.{i}.{n}" for n in PARTS] for i in range(2))):
        targets = [t for t in find_targets(by_hand) if t.name.removesuffix(".weight") in names]
        grams = Grams(targets)
        with torch.no_grad():
            for batch in data:
                with grams.watch():
                    by_hand(batch)
            for target in targets:
                problem = Problem.of(target.parameter, grams[target.name], NM(2, 4))
                target.parameter.copy_(sparsegpt(problem).weight[0])
    for (name, a), (_, b) in zip(model.named_parameters(), by_hand.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


PARTS = ["attention.q", "attention.k", "attention.v", "attention.o", "up", "down"]


def test_layers_with_one_input_share_one_gram_matrix():
    model = make()
    grams = Grams(find_targets(model))
    for batch in tokens():
        with grams.watch():
            model(batch)
    q, k, v, o = (grams.sums[f"layers.0.attention.{n}.weight"] for n in "qkvo")
    assert q is k
    assert k is v
    assert q is not o


def test_a_gram_matrix_is_the_sum_over_all_batches():
    torch.manual_seed(0)
    linear = nn.Linear(6, 3).double()
    data = [torch.randn(2, 5, 6, dtype=torch.float64) for _ in range(3)]
    grams = Grams(find_targets(linear))
    for x in data:
        with grams.watch():
            linear(x)
    rows = torch.cat(data).reshape(-1, 6)
    assert torch.allclose(grams["weight"][0], rows.T @ rows)


def test_what_the_gram_matrix_alone_gives_is_computed_once(monkeypatch):
    calls = []
    decompose = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(matrix.shape) or decompose(matrix))
    prune(make(), tokens(), "2:4", include="layers.0.*")
    assert len(calls) == 4  # q, k and v share one; o, up and down have one each


def test_a_model_without_blocks_is_pruned_by_whole_passes():
    model = make(Loose)
    data = [torch.randn(32, 8) for _ in range(2)]
    assert find_chain(model, find_targets(model), data[0]) is None
    spec, log = prune(model, data, "2:4")
    spec.check(model)
    assert set(spec) == {"a.weight", "b.weight", "c.weight"}
    assert log["unused.weight"].density == 1
    assert "never called" in log["unused.weight"].note
    assert "never called" in str(log)


def test_whole_passes_give_what_blocks_give():
    """A Sequential is a chain; the same layers called by hand are none, and the result is the same."""

    class ByHand(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.a, self.b, self.c = layers

        def forward(self, x):
            return self.c(torch.relu(self.b(torch.relu(self.a(x)))))

    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)]
    chain = nn.Sequential(copy.deepcopy(layers[0]), nn.ReLU(), copy.deepcopy(layers[1]), nn.ReLU(inplace=True),
                          copy.deepcopy(layers[2]))  # fmt: skip
    loose = ByHand(layers)
    data = [torch.randn(40, 8) for _ in range(2)]
    prune(chain, data, "2:4")
    prune(loose, data, "2:4")
    for a, b in zip((chain[0], chain[2], chain[4]), (loose.a, loose.b, loose.c), strict=True):
        assert torch.allclose(a.weight, b.weight, atol=1e-5)


class Shift(nn.Module):
    """Changes its input in place when it is told to."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.add_(1) if self.in_place else x + 1


def test_blocks_that_work_in_place_are_run_twice_on_the_same_inputs():
    results = []
    for in_place in (False, True):
        torch.manual_seed(0)
        first = nn.Sequential(Shift(in_place), nn.Linear(8, 8))
        model = nn.Sequential(nn.Linear(8, 8), first, nn.Linear(8, 4))
        prune(model, [torch.randn(32, 8) for _ in range(2)], "2:4", refine="block")
        results.append(model)
    assert same(*results)


def test_blocks_that_take_more_arguments_get_them():
    a, b = make(), make()
    prune(a, [{"tokens": t, "scale": 0.0} for t in tokens()], "2:4", method="sparsegpt", include="layers.*.up.weight")
    prune(b, [(t, 0.0) for t in tokens()], "2:4", method="sparsegpt", include="layers.*.up.weight")
    assert same(a, b)
    c = make()
    prune(c, tokens(), "2:4", method="sparsegpt", include="layers.*.up.weight")
    assert not same(a, c)


# ---------------------------------------------------------------- kinds of layers


@pytest.mark.parametrize(
    "conv",
    [
        lambda: nn.Conv2d(4, 6, 3, padding=1),
        lambda: nn.Conv2d(4, 6, (2, 3), stride=(2, 1), dilation=(1, 2)),
        lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"),
        lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False),
        lambda: nn.Conv1d(4, 6, 3, padding=2),
        lambda: nn.Conv1d(8, 8, 5, groups=8),
    ],
)
def test_unfolded_inputs_times_the_matrix_are_the_convolution(conv):
    torch.manual_seed(0)
    module = conv().double()
    x = torch.randn(2, module.in_channels, *([9, 8][: module.weight.dim() - 2]), dtype=torch.float64)
    (target,) = find_targets(module)
    rows = target.rows(x)
    matrix = target.layout.to_matrix(target.parameter)
    product = torch.cat([r @ m.T for r, m in zip(rows, matrix, strict=True)], 1)
    expected = module(x) if module.bias is None else module(x) - module.bias.view(-1, *[1] * (x.dim() - 2))
    expected = expected.movedim(1, -1).reshape(-1, module.out_channels)
    assert torch.allclose(product, expected)


def test_a_convolution_is_pruned_like_the_linear_layer_of_its_unfolded_input():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3).double()
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64)
    (target,) = find_targets(conv)
    linear = nn.Linear(36, 6, bias=False).double()
    linear.weight.data.copy_(target.layout.to_matrix(conv.weight.detach())[0])
    rows = target.rows(x)[0]
    for method in ("wanda", "sparsegpt", "alps"):
        a, b = copy.deepcopy(conv), copy.deepcopy(linear)
        prune(a, [x], "2:4", method=method)
        prune(b, [rows], "2:4", method=method)
        assert torch.allclose(target.layout.to_matrix(a.weight)[0], b.weight)


class Conv1D(nn.Module):
    """A linear layer that stores its weight as inputs × outputs."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize(("pattern", "sparsity"), [("2:4", None), ("4x1", 0.5), ("unstructured", 0.6)])
def test_a_stored_transposed_layer_is_pruned_like_a_linear_layer(pattern, sparsity):
    torch.manual_seed(0)
    stored, linear = Conv1D(8, 12), nn.Linear(12, 8)
    linear.weight.data.copy_(stored.weight.data.t())
    x = torch.randn(64, 12)
    spec, log = prune(stored, [x], pattern, sparsity)
    prune(linear, [x], pattern, sparsity)
    assert torch.equal(stored.weight.t(), linear.weight)
    spec.check(stored)
    assert log["weight"].error < log["weight"].error_before


def test_low_precision_weights_are_solved_in_float32_and_stay_low_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).bfloat16()
    spec, log = prune(model, [torch.randn(64, 16, dtype=torch.bfloat16)], "2:4")
    assert model[0].weight.dtype == torch.bfloat16
    spec.check(model)
    assert all(layer.error < layer.error_before for layer in log)


# ---------------------------------------------------------------- log, allocation, refinement, resume


def test_errors_in_the_log_are_those_of_the_outputs():
    torch.manual_seed(0)
    linear = nn.Linear(16, 8, bias=False).double()
    x = torch.randn(100, 16, dtype=torch.float64) @ torch.randn(16, 16, dtype=torch.float64)
    linear.requires_grad_(False)
    before = linear(x)
    plain = copy.deepcopy(linear)
    sparta.Spec.from_pattern(plain, "2:4").apply(plain)
    _, log = prune(linear, [x[:50], x[50:]], "2:4")
    entry = log["weight"]
    assert math.isclose(entry.error, float((linear(x) - before).norm() / before.norm()), rel_tol=1e-9)
    assert math.isclose(entry.error_before, float((plain(x) - before).norm() / before.norm()), rel_tol=1e-9)
    assert entry.error < entry.error_before


def test_the_log_is_a_table_a_dict_and_a_frame(monkeypatch):
    pandas = pytest.importorskip("pandas")
    _, log = prune(make(), tokens(), "2:4", method="wanda")
    text = str(log)
    assert "layers.0.attention.q.weight" in text
    assert "error (wanda)" in text
    found = log.to_dict()
    assert len(found["layers"]) == len(log) == 13
    assert found["layers"][0]["density"] == 0.5
    assert log.seconds > 0
    frame = log.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["name"]) == [layer.name for layer in log]
    assert list(frame["error"]) == [layer.error for layer in log]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="to_dict"):
        log.to_dataframe()


@pytest.mark.parametrize(
    "allocation", ["uniform", "global", "erk", "lamp", "energy", sparta.sparsify.Global(max_sparsity=0.8)], ids=str
)
def test_allocations_meet_the_whole_budget(allocation):
    model = make()
    for index, linear in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
        linear.weight.data *= 1 + index % 3
    spec, log = prune(model, tokens(), "unstructured", 0.6, allocation=allocation, method="wanda")
    assert math.isclose(spec.density, 0.4, abs_tol=2e-3)
    assert (len({round(layer.density, 2) for layer in log}) == 1) == (allocation == "uniform")


def test_measured_sensitivities_say_where_zeros_go():
    model = make()
    names = [target.name for target in find_targets(model)]
    steep = {name: [(0.0, 0.0), (0.9, 9.0 if name.startswith("layers.0") else 0.1)] for name in names}
    _, log = prune(model, tokens(), "unstructured", 0.5, allocation=sparta.sparsify.Sensitivity(curves=steep))
    first = [layer.density for layer in log if layer.name.startswith("layers.0")]
    others = [layer.density for layer in log if not layer.name.startswith("layers.0")]
    assert min(first) > max(others)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "alps", "obc"])
def test_heads_are_blocks_as_high_as_the_layer_that_reads_them(method):
    model = make()
    spec, log = prune(model, tokens(), {"layers.*.attention.o.weight": "16x4"}, 0.5, method=method)
    assert len(spec) == len(log) == 2
    for tesa in spec.values():
        heads = tesa.mask().view(16, 4, 4)
        assert sorted(int(heads[:, head].sum()) for head in range(4)) == [0, 0, 64, 64]
    for layer in log:
        assert layer.error <= layer.error_before or method == "wanda"


def test_a_loader_of_data_is_an_iterable_like_others():
    samples = torch.cat(tokens())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=4)
    a, b = make(), make()
    prune(a, loader, "2:4", method="sparsegpt")
    prune(b, tokens(), "2:4", method="sparsegpt")
    assert same(a, b)


def test_patterns_by_layer():
    model = make()
    spec, _ = prune(model, tokens(), {"layers.*.attention.*": "2:4", "layers.*.up.weight": "4x1"}, 0.5)
    assert set(spec) == {t.name for t in find_targets(model) if "attention" in t.name or ".up." in t.name}
    NM(2, 4).validate(spec["layers.0.attention.q.weight"].mask())
    sparta.Block(4, 1).validate(spec["layers.1.up.weight"].mask())
    spec.check(model)


def test_sparsities_by_layer():
    _, log = prune(make(), tokens(), "unstructured", {"layers.0.*": 0.75, "*": 0.25}, method="wanda")
    for layer in log:
        assert layer.density == pytest.approx(0.25 if layer.name.startswith("layers.0") else 0.75, abs=0.01)
    mixed = {"layers.0.*": "2:4", "layers.1.*": "4x1"}
    _, log = prune(make(), tokens(), mixed, {"layers.1.*": 0.75}, method="wanda")
    assert {layer.density for layer in log} == {0.5, 0.25}
    with pytest.raises(ValueRangeError, match=r"no sparsity for 'layers.1"):
        prune(make(), tokens(), "4x1", {"layers.0.*": 0.5, "enter.weight": 0.5})
    with pytest.raises(ValueRangeError, match="one of them"):
        prune(make(), tokens(), "4x1", {"*": 0.5}, allocation="erk")
    with pytest.raises(ValueRangeError, match="real number"):
        prune(make(), tokens(), "4x1", {"*": 2.0})


def test_the_log_draws_itself():
    pytest.importorskip("matplotlib").use("Agg")
    _, log = prune(make(), tokens(), "2:4", method="wanda")
    assert len(log.plot().patches) == 2 * len(log)


def test_progress_gets_a_step_for_each_stage():
    steps = []
    prune(make(), tokens(), "2:4", method="wanda", progress=steps.append)
    assert [step.name for step in steps] == ["enter", "layers.0", "layers.1"]
    assert "6 layers, density 0.500" in str(steps[1])


def test_blocks_are_not_run_to_find_out_what_they_are_called_with():
    model, calls = make(), []
    for layer in model.layers:
        layer.up.register_forward_hook(lambda *_: calls.append(1))
    prune(model, tokens(5), "2:4", method="wanda", include="layers.*")
    # to see the order: once per block and batch 0, twice; to calibrate; to hand over to the next block
    assert len(calls) == 2 * 2 + 2 * 5 + 5


def test_refining_a_block_brings_its_output_nearer_and_holds_the_masks():
    plain, refined, dense = make(), make(), make()
    data = tokens(4)
    prune(plain, data, "2:4", method="wanda")
    spec, log = prune(refined, data, "2:4", method="wanda", refine="block")
    spec.check(refined)
    assert log.method == "wanda+block"
    with torch.no_grad():
        far, near = (sum(float((m(x) - dense(x)).square().sum()) for x in data) for m in (plain, refined))
    assert near < far
    assert all(p.grad is None and p.requires_grad for p in refined.parameters())


def test_a_killed_run_goes_on_exactly(tmp_path):
    data = tokens()
    whole = make()
    spec, log = prune(whole, data, "2:4")

    class KilledError(Exception):
        pass

    def kill(step):
        seen.append(step)
        if len(seen) == 2:
            raise KilledError

    seen = []

    with pytest.raises(KilledError):
        prune(make(), data, "2:4", progress=kill, checkpoint=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    resumed = make()
    again, logged = prune(resumed, data, "2:4", checkpoint=tmp_path)
    assert same(whole, resumed)
    assert again == spec
    assert [entry.error for entry in logged] == [entry.error for entry in log]
    finished = make()
    assert prune(finished, data, "2:4", checkpoint=tmp_path)[0] == spec
    assert same(whole, finished)


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
from oneshot.models import make, tokens
from sparta.oneshot import prune

def kill(step):
    if step.name == "layers.0":
        os.kill(os.getpid(), signal.SIGKILL)

prune(make(), tokens(), "2:4", refine="block", progress=kill, checkpoint={folder!r})
"""


def test_a_process_that_is_killed_leaves_what_it_had_finished(tmp_path):
    code = KILLED.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    seen, whole, resumed = [], make(), make()
    spec, _ = prune(whole, tokens(), "2:4", refine="block")
    again, _ = prune(resumed, tokens(), "2:4", refine="block", checkpoint=tmp_path, progress=seen.append)
    assert again == spec
    assert len(list(tmp_path.glob("*.safetensors"))) == len(seen) == 3
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # the process may have had other threads


@pytest.mark.parametrize("change", ["data", "model", "method", "pattern"])
def test_the_checkpoint_of_another_run_is_refused(tmp_path, change):
    prune(make(), tokens(), "2:4", checkpoint=tmp_path)
    with pytest.raises(FileFormatError, match="another run"):
        prune(
            make(seed=int(change == "model")),
            tokens(seed=int(change == "data")),
            "1:4" if change == "pattern" else "2:4",
            method="wanda" if change == "method" else "auto",
            checkpoint=tmp_path,
        )


def test_a_damaged_checkpoint_is_refused(tmp_path):
    prune(make(), tokens(), "2:4", method="wanda", checkpoint=tmp_path)
    file = min(tmp_path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FileFormatError, match="damaged"):
        prune(make(), tokens(), "2:4", method="wanda", checkpoint=tmp_path)


@pytest.mark.parametrize("method", ["alps", "sparsegpt", "swaps"])
def test_two_runs_are_equal(method):
    a, b = make(), make()
    assert prune(a, tokens(), "2:4", method=method)[0] == prune(b, tokens(), "2:4", method=method)[0]
    assert same(a, b)


def test_the_output_of_the_model_is_nearer_to_the_dense_one_than_by_magnitude():
    dense, plain, pruned = make(), make(), make()
    prune(plain, None, "unstructured", 0.6)
    prune(pruned, tokens(6), "unstructured", 0.6)
    x = tokens(1, seed=5)[0]
    with torch.no_grad():
        assert (pruned(x) - dense(x)).norm() < (plain(x) - dense(x)).norm()
