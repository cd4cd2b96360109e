"""A compiled model takes the sizes that the model takes, with the kernels of the nearest size, also from a file."""

import pytest
import torch
from torch import nn

import sparta
from compiler import nets
from compiler.clocks import Clock
from compiler.conftest import choosing, chosen, forcing
from sparta.compiler.graph.sizes import Sizes
from sparta.compiler.retune import tuned_at
from sparta.compiler.run.given import GivenModel
from sparta.compiler.session import Session
from sparta.errors import FileFormatError, ShapeError, ValueRangeError


def agree(found, expected):
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-4)


def through_a_file(fast, tmp_path):
    fast.save(tmp_path / "model.sparta")
    return sparta.load(tmp_path / "model.sparta")


@pytest.mark.parametrize("example", [(1, 6), (4, 7)])
def test_text_of_any_length_with_padding(forced, tmp_path, example):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(24, 32)
            self.block = nets.Attention()

        def forward(self, ids, attention_mask):
            places = torch.arange(ids.shape[1])
            kept = attention_mask[:, None, None, :].bool()
            hidden = self.block(self.tokens(ids) + self.places(places), kept)["hidden"]
            weight = attention_mask[..., None].float()
            return (hidden * weight).sum(1) / weight.sum(1)

    def batch(size, length):
        lengths = torch.randint(1, length + 1, (size, 1))
        return {"ids": torch.randint(0, 50, (size, length)), "attention_mask": (torch.arange(length) < lengths).long()}

    model = nets.pruned(Encoder())
    fast = sparta.compile(model, batch(*example), tune="off")
    loaded = through_a_file(fast, tmp_path)
    for size in ((1, 1), (1, 6), (2, 6), (5, 1), (3, 24), (9, 13)):
        given = batch(*size)
        agree(fast(**given), model(**given))
        agree(loaded(**given), model(**given))
    for run in (fast, loaded):
        with pytest.raises(IndexError):  # as the model itself: there are 24 places
            run(**batch(2, 25))
    assert any(layer.sparse for layer in fast.report.plan.layers)


def test_images_of_any_size(forced, tmp_path):
    model = nets.pruned(nets.Cnn())
    fast = sparta.compile(model, torch.randn(1, 3, 16, 16), tune="off")
    loaded = through_a_file(fast, tmp_path)
    assert fast.kernels
    for shape in ((1, 3, 16, 16), (4, 3, 16, 16), (2, 3, 21, 9), (1, 3, 40, 40)):
        x = torch.randn(shape)
        agree(fast(x), model(x))
        agree(loaded(x), model(x))


def test_a_size_that_the_model_fixes_is_told():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 64, 3)).eval()
    fast = sparta.compile(model, torch.randn(2, 1, 8, 8), tune="off")
    agree(fast(torch.ones(5, 1, 8, 8)), model(torch.ones(5, 1, 8, 8)))
    with pytest.raises(ShapeError, match="any×1×8×8"):
        fast(torch.ones(5, 1, 8, 9))


class Branching(nn.Module):
    """A path that depends on a size: one graph is right on one side of it only."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if x.shape[0] < 6 else self.linear(x) * 2


def test_sizes_that_no_graph_takes_are_left_to_the_model():
    model = Branching().eval()
    fast = sparta.compile(model, torch.randn(3, 8), tune="off")
    for size in (1, 3, 5, 6, 40):
        x = torch.randn(size, 8)
        agree(fast(x), model(x))


def test_a_file_refuses_sizes_that_its_graph_is_wrong_at(tmp_path):
    loaded = through_a_file(sparta.compile(Branching().eval(), torch.randn(3, 8), tune="off"), tmp_path)
    with pytest.raises(ShapeError):
        loaded(torch.randn(6, 8))


def test_sizes_can_be_fixed_and_several_calls_be_given(forced):
    model = nets.pruned(nets.Mlp())
    fixed = sparta.compile(model, torch.randn(6, 32), tune="off", dynamic_shapes=None)
    assert fixed.general is None
    with pytest.raises(ShapeError):
        fixed(torch.randn(5, 32))
    fast = sparta.compile(model, [(torch.randn(4, 32),), (torch.randn(40, 32),)], tune="off")
    assert all(set(layer.choices) == {4, 40} for layer in fast.report.plan.layers)
    for size in (1, 4, 13, 40):
        x = torch.randn(size, 32)
        agree(fast(x), model(x))


def test_another_size_is_tuned_on_request(forced, tmp_path):
    model = nets.pruned(nets.Mlp())
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    report = fast.tune(torch.randn(64, 32), tune="off")
    assert all(set(layer.choices) == {4, 64} for layer in report.plan.sparse)
    loaded = through_a_file(fast, tmp_path)
    assert {size for kernel in loaded.kernels.values() for size in kernel.choices} == {4, 64}
    for size in (4, 64, 20):
        x = torch.randn(size, 32)
        agree(fast(x), model(x))
        agree(loaded(x), model(x))


def tuned(fast, x, wins, **options):
    """Tune a size by a clock that finds one candidate fast, and return the names of all candidates."""
    clock = Clock(lambda name: 1.0 if name == wins else 2.0)
    tuned_at(fast, [x], Session(measure=clock, **options))
    ((names, _),) = clock.asked
    return set(names)


@pytest.mark.parametrize("wins", ["nearest", "measured", "measured chain", "dense", "given"])
def test_what_is_fastest_at_a_size_runs_there(forced, tmp_path, wins):
    model, x = nets.pruned(nets.Mlp()), torch.randn(64, 32)
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    assert tuned(fast, x, wins) >= {"nearest", "measured", "dense", "given"}
    assert isinstance(fast.decided_at([x]), GivenModel) == (wins == "given")
    assert any("as given was faster than its graphs at 64×32" in note for note in fast.report.notes) == (
        wins == "given"
    )
    for kernel in fast.kernels.values():
        assert set(kernel.choices) == ({4, 64} if wins.startswith(("measured", "dense")) else {4})
        assert (kernel.choice_for(x).implement == "dense") == (wins == "dense")
    loaded = through_a_file(fast, tmp_path)
    for size in (4, 64, 63):
        y = torch.randn(size, 32)
        with torch.no_grad():
            agree(fast(y), model(y))
            agree(loaded(y), model(y))


def test_a_size_is_timed_even_if_its_layers_took_all_of_the_budget(forced):
    fast = sparta.compile(nets.pruned(nets.Mlp()), torch.randn(4, 32), tune="off")
    assert tuned(fast, torch.randn(64, 32), "dense", budget_s=1e-9)
    assert all(kernel.choices[64][1].implement == "dense" for kernel in fast.kernels.values())


def test_the_model_as_given_is_that_of_the_compilation():
    model, x = nets.pruned(nets.Mlp()), torch.randn(64, 32)
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    expected = model(x).detach()
    tuned(fast, x, "given")
    with torch.no_grad():
        next(model.parameters()).add_(1.0)  # as training would
    agree(fast(x), expected)
    other = sparta.compile(model, torch.randn(4, 32), tune="off")
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    assert "given" not in tuned(other, x, "given")


def test_a_decision_holds_when_another_size_brings_new_kernels():
    model, x = nets.pruned(nets.Mlp()), torch.randn(64, 32)
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    tuned(fast, x, "given")
    with pytest.MonkeyPatch.context() as patch:
        choosing(patch, chosen)
        assert "measured" in tuned(fast, torch.randn(9, 32), "measured")
    assert fast.kernels
    assert isinstance(fast.decided_at([x]), GivenModel)
    for size in (4, 9, 64):
        y = torch.randn(size, 32)
        agree(fast(y), model(y))


def test_sizes_of_one_bucket_share_their_packed_weights(forced):
    fast = sparta.compile(nets.pruned(nets.Mlp()), torch.randn(4, 32), tune="off")
    for size in (130, 131, 140, 150):
        fast.tune(torch.randn(size, 32), tune="off")
    for kernel in fast.kernels.values():
        assert {4, 130, 131, 140, 150} <= set(kernel.choices)
        assert len({kernel.built(size)[1][0].data_ptr() for size in (130, 131, 140, 150)}) == 1


def test_sizes_are_tuned_as_they_come(forced):
    model = nets.pruned(nets.Mlp())
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    assert fast.tune_unseen(budget_s=0.05, most=2) is fast
    for _ in range(2):
        for size in (9, 64, 100):
            y = torch.randn(size, 32)
            agree(fast(y), model(y))
    fast._unseen.wait()
    assert [size for size in (9, 64, 100) if fast.decided_at([torch.empty(size, 32)]) is not None] == [9, 64]
    for size in (4, 9, 64, 100):
        y = torch.randn(size, 32)
        agree(fast(y), model(y))
    fast.tune_unseen(most=0)
    agree(fast(torch.ones(7, 32)), model(torch.ones(7, 32)))


def test_what_goes_wrong_in_the_background_changes_nothing(monkeypatch):
    def fails(*_arguments):
        raise RuntimeError("no")

    monkeypatch.setattr("sparta.compiler.background.tuned_at", fails)
    model = nets.pruned(nets.Mlp())
    fast = sparta.compile(model, torch.randn(4, 32), tune="off").tune_unseen()
    y = torch.randn(9, 32)
    agree(fast(y), model(y))
    fast._unseen.wait()
    agree(fast(y), model(y))
    with pytest.raises(ValueRangeError, match="seconds above 0"):
        fast.tune_unseen(budget_s=0)


def test_a_layer_that_was_dense_gets_a_kernel_where_it_wins(tmp_path):
    model = nets.pruned(nets.Mlp())
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    assert not fast.kernels
    with forcing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparta.compiler.choose.layers.choose", lambda spec, _store=None: chosen(spec))
        fast.tune(torch.randn(64, 32), tune="off")
    assert fast.kernels
    loaded = through_a_file(fast, tmp_path)
    for size in (4, 64):
        x = torch.randn(size, 32)
        agree(fast(x), model(x))
        agree(loaded(x), model(x))


def test_copies_and_moved_models_take_any_size(forced):
    import copy

    model, x = nets.pruned(nets.Mlp()), torch.randn(9, 32)
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    agree(copy.deepcopy(fast)(x), model(x))
    with pytest.warns(UserWarning, match="Dense runs instead"):
        fast.double()
    torch.testing.assert_close(fast(x.double()), model.double()(x.double()).detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "damage",
    [
        {"dims": [["s0", ["import", "os"]]]},
        {"dims": [["s0"]]},
        {"guards": [["eq", "unknown", 1]]},
        {"ranges": {"s0": [-1, None]}},
        {"guards": [[[["add"]]]]},
    ],
)
def test_sizes_of_files_are_checked(damage):
    sizes = Sizes(((2, 8),), (("s0", 8),), {"s0": (1, None)}, (["le", "s0", 64],))
    assert Sizes.from_dict(sizes.to_dict()) == sizes
    with pytest.raises(FileFormatError):
        Sizes.from_dict({**sizes.to_dict(), **damage})


def test_a_trace_for_any_size_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr("sparta.compiler.graph.capturing._MOST_SECONDS", -1.0)
    model, x = nets.pruned(nets.Mlp()), torch.randn(9, 32)
    fast = sparta.compile(model, torch.randn(4, 32), tune="off")
    assert "takes more than" in fast.report.notes[0]
    agree(fast(x), model(x))  # by the model as given


def test_torchs_own_arithmetic_of_sizes_may_fail(monkeypatch):
    def fails(graph):
        raise AssertionError(-1)  # as torch's remainder of a number below zero

    monkeypatch.setattr("sparta.compiler.graph.capturing.pinned", fails)
    model, x = nets.pruned(nets.Mlp()), torch.randn(6, 32)
    fast = sparta.compile(model, x, tune="off")
    assert hasattr(fast, "graph")  # the whole, and not parts of it
    assert any("the example's sizes only: AssertionError: -1" in note for note in fast.report.notes)
    agree(fast(x), model(x))


def test_an_example_of_one_that_the_trace_fixes():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nets.pruned(nn.Linear(16, 8))

        def forward(self, x):
            return torch.stack([self.layer(each).relu() for each in x])  # as many as there are when it is traced

    model, x = Looped().eval(), torch.randn(1, 3, 16)
    fast = sparta.compile(model, x, tune="off")
    agree(fast(x), model(x))
    more = torch.randn(3, 3, 16)
    agree(fast(more), model(more))
