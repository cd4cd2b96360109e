"""One call recovers a pruned model from its dense self: nearer to it, zeros intact, resumable to the last bit."""

import itertools
from copy import deepcopy

import pytest
import torch
from torch import nn

import sparta
from sparta.errors import FileFormatError, SpartaError, ValueRangeError
from sparta.recovery import api


def distance(model, teacher, batches):
    with torch.no_grad():
        return sum(
            float(nn.functional.kl_div(
                model(**b)["logits"].log_softmax(-1), teacher(**b)["logits"].log_softmax(-1),
                reduction="batchmean", log_target=True,
            )) for b in batches
        )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"rank": 4}, {"block_steps": 0}, {"steps": 0}], ids=str)
def test_it_comes_nearer_to_its_dense_self_on_other_data(pruned, options):
    model, teacher, spec, _ = pruned
    batches = [{"ids": torch.randint(0, 32, (8, 8))} for _ in range(24)]
    before = distance(model, teacher, batches[20:])
    kept = {name: value.clone() for name, value in teacher.state_dict().items()}
    log = sparta.recover(model, teacher, batches[:20], spec, **{"steps": 60, "block_steps": 30, "lr": 0.02, **options})
    assert distance(model, teacher, batches[20:]) < 0.7 * before
    assert sparta.Spec.from_zeros(model, include="blocks.*.weight") == spec
    assert all(stage.after <= stage.before for stage in log)
    assert ("outputs" in [stage.name for stage in log]) == (options.get("steps") != 0)
    assert all(torch.equal(value, kept[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_blocks_are_named_in_the_log(pruned):
    model, teacher, spec, batches = pruned
    log = sparta.recover(model, teacher, batches, spec, steps=2, block_steps=2)
    assert [stage.name for stage in log] == ["blocks.0", "blocks.1", "blocks.2", "outputs"]
    assert "blocks.1" in str(log)
    assert log.to_dict()["stages"][0]["steps"] == 2


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("killed_at", [("blocks", 2), ("outputs", 4)])
def test_a_killed_run_goes_on_to_the_same_weights(pruned, tmp_path, monkeypatch, killed_at, rank):
    model, teacher, spec, batches = pruned
    monkeypatch.setattr(api, "_SAVE_EVERY", 2)
    whole, cut = deepcopy(model), deepcopy(model)
    options = {"steps": 6, "block_steps": 3, "rank": rank, "checkpoint": tmp_path / "run"}
    sparta.recover(whole, teacher, batches, spec, **{**options, "checkpoint": None})
    save = api.Checkpoint.save

    def saving(self, part, done, *rest):
        save(self, part, done, *rest)
        if (part, done) == killed_at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(api.Checkpoint, "save", saving)
        with pytest.raises(KeyboardInterrupt):
            sparta.recover(cut, teacher, batches, spec, **options)
    log = sparta.recover(model, teacher, batches, spec, **options)
    assert len(log) == 4
    for name, value in whole.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    with pytest.raises(FileFormatError, match="another run"):
        sparta.recover(model, teacher, batches, spec, **options)


def test_an_endless_iterable_is_read_as_far_as_it_is_used(pruned):
    model, teacher, spec, batches = pruned
    read = []

    def endless():
        for batch in itertools.cycle(batches):
            read.append(batch)
            yield batch

    sparta.recover(model, teacher, endless(), spec, steps=3, block_steps=0)
    assert len(read) == 3


def test_padding_does_not_count(pruned):
    model, teacher, spec, batches = pruned
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[:, 5:] = 0
    padded = [{**batch, "attention_mask": mask} for batch in batches]
    other = [{"ids": torch.where(mask.bool(), batch["ids"], 7), "attention_mask": mask} for batch in batches]
    again = deepcopy(model)
    for one, data in ((model, padded), (again, other)):
        sparta.recover(one, teacher, data, spec, steps=4, block_steps=0)
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_half_precision_learns(pruned):
    model, teacher, spec, batches = pruned
    model, teacher = model.bfloat16(), teacher.bfloat16()
    log = sparta.recover(model, teacher, batches, spec, steps=30, block_steps=0, lr=0.01)
    assert log.stages[-1].after < 0.9 * log.stages[-1].before
    spec.check(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_model_without_blocks_says_so():
    torch.manual_seed(0)
    teacher = nn.Linear(16, 8)
    model = deepcopy(teacher)
    sparta.Spec.from_pattern(model, "2:4").apply(model)
    log = sparta.recover(model, teacher, [torch.randn(32, 16)], steps=20)
    assert "no chain" in log.note
    assert len(log) == 1
    assert log.stages[0].after < log.stages[0].before


def test_what_does_not_help_is_undone(pruned):
    model, teacher, spec, batches = pruned
    before = deepcopy(model.state_dict())
    log = sparta.recover(model, teacher, batches, spec, steps=8, block_steps=8, lr=1e4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(stage.after == stage.before for stage in log)


def test_what_is_trained_can_be_chosen(pruned):
    model, teacher, spec, batches = pruned
    before = deepcopy(model.state_dict())
    sparta.recover(model, teacher, batches, spec, steps=4, block_steps=2, include="blocks.0.*")
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("blocks.0.") for name in changed)


def test_what_is_refused(pruned):
    model, teacher, spec, batches = pruned
    with pytest.raises(ValueRangeError, match="shares weights"):
        sparta.recover(model, model, batches, spec)
    with pytest.raises(ValueRangeError, match="no zeros"):
        sparta.recover(deepcopy(teacher), teacher, batches)
    with pytest.raises(ValueRangeError, match="steps is -1"):
        sparta.recover(model, teacher, batches, spec, steps=-1)
    with pytest.raises(ValueRangeError, match="no batch"):
        sparta.recover(model, teacher, [], spec)
    with pytest.raises(SpartaError, match="labels"):
        sparta.recover(model, teacher, [{"ids": torch.zeros(1, 4, dtype=torch.long), "labels": 1}], spec)


@pytest.mark.parametrize("rank", [None, 4])
def test_a_language_model_of_transformers(rank):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    teacher = transformers.LlamaForCausalLM(config)
    model = deepcopy(teacher)
    ids = torch.randint(0, 64, (2, 12))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"input_ids": ids.flip(0)}]
    spec, _ = sparta.prune(model, batches, "4x1", 0.5, method="magnitude")
    log = sparta.recover(model, teacher, batches, spec, steps=10, block_steps=10, rank=rank)
    assert [stage.name for stage in log] == ["model.layers.0", "model.layers.1", "outputs"]
    assert log.stages[-1].after < log.stages[-1].before
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.use_cache
    spec.check(model)
