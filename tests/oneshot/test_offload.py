"""Models larger than memory: read and written block by block, with the result of a model that is in memory."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparta
from oneshot.models import Model, make, tokens
from sparta.errors import FileFormatError, SpartaError, ValueRangeError
from sparta.oneshot import empty_weights, prune
from sparta.oneshot.offload import Offload, Spill, memory_bytes
from sparta.oneshot.shards import Shards


@pytest.fixture
def folder(tmp_path):
    """A model in two shards, the tied head stored once, with a file that is no tensors."""
    state = {name: t for name, t in make().state_dict().items() if name != "lm_head.weight"}
    names = sorted(state)
    found = tmp_path / "weights"
    found.mkdir()
    save_file({name: state[name] for name in names[::2]}, found / "model-00001-of-00002.safetensors")
    save_file({name: state[name] for name in names[1::2]}, found / "model-00002-of-00002.safetensors")
    (found / "config.json").write_text("{}")
    return found


def empty():
    with empty_weights():
        return Model()


def stored(output):
    return {name: t for path in output.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("method", ["magnitude", "alps", "sparsegpt"])
def test_the_written_model_is_the_one_pruned_in_memory(folder, tmp_path, method):
    whole = make()
    spec, log = prune(whole, tokens(), "2:4", method=method)
    model = empty()
    found, logged = prune(
        model, tokens(), "2:4", method=method, memory="1 MiB", weights=folder, output=tmp_path / "out"
    )
    assert found == spec
    assert [layer.error for layer in logged] == [layer.error for layer in log]
    written = stored(tmp_path / "out")
    expected = {name: t for name, t in whole.state_dict().items() if name != "lm_head.weight"}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], t) for name, t in expected.items())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_spec_of_a_model_larger_than_memory_holds_a_bit_per_weight(folder, tmp_path):
    spec, _ = prune(empty(), tokens(), "2:4", method="wanda", memory="1 MiB", weights=folder, output=tmp_path / "out")
    held = sum(packed.numel() * packed.element_size() for packed, *_ in spec._tesas._masks.values())
    assert held <= sum(tesa.numel for tesa in spec.values()) / 8 + 8 * len(spec)
    assert spec.density == pytest.approx(0.5)
    spec.save(tmp_path / "spec.safetensors")
    assert sparta.Spec.load(tmp_path / "spec.safetensors") == spec
    assert spec.select(include=next(iter(spec))).keys() == {next(iter(spec))}


def test_the_folder_is_complete_and_indexed(folder, tmp_path):
    prune(empty(), tokens(), "2:4", method="wanda", weights=folder, output=tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert all(load_file(path) for path in folder.glob("*.safetensors"))


def test_no_more_than_one_block_is_held(folder, tmp_path, monkeypatch):
    peaks = []
    detach = Offload.detach
    monkeypatch.setattr(Offload, "detach", lambda self: (peaks.append(self.most), detach(self))[1])
    prune(empty(), tokens(), "2:4", method="wanda", weights=folder, output=tmp_path / "out")
    block = sum(p.numel() * 4 for p in make().layers[0].parameters())
    assert block <= peaks[-1] < 2 * block


def test_nothing_is_held_after_an_error(folder, tmp_path):
    model = empty()
    with pytest.raises(SpartaError):
        prune(model, [torch.full((2, 3), 99)], "2:4", weights=folder, output=tmp_path / "out")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_killed_run_goes_on_exactly(folder, tmp_path):
    class KilledError(Exception):
        pass

    def kill(step):
        if step.name == "layers.0":
            raise KilledError

    settings = {"weights": folder, "output": tmp_path / "out", "checkpoint": tmp_path / "states"}
    with pytest.raises(KilledError):
        prune(empty(), tokens(), "2:4", progress=kill, **settings)
    prune(empty(), tokens(), "2:4", **settings)
    whole = make()
    prune(whole, tokens(), "2:4")
    written = stored(tmp_path / "out")
    assert all(torch.equal(written[name], whole.state_dict()[name]) for name in written)


def test_a_cap_that_is_too_small_says_how_much_is_needed(folder, tmp_path):
    with pytest.raises(ValueRangeError, match=r"MiB or more, for 'layers.0"):
        prune(empty(), tokens(), "2:4", memory=30_000, weights=folder, output=tmp_path / "out")


def test_a_cap_for_a_model_in_memory_spills_hidden_states():
    spilled, kept = make(), make()
    prune(spilled, tokens(), "2:4", memory="1 GiB")
    prune(kept, tokens(), "2:4")
    assert all(torch.equal(a, b) for a, b in zip(spilled.parameters(), kept.parameters(), strict=True))


def test_spilled_tensors_come_back_as_they_were():
    tensors = [torch.randn(2, 3), torch.randn(4).bfloat16(), torch.zeros(0, 2)]
    spill = Spill(iter(tensors))
    assert len(spill) == 3
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(spill, tensors, strict=True))


@pytest.mark.parametrize("text", ["2 pounds", "", "1.2.3 GB", True, -1, float("inf")])
def test_memory_that_is_none(text):
    with pytest.raises(ValueRangeError, match="2 GiB"):
        memory_bytes(text)


def test_wrong_folders_and_models(folder, tmp_path):
    with pytest.raises(ValueRangeError, match="without values"):
        prune(empty(), tokens(), "2:4")
    with pytest.raises(ValueRangeError, match="without the other"):
        prune(make(), tokens(), "2:4", weights=folder)
    with pytest.raises(ValueRangeError, match="has values"):
        prune(make(), tokens(), "2:4", weights=folder, output=tmp_path / "out")
    with pytest.raises(FileFormatError, match=r"no \*.safetensors"):
        prune(empty(), tokens(), "2:4", weights=tmp_path, output=tmp_path / "out")
    with pytest.raises(FileFormatError, match="another folder"):
        prune(empty(), tokens(), "2:4", weights=folder, output=folder)


def test_a_parameter_that_no_file_has(folder, tmp_path):
    for path in folder.glob("*2-of-*.safetensors"):
        path.unlink()
    with pytest.raises(ValueRangeError, match="is not in the files"):
        prune(empty(), tokens(), "2:4", weights=folder, output=tmp_path / "out")


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": 1}        '])
def test_files_that_are_none(folder, tmp_path, damage):
    min(folder.glob("*.safetensors")).write_bytes(damage)
    with pytest.raises(FileFormatError):
        Shards(folder, tmp_path / "out")


def test_offsets_beyond_the_file_are_refused(folder, tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (folder / "bad.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 16)
    with pytest.raises(FileFormatError, match="offsets"):
        Shards(folder, tmp_path / "out")


def test_empty_weights_keep_buffers_and_ties():
    with empty_weights():
        norm = torch.nn.BatchNorm1d(4)
    assert norm.weight.is_meta
    assert not norm.running_mean.is_meta
    model = empty()
    assert model.lm_head.weight is model.embed.weight
    assert sparta.oneshot.empty_weights is empty_weights
