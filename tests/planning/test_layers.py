"""Which layers choose together, and where channels and heads are found."""

import pytest
import torch
from torch import nn

from sparta.oneshot.targets import find_targets
from sparta.planning.layers import groups_of
from sparta.planning.options import options_of
from sparta.tesa.patterns import Block, Channel


class Residual(nn.Module):
    """Channels that several layers read or write cannot go one layer at a time."""

    def __init__(self):
        super().__init__()
        self.enter, self.inner, self.back, self.head = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = torch.relu(self.enter(x))
        return self.head(x + self.back(torch.relu(self.inner(x))))


def groups(model, x, **options):
    return groups_of(model, find_targets(model), x, x, **{"channels": True, **options})


def test_channels_with_one_reader_are_found_and_others_left():
    found, notes = groups(Residual(), torch.randn(4, 16))
    assert not notes
    channels = {each.reader: each.writers for group in found for each in group.channels}
    assert channels == {"back.weight": ("inner.weight",)}
    assert sorted(name for group in found for name in group.names) == [
        f"{name}.weight" for name in ("back", "enter", "head", "inner")
    ]


def test_without_channels_every_unit_is_a_group():
    found, _ = groups(Residual(), torch.randn(4, 16), channels=False)
    assert all(len(group.units) == 1 and not group.channels for group in found)


def test_a_model_that_cannot_be_captured_has_no_channels_and_says_so():
    class Branching(Residual):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > -1e9 else x

    found, notes = groups(Branching(), torch.randn(4, 16))
    assert len(found) == 4
    assert all(not group.channels for group in found)
    assert notes[0].startswith("no channels")


def test_heads_and_neurons_of_an_encoder_as_it_comes():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=50
    )
    model = transformers.BertModel(config).eval()
    batch = {"input_ids": torch.randint(0, 50, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    found, _ = groups(model, batch)
    channels = {each.reader: each for group in found for each in group.channels}
    heads = channels["encoder.layer.0.attention.output.dense.weight"]
    assert heads.pattern == Block(32, 8)
    assert len(heads.writers) == 3
    assert channels["encoder.layer.0.output.dense.weight"].pattern == Channel(1)
    units = [unit for group in found for unit in group.units]
    assert any(len(unit) == 3 for unit in units)


def test_options_by_device_and_by_hand():
    assert "2:4" in options_of("auto", "cuda")
    assert "4x1" in options_of("auto", "cpu")
    by_hand = options_of(["4x1", Block(16, 1), "2:4"], "cpu")
    assert [len(levels) for levels in by_hand.values()] == [10, 10, 1]
    assert all(a.density < b.density for a, b in zip(by_hand["4x1"], by_hand["4x1"][1:], strict=False))
