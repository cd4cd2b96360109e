"""A spec meets a model: zeros are read, masks applied and checked, names found, files round-tripped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparta.errors import CheckError, FileFormatError, NameNotFoundError, ShapeError, ValueRangeError
from sparta.files import save_tensors
from sparta.propagation import prune_structured
from sparta.tesa.attribute import TeSA
from sparta.tesa.patterns import NM, Block, Channel, Unstructured
from sparta.tesa.spec import Spec, prunable
from sparta.tesa.state import to_state
from strategies import tesas


def model():
    return nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16, 12), nn.Linear(12, 8)
    )


class Wrapped(nn.Module):
    """A wrapper as DDP and `torch.compile` put around a model: one more component in every name."""

    def __init__(self, inner, name):
        super().__init__()
        self.add_module(name, inner)


# ---------------------------------------------------------------------- zeros, apply, check


def test_zeros_are_read_back_as_the_pattern_that_made_them():
    net = model()
    spec = Spec.from_pattern(net, NM(2, 4))
    spec.apply(net)
    found = Spec.from_zeros(net)
    assert set(found) == {"0.weight", "4.weight", "5.weight"}
    assert all(tesa.pattern.pattern == NM(2, 4) for tesa in found.values())
    assert {n: t.mask().tolist() for n, t in found.items()} == {n: t.mask().tolist() for n, t in spec.items()}
    assert found.density == pytest.approx(0.5)


def test_fresh_models_have_no_zeros_that_count():
    assert len(Spec.from_zeros(model())) == 0
    assert Spec.from_zeros(model()).density == 1.0
    biased = Spec.from_zeros(model(), include="1.bias")
    assert biased["1.bias"].density == 0.0


def test_zeros_are_read_from_a_state_dict_too():
    net = model()
    Spec.from_pattern(net, Channel(0), 0.5).apply(net)
    assert Spec.from_zeros(net.state_dict()) == Spec.from_zeros(net)


def test_apply_keeps_the_parameters_themselves():
    net = model()
    before = dict(net.named_parameters())
    spec = Spec.from_pattern(net, Unstructured(), 0.9)
    spec.apply(net)
    assert all(before[name] is parameter for name, parameter in net.named_parameters())
    assert all(p.requires_grad for p in net.parameters())
    spec.check(net)


def test_check_names_the_weights_that_break_the_spec():
    net = model()
    spec = Spec.from_pattern(net, Block(4, 4), 0.5, include="*.weight", ignore=["0.*", "1.*"])
    spec.apply(net)
    spec.check(net)
    with torch.no_grad():
        net[4].weight.add_(1.0)
    assert spec.violations(net) == {"4.weight": spec["4.weight"].count("constant")}
    with pytest.raises(CheckError, match=r"4\.weight"):
        spec.check(net)


def test_transposed_convolutions_prune_along_their_input_channels():
    net = nn.Sequential(nn.ConvTranspose2d(8, 6, 3))
    spec = Spec.from_pattern(net, NM(2, 4))
    NM(2, 4, axis=0).validate(spec["0.weight"].mask())
    assert spec["0.weight"].density == 0.5


def test_packed_attention_weights_are_prunable_and_norms_and_biases_are_not():
    net = nn.TransformerEncoderLayer(8, 2, 16)
    assert set(prunable(net)) == {
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight",
    }  # fmt: skip


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    net[1].weight = net[0].weight
    assert not Spec.from_pattern(net, Unstructured(), 0.5), "an embedding is pruned only when it is named"
    spec = Spec.from_pattern(net, Unstructured(), 0.5, include="1.weight")
    spec.apply(net)
    assert net[1].weight is net[0].weight
    assert int((net[0].weight == 0).sum()) == 16


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize("prefix", ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_names_are_seen_through_wrappers_both_ways(prefix):
    net = model()
    spec = Spec.from_pattern(net, NM(2, 4))
    wrapped = Wrapped(net, prefix)
    spec.apply(wrapped)
    spec.check(net)
    assert set(Spec.from_zeros(wrapped)) == set(spec)
    prefixed = Spec({f"{prefix}.{name}": tesa for name, tesa in spec.items()})
    prefixed.check(net)
    assert prefixed["4.weight"] == spec["4.weight"]


def test_globs_and_regular_expressions_stand_for_several_tensors():
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    half = TeSA.from_pattern(Unstructured(), torch.rand(8, 8), 0.5)
    assert set(Spec({"*.weight": half}).resolve(net)) == {"0.weight", "1.weight", "2.weight"}
    assert set(Spec({"re:[01].weight": half}).resolve(net)) == {"0.weight", "1.weight"}
    exact = TeSA.dense((8, 8))
    mixed = Spec({"*.weight": half, "1.weight": exact}).resolve(net)
    assert mixed["1.weight"] == exact
    assert mixed["0.weight"] == half


def test_a_submodule_really_called_module_keeps_its_name():
    inner = Wrapped(nn.Linear(4, 4), "module")
    net = nn.Sequential(inner)
    spec = Spec.from_pattern(net, Unstructured(), 0.5)
    assert set(spec) == {"0.module.weight"}
    spec.apply(net)
    spec.check(net)


def test_wrong_names_and_shapes_say_what_is_there():
    net, half = model(), TeSA.dense((12, 16))
    with pytest.raises(NameNotFoundError, match=r"did you mean '4\.weight'"):
        Spec({"4.weigth": half}).apply(net)
    with pytest.raises(NameNotFoundError, match="unknown tensor name"):
        Spec({"*.kernel": half}).apply(net)
    with pytest.raises(NameNotFoundError, match="unknown tensor name"):
        Spec.from_pattern(net, NM(2, 4), include="fc.*")
    with pytest.raises(ShapeError, match=r"\(8, 12\)"):
        Spec({"5.weight": half}).check(net)
    with pytest.raises(ValueRangeError, match="regular expression"):
        Spec({"re:(": half}).apply(net)
    with pytest.raises(ValueRangeError, match=r"TeSA\.from_mask"):
        Spec({"4.weight": torch.ones(12, 16)})
    with pytest.raises(NameNotFoundError, match="several tensors"):
        Spec({"4.weight": half})["*.weight"]
    both = nn.Module()
    both.add_module("module", nn.Linear(16, 12))
    both.add_module("_orig_mod", nn.Linear(16, 12))
    with pytest.raises(NameNotFoundError, match="fits several"):
        Spec({"weight": half}).resolve(both)


# ---------------------------------------------------------------------- combining


def test_specs_join_and_contradictions_are_refused():
    rows = torch.tensor([True, False]).repeat(4)
    first = Spec({"w": TeSA.from_mask(rows[:, None].expand(8, 4))})
    second = Spec({"w": TeSA.from_mask(~rows[:, None].expand(8, 4)), "v": TeSA.dense((2,))})
    assert (first | second)["w"].density == 0.0
    assert (first | second) == (second | first)
    assert set((first | second).select("v")) == {"v"}
    with pytest.raises(CheckError, match="contradict"):
        first | Spec({"w": TeSA.constant((8, 4), 1.0)})


# ---------------------------------------------------------------------- files


@settings(max_examples=40)
@given(st.dictionaries(st.text("ab.:é/", min_size=1, max_size=6), tesas(), max_size=3))
def test_a_saved_spec_is_loaded_equal(tmp_path_factory, tesa_by_name):
    path = tmp_path_factory.mktemp("spec") / "spec.safetensors"
    spec = Spec(tesa_by_name)
    spec.save(path)
    loaded = Spec.load(path)
    assert loaded == spec
    assert list(loaded) == list(spec)
    assert hash(loaded) == hash(spec)


def test_masks_are_stored_as_bits(tmp_path):
    path = tmp_path / "spec"
    Spec({"w": TeSA.from_mask(torch.rand(512, 512) < 0.5)}).save(path)
    assert path.stat().st_size < 512 * 512 // 8 + 2048


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "spec.safetensors"
    Spec({"w": TeSA.from_mask(torch.rand(64, 64) < 0.5)}).save(path)
    return path


def test_a_file_cut_at_any_length_is_refused(saved):
    data = saved.read_bytes()
    for size in [0, 4, 8, 40, len(data) // 2, len(data) - 1]:
        saved.write_bytes(data[:size])
        with pytest.raises(FileFormatError, match=r"spec\.safetensors"):
            Spec.load(saved)


def test_a_file_edited_at_any_place_is_refused(saved):
    data = saved.read_bytes()
    for position in range(0, len(data), 37):
        saved.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(FileFormatError):
            Spec.load(saved)


def test_other_files_and_newer_versions_are_refused(tmp_path, saved):
    from safetensors.torch import save_file

    from sparta.files import save_tensors

    with pytest.raises(FileFormatError, match="check the path"):
        Spec.load(tmp_path / "missing")
    save_file({"w": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(FileFormatError, match="not a sparta file"):
        Spec.load(tmp_path / "other")
    save_tensors(tmp_path / "newer", "spec", 99, {}, {})
    with pytest.raises(FileFormatError, match="upgrade"):
        Spec.load(tmp_path / "newer")
    save_tensors(tmp_path / "artifact", "artifact", 1, {}, {})
    with pytest.raises(FileFormatError, match="artifact"):
        Spec.load(tmp_path / "artifact")
    save_tensors(tmp_path / "empty", "spec", 1, {}, {})
    with pytest.raises(FileFormatError, match="lacks"):
        Spec.load(tmp_path / "empty")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, meta: tensors.pop("live"),
        lambda tensors, meta: meta.pop("scale"),
        lambda tensors, meta: meta["state"].update(block=[0, 1]),
        lambda tensors, meta: meta["state"].update(block=[1]),
        lambda tensors, meta: meta["state"].update(block=[64, 64]),
        lambda tensors, meta: meta["code"].update(formats=["int3"]),
        lambda tensors, meta: meta["code"].update(formats=[]),
        lambda tensors, meta: meta["value"].update(uniform="nonsense"),
        lambda tensors, meta: meta.update(dynamic=[7]),
    ],
)
def test_a_stored_tesa_that_does_not_fit_together_is_refused(change):
    from sparta.tesa.state import from_state, to_state

    tensors, meta = to_state(TeSA.from_mask(torch.rand(64, 64) < 0.5))
    change(tensors, meta)
    with pytest.raises(FileFormatError, match="does not fit"):
        from_state(tensors, meta)


def test_an_interrupted_write_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Spec({}).save(saved)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_saving_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(FileFormatError, match="create it"):
        Spec({}).save(tmp_path / "missing" / "spec")


# ---------------------------------------------------------------------- telling a person


def test_a_spec_prints_as_a_table():
    net = model()
    text = str(Spec.from_pattern(net, NM(2, 4)))
    assert "4.weight" in text
    assert "2:4" in text
    assert "3 tensors" in text
    assert "density 0.5" in repr(Spec.from_pattern(net, NM(2, 4)))


def hostile(tmp_path, change, tesa=None):
    """Write the file of a spec with one change of what it says of its tensor, and a right checksum."""
    tensors, meta = to_state(tesa or TeSA.from_mask(torch.eye(8, dtype=torch.bool)))
    change(tensors, meta)
    path = tmp_path / "hostile.spec"
    save_tensors(path, "spec", 1, {f"w::{k}": t for k, t in tensors.items()}, {"tensors": {"w": meta}, "order": ["w"]})
    return path


HUGE = 2**40


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: m.update(shape=[HUGE, HUGE]),
        lambda t, m: m.update(shape=[8, -8]),
        lambda t, m: m.update(shape=[8, 8.0]),
        lambda t, m: m.update(shape=[8, True]),
        lambda t, m: m.update(shape="88"),
        lambda t, m: m.update(shape=None),
        lambda t, m: m.update(shape=[10**400, 0]),
        lambda t, m: m.update(dynamic=[2]),
        lambda t, m: m.update(dynamic={"0": 1}),
        lambda t, m: m["state"].update(block=[0, 1]),
        lambda t, m: m["state"].update(block=[HUGE, HUGE]),
        lambda t, m: m["scale"].update(block=[1, 1]),
        lambda t, m: m["code"].update(block=[1, 1]),
        lambda t, m: m["code"].update(formats=[]),
        lambda t, m: m["code"].update(formats=["nothing"]),
        lambda t, m: m["code"].update(formats=[["fp32"]]),
        lambda t, m: m["value"].update(uniform="0x1p+99999"),
        lambda t, m: m["value"].update(uniform=None),
        lambda t, m: m.pop("code"),
        lambda t, m: m.update(state=3),
        lambda t, m: t.update(live=t["live"].float()),
        lambda t, m: t.update(live=t["live"][:-1].clone()),
        lambda t, m: t.update(dead=torch.zeros(3, dtype=torch.uint8)),
        lambda t, m: t.pop("live"),
    ],
)
def test_a_tensor_of_a_file_that_does_not_fit_together_is_refused(tmp_path, change):
    with pytest.raises(FileFormatError, match=r"hostile\.spec"):
        Spec.load(hostile(tmp_path, change))


@pytest.mark.parametrize(
    "payload", [{}, {"order": 3, "tensors": {}}, {"order": [["w"]], "tensors": {}}, {"order": ["w"], "tensors": []}]
)
def test_a_spec_without_its_parts_is_refused(tmp_path, payload):
    save_tensors(tmp_path / "odd.spec", "spec", 1, {}, payload)
    with pytest.raises(FileFormatError, match=r"odd\.spec"):
        Spec.load(tmp_path / "odd.spec")


def test_a_mask_that_is_far_larger_than_its_file_is_refused_unless_it_is_asked_for(tmp_path):
    def spread(tensors, meta):
        meta["shape"], meta["state"]["block"] = [2, 2, 2, 2**26], [1, 1, 1, 2**26]
        for part in ("code", "value", "scale", "zero_point"):
            meta[part]["block"] = [2, 2, 2, 2**26]

    path = hostile(tmp_path, spread, TeSA.from_mask(torch.rand(2, 2, 2, generator=torch.manual_seed(0)) > 0.5))
    assert path.stat().st_size < 4096
    with pytest.raises(FileFormatError, match=r"hostile\.spec: the mask of a TeSA .* max_bytes"):
        Spec.load(path)
    assert Spec.load(path, max_bytes=2**30)["w"].shape == (2, 2, 2, 2**26)


def test_what_is_uniform_costs_nothing_however_large_it_is(tmp_path):
    spec = Spec({"x": TeSA.dense((2**20, 2**20, 2**15)), "y": TeSA.constant((2**30, 2**25), 0.0)})
    spec.save(tmp_path / "large.spec")
    assert Spec.load(tmp_path / "large.spec") == spec
    assert [row["pattern"] for row in spec.to_dict().values()] == ["dense", "channel axis 0"]


def test_a_compact_model_is_pruned_like_the_model_it_comes_from():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 64, 4))
    small, _ = prune_structured(net.eval(), torch.randn(2, 3, 8, 8), 0.25)
    spec = Spec.from_pattern(small, Unstructured(), 0.5)
    assert set(spec) == {"0.weight", "2.weight", "4.weight"}
    spec.apply(small)
    spec.check(small)


def test_a_layer_that_is_too_small_for_blocks_is_named():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 2))  # as a classifier of two classes ends
    with pytest.raises(ShapeError, match=r"^1\.weight: .*; or leave it out with ignore='1\.weight'\.$"):
        Spec.from_pattern(model, "4x1", 0.5)
    assert list(Spec.from_pattern(model, "4x1", 0.5, ignore="1.weight")) == ["0.weight"]
