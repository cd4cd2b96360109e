"""Distillation: the gradient is that of the blended loss without a change in the script; nothing counts twice."""

import copy
import pickle

import pytest
import torch
from torch import nn

import sparta
from create.distill.nets import HARDNESS, TEMPERATURE, batch, blended_gradients, distilled, gradients, same, student
from sparta.create import quantize
from sparta.create.distill import soft_target_loss
from sparta.create.manager import Manager
from sparta.create.modifiers import modifier_named
from sparta.errors import NameNotFoundError, ShapeError, ValueRangeError

Distillation = modifier_named("Distillation")
cross_entropy = nn.functional.cross_entropy


def backward(model, *batches, scale=1.0):
    for inputs, targets in batches:
        (cross_entropy(model(inputs), targets) * scale).backward()


def steps(optimizer, outputs_of):
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(outputs_of(), batch()[1]).backward()
        optimizer.step()


class TestWithoutAChangeInTheScript:
    def test_the_gradient_is_that_of_the_blended_loss(self):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch()])
        distilled(model, teacher)
        backward(model, batch())
        assert same(gradients(model), expected)

    @pytest.mark.parametrize("hardness", [0.0, 0.5, 1.0])
    def test_hardness_runs_from_the_task_to_the_teacher(self, hardness):
        model, teacher = student(0), student(1)
        distilled(model, teacher, hardness=hardness)
        inputs, targets = batch()
        backward(model, (inputs, targets))
        plain = copy.deepcopy(model)
        plain.zero_grad()
        outputs = plain(inputs)
        kd = soft_target_loss(outputs, teacher(inputs).detach(), TEMPERATURE)
        ((1 - hardness) * cross_entropy(outputs, targets) + hardness * kd).backward()
        assert same(gradients(model), gradients(plain))

    def test_several_passes_before_one_backward_and_accumulation(self):
        model, teacher, batches = student(0), student(1), [batch(0), batch(1)]
        expected = blended_gradients(copy.deepcopy(model), teacher, batches)
        distilled(model, teacher)
        sum(cross_entropy(model(inputs), targets) for inputs, targets in batches).backward()
        assert same(gradients(model), expected)
        model.zero_grad()
        backward(model, *batches)
        assert same(gradients(model), expected)

    def test_the_share_of_an_accumulation_comes_from_the_run(self):
        model, teacher, batches = student(0), student(1), [batch(0), batch(1)]
        expected = blended_gradients(copy.deepcopy(model), teacher, batches, scale=0.5)
        manager, _ = distilled(model, teacher)
        manager.run.accumulation_steps = 2
        backward(model, *batches, scale=0.5)
        assert same(gradients(model), expected)

    def test_the_loss_scale_comes_from_the_scaler(self):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch()])
        manager, optimizer = distilled(model, teacher)
        scaler = manager.run.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        inputs, targets = batch()
        scaler.scale(cross_entropy(model(inputs), targets)).backward()
        assert same(gradients(model), [g * 1024 for g in expected], atol=1e-2)
        scaler.unscale_(optimizer)
        assert same(gradients(model), expected, atol=1e-5)

    def test_initialize_tells_the_run_of_scaler_and_accumulation(self):
        model, teacher, batches = student(0), student(1), [batch(0), batch(1)]
        expected = blended_gradients(copy.deepcopy(model), teacher, batches, scale=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        variables = {"num_epochs": 2, "hardness": HARDNESS, "temperature": TEMPERATURE}
        _, scaler = sparta.create.initialize(
            model,
            optimizer,
            8,
            pruning=False,
            quantization=False,
            distillation=True,
            distillation_teacher=teacher,
            scaler=torch.amp.GradScaler("cpu", init_scale=64.0),
            recipe_variables=variables,
            accumulation_steps=2,
        )
        for inputs, targets in batches:
            scaler.scale(cross_entropy(model(inputs), targets) / 2).backward()
        scaler.unscale_(optimizer)
        assert same(gradients(model), expected, atol=1e-5)

    def test_a_scaler_that_is_off_changes_nothing(self):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch()])
        manager, _ = distilled(model, teacher)
        manager.run.scaler = torch.amp.GradScaler("cpu", enabled=False)
        backward(model, batch())
        assert same(gradients(model), expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast(self, dtype):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch()])
        distilled(model, teacher)
        inputs, targets = batch()
        with torch.autocast("cpu", dtype=dtype):
            loss = cross_entropy(model(inputs), targets)
        loss.backward()
        assert same(gradients(model), expected, atol=0.02)

    def test_evaluation_and_passes_without_gradients_are_left_alone(self):
        model, asked = student(0), []
        teacher = student(1)
        teacher.register_forward_hook(lambda *_: asked.append(1))
        distilled(model, teacher)
        with torch.no_grad():
            model(batch()[0])
        model.eval()
        model(batch()[0]).sum().backward()
        assert asked == []
        model.train()
        model(batch()[0])
        assert asked == [1]

    def test_two_backward_passes_through_one_forward_count_the_teacher_once(self):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch()])
        distilled(model, teacher)
        inputs, targets = batch()
        loss = cross_entropy(model(inputs), targets)
        (loss * 0.5).backward(retain_graph=True)
        (loss * 0.5).backward()
        assert same(gradients(model), expected)

    def test_outputs_changed_in_place_by_the_script(self):
        plain, model, teacher = student(0), student(0), student(1)
        inputs, targets = batch()
        outputs = plain(inputs)
        kd = soft_target_loss(outputs, teacher(inputs).detach(), TEMPERATURE)
        ((1 - HARDNESS) * cross_entropy(outputs * 2, targets) + HARDNESS * kd).backward()
        distilled(model, teacher)
        doubled = model(inputs)
        doubled *= 2
        cross_entropy(doubled, targets).backward()
        assert same(gradients(model), gradients(plain))

    def test_under_compile_wrapped_before_or_after(self):
        teacher = student(1)
        expected = blended_gradients(student(0), teacher, [batch()])
        for first in (True, False):
            torch._dynamo.reset()
            model = student(0)
            compiled = torch.compile(model, backend="aot_eager")
            distilled(compiled if first else model, teacher)
            backward(compiled, batch())
            assert same(gradients(model), expected, atol=1e-5)

    def test_the_window_is_respected(self):
        model, teacher = student(0), student(1)
        plain, blend = copy.deepcopy(model), copy.deepcopy(model)
        expected = blended_gradients(blend, teacher, [batch()])
        backward(plain, batch())
        manager, _ = distilled(model, teacher, start_epoch=1, end_epoch=2)
        for epoch, goal in ((0.75, gradients(plain)), (1.0, expected), (2.0, gradients(plain))):
            manager.run.epoch = epoch
            model.zero_grad()
            backward(model, batch())
            assert same(gradients(model), goal), epoch


class TwoHeads(nn.Module):
    def __init__(self, kind, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, inputs, labels=None):
        hidden = torch.tanh(self.body(inputs))
        first, second = self.first(hidden), self.second(hidden)
        if self.kind == "own loss":
            return {"loss": None if labels is None else cross_entropy(first, labels), "logits": first}
        return (first, second) if self.kind == "sequence" else {"first": first, "second": second}


class TestOutputs:
    @pytest.mark.parametrize("kind", ["sequence", "mapping"])
    def test_heads_are_averaged(self, kind):
        model, teacher = TwoHeads(kind, 0), TwoHeads(kind, 1)
        inputs, targets = batch()
        values = (lambda out: list(out.values())) if kind == "mapping" else list
        plain = copy.deepcopy(model)
        first, second = values(plain(inputs))
        goals = values(teacher(inputs))
        kd = [soft_target_loss(a, b.detach(), TEMPERATURE) for a, b in zip((first, second), goals, strict=True)]
        task = cross_entropy(first, targets) + second.square().mean()
        ((1 - HARDNESS) * task + HARDNESS * sum(kd) / 2).backward()
        distilled(model, teacher)
        first, second = values(model(inputs))
        (cross_entropy(first, targets) + second.square().mean()).backward()
        assert same(gradients(model), gradients(plain))

    def test_a_model_that_computes_its_own_loss_returns_the_blended_one_whatever_is_done_to_it_then(self):
        model, teacher = TwoHeads("own loss", 0), TwoHeads("own loss", 1)
        inputs, targets = batch()
        plain = copy.deepcopy(model)
        outputs = plain(inputs, targets)
        kd = soft_target_loss(outputs["logits"], teacher(inputs)["logits"].detach(), TEMPERATURE)
        expected = (1 - HARDNESS) * outputs["loss"] + HARDNESS * kd
        (7 * expected).backward()
        manager, _ = distilled(model, teacher)
        found = model(inputs, labels=targets)["loss"]
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        assert manager.loss_update(found) is found, "it is blended already"
        (7 * found).backward()
        grads = [p.grad for p in (*model.body.parameters(), *model.first.parameters())]
        assert same(grads, [p.grad for p in (*plain.body.parameters(), *plain.first.parameters())], atol=1e-5)
        assert manager.distillation_modifiers[0].idle() == ""

    def test_a_hugging_face_model_under_autocast(self):
        transformers = pytest.importorskip("transformers")
        shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)  # noqa: C408
        config = transformers.BertConfig(**shape, vocab_size=20, max_position_embeddings=8, num_labels=3)
        model, teacher = (transformers.BertForSequenceClassification(config) for _ in range(2))
        distilled(model, teacher, hardness=1.0)
        tokens, labels = torch.randint(0, 20, (4, 6)), torch.tensor([0, 1, 2, 0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(input_ids=tokens, labels=labels)
        assert outputs.loss is outputs["loss"]
        with torch.no_grad():
            goal = teacher(input_ids=tokens).logits
        assert outputs.loss.item() == pytest.approx(
            soft_target_loss(outputs.logits, goal, TEMPERATURE).item(), abs=0.02
        )
        outputs.loss.backward()
        assert model.classifier.weight.grad.abs().sum() > 0

    def test_keys_choose_and_a_head_that_the_loss_does_not_use_is_named(self):
        model, teacher = TwoHeads("mapping", 0), TwoHeads("mapping", 1)
        manager, optimizer = distilled(model, teacher, distill_output_keys=["second"])
        model(batch()[0])["second"].square().sum().backward()
        assert model.second.weight.grad is not None
        other, _ = distilled(unused := TwoHeads("mapping", 0), teacher)
        optimizer = other.run.optimizer
        cross_entropy(unused(batch()[0])["first"], batch()[1]).backward()
        optimizer.step()
        assert "second" in other.distillation_modifiers[0].idle()
        assert manager.distillation_modifiers[0].idle() == ""

    def test_teacher_input_keys_leave_the_rest_out(self):
        class Narrow(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(6, 4)

            def forward(self, inputs):
                return {"logits": self.layer(inputs)}

        model = TwoHeads("own loss", 0)
        distilled(model, Narrow(), teacher_input_keys=["inputs"])
        inputs, targets = batch()
        model(inputs=inputs, labels=targets)["loss"].backward()
        again = TwoHeads("own loss", 0)
        distilled(again, Narrow(), teacher_input_keys=["label"])
        with pytest.raises(NameNotFoundError, match="did you mean 'labels'"):
            again(inputs=inputs, labels=targets)

    def test_outputs_that_do_not_fit_are_refused(self):
        model = student()
        distilled(model, nn.Linear(6, 5))
        with pytest.raises(ShapeError, match="same classes"):
            model(batch()[0])
        other = student()
        distilled(other, TwoHeads("mapping", 0))
        with pytest.raises(ValueRangeError, match="the same outputs"):
            other(batch()[0])


class TestByHand:
    def test_loss_update_returns_the_blended_loss_and_the_automatic_way_stands_back(self):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch()])
        manager, _ = distilled(model, teacher)
        inputs, targets = batch()
        outputs = model(inputs)
        task = cross_entropy(outputs, targets)
        loss = manager.loss_update(task)
        goal = (1 - HARDNESS) * task + HARDNESS * soft_target_loss(outputs, teacher(inputs), TEMPERATURE)
        assert loss.item() == pytest.approx(goal.item(), rel=1e-5)
        assert loss.shape == task.shape
        loss.backward()
        assert same(gradients(model), expected)

    def test_with_outputs_only_their_pass_is_taken(self):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch(0), batch(1)])
        manager, _ = distilled(model, teacher)
        first, second = model(batch(0)[0]), model(batch(1)[0])
        loss = manager.loss_update(cross_entropy(first, batch(0)[1]), outputs=first)
        (loss + cross_entropy(second, batch(1)[1])).backward()
        assert same(gradients(model), expected), "one by hand, one by itself"

    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
    def test_a_pass_that_was_not_captured_needs_inputs_and_outputs(self, wrap):
        model, teacher = student(0), student(1)
        expected = blended_gradients(copy.deepcopy(model), teacher, [batch()])
        manager, _ = distilled(model, teacher)
        inputs, targets = batch()
        outputs = model.forward(inputs)  # around the hooks
        task = cross_entropy(outputs, targets)
        with pytest.raises(ValueRangeError, match="no forward pass"):
            manager.loss_update(task)
        manager.loss_update(task, inputs=wrap(inputs), outputs=outputs).backward()
        assert same(gradients(model), expected)

    def test_a_term_on_the_parameters_is_scaled_only_by_hand(self):
        model, teacher = student(0), student(1)
        inputs, targets = batch()
        manager, _ = distilled(model, teacher, hardness=0.5)
        decay = model[0].weight.square().sum()
        loss = manager.loss_update(cross_entropy(model(inputs), targets) + decay)
        loss.backward()
        by_hand = gradients(model)
        model.zero_grad()
        (cross_entropy(model(inputs), targets) + model[0].weight.square().sum()).backward()
        automatic = gradients(model)
        assert torch.allclose(automatic[0] - by_hand[0], model[0].weight.detach(), atol=1e-5)
        assert same(automatic[1:], by_hand[1:])


class TestTeacher:
    def test_by_default_the_model_teaches_itself_as_it_was_at_the_start(self):
        model = student(0)
        frozen = copy.deepcopy(model)
        manager, optimizer = distilled(model, None)
        for step in range(3):
            expected = blended_gradients(copy.deepcopy(model), frozen, [batch(step)])
            optimizer.zero_grad()
            backward(model, batch(step))
            assert same(gradients(model), expected)
            optimizer.step()
        assert not torch.equal(model[0].weight, frozen[0].weight)
        assert manager.distillation_modifiers[0].idle() == ""

    def test_the_copy_is_dense_though_pruning_begins_at_once_and_plain_though_the_student_is_quantized(self):
        model = student(0)
        dense = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruning = modifier_named("MagnitudePruning")(init_sparsity=0.5, final_sparsity=0.9, end_epoch=1)
        entry = Distillation()
        Manager([pruning, entry]).attach(model, optimizer, 4, teacher="self")
        backward(model, batch())
        optimizer.step()
        teacher = entry._teacher.module
        assert (model[0].weight == 0).any()
        assert torch.equal(teacher[0].weight, dense[0].weight)
        quantized = student(0)
        quantize.prepare(quantized)
        late, _ = distilled(quantized, "self")
        backward(quantized, batch())
        assert not quantize.is_quantized(late.distillation_modifiers[0]._teacher.module)
        assert quantize.is_quantized(quantized)

    def test_the_teacher_is_never_trained(self):
        model, teacher = student(0), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        before = copy.deepcopy(teacher.state_dict())
        distilled(model, teacher.train())
        backward(model, batch())
        assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
        assert not teacher.training
        assert not any(p.requires_grad for p in teacher.parameters())

    @pytest.mark.parametrize(
        ("teacher", "text"), [("path/to/teacher.pth", "load_state_dict"), (3, "is a int"), ("model", "'self'")]
    )
    def test_what_is_not_a_teacher_is_refused_with_the_fix(self, teacher, text):
        with pytest.raises(ValueRangeError, match=text):
            distilled(student(), teacher)

    def test_a_student_that_cannot_be_copied_needs_a_teacher(self):
        class Single(nn.Linear):
            def __deepcopy__(self, memo):
                raise AssertionError("one of a kind")

        model = Single(6, 4)
        distilled(model, "self")
        with pytest.raises(ValueRangeError, match="pass a teacher"):
            model(batch()[0])

    def test_the_student_itself_is_refused_as_its_teacher(self):
        model = student()
        with pytest.raises(ValueRangeError, match="distillation_teacher='self'"):
            distilled(model, model)

    def test_inputs_changed_in_place_by_the_student_do_not_reach_the_teacher_or_the_script(self):
        class InPlace(nn.Module):
            def __init__(self, seed):
                super().__init__()
                self.inner = student(seed)

            def forward(self, inputs):
                return self.inner(inputs.mul_(2))

        model, seen = InPlace(0), []
        teacher = student(1)
        teacher.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
        distilled(model, teacher)
        inputs, targets = batch()
        cross_entropy(model(inputs.clone()), targets).backward()
        assert torch.equal(seen[0], inputs)

    def test_a_resumed_run_has_the_same_copy(self):
        model = student(0)
        manager, optimizer = distilled(model, "self")
        for step in range(2):
            optimizer.zero_grad()
            backward(model, batch(step))
            optimizer.step()
        resumed = student(5)
        other, _ = distilled(resumed, "self")
        resumed.load_state_dict(model.state_dict())
        other.load_state_dict(manager.state_dict())
        model.zero_grad()
        backward(model, batch(7))
        backward(resumed, batch(7))
        assert same(gradients(resumed), gradients(model), atol=0)


class TestLife:
    def test_copies_and_pickles_of_the_student_are_not_distilled(self):
        model, teacher = student(0), student(1)
        distilled(model, teacher)
        plain = student(0)
        backward(plain, batch())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
            backward(twin, batch())
            assert same(gradients(twin), gradients(plain))

    def test_after_finalize_the_script_is_alone(self):
        model, teacher = student(0), student(1)
        manager, _ = distilled(model, teacher, end_epoch=1)
        backward(model, batch())
        manager.run.optimizer.step()
        model.zero_grad()
        manager.finalize()
        plain = copy.deepcopy(model)
        backward(model, batch())
        backward(plain, batch())
        assert same(gradients(model), gradients(plain))
        assert not model._forward_hooks

    def test_a_loss_that_was_never_touched_is_warned_of(self):
        model = student(0)
        _, optimizer = distilled(model, student(1))
        with pytest.warns(UserWarning, match="never touched the loss: no forward pass"):
            steps(optimizer, lambda: model.forward(batch()[0]))

    def test_outputs_that_were_detached_are_warned_of(self):
        model = student(0)
        probe = nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*model.parameters(), *probe.parameters()], lr=0.1)
        distilled(model, student(1), optimizer)
        with pytest.warns(UserWarning, match="without detaching"):
            steps(optimizer, lambda: probe(model(batch()[0]).detach()))

    def test_the_divergence_is_logged_once_an_epoch(self):
        model, records = student(0), []
        manager, optimizer = distilled(model, student(1))
        manager.add_logger(records.append)
        for step in range(8):
            optimizer.zero_grad()
            backward(model, batch(step))
            optimizer.step()
        assert len([r for r in records if "distillation_loss" in r]) == 2

    @pytest.mark.parametrize("fields", [{"hardness": 1.5}, {"hardness": -0.1}, {"temperature": 0}])
    def test_wrong_fields_are_refused(self, fields):
        with pytest.raises(ValueRangeError, match=next(iter(fields))):
            Distillation(**fields)

    def test_use_before_the_run_is_refused(self):
        with pytest.raises(ValueRangeError, match="before it was initialized"):
            Distillation().loss(None, torch.ones(()), None, None)

    def test_memory_of_a_pass_is_free_after_its_backward(self):
        model = student(0)
        manager, _ = distilled(model, student(1))
        backward(model, batch())
        assert manager.distillation_modifiers[0]._capture.passes == []
