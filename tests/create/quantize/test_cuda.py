"""The same on a GPU: fp16 with a gradient scaler, compiled, distilled from a teacher that was on the CPU."""

import pytest
import torch
from torch import nn

from create.quantize.nets import make_cnn
from sparta.create import quantize
from sparta.create.manager import Manager
from sparta.create.modifiers import modifier_named
from sparta.create.quantize.prepare import quantizers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compiled", [False, True])
def test_fp16_with_a_scaler_trains_quantized_and_distilled(compiled):
    model = make_cnn().cuda()
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    manager = Manager([modifier_named("Quantization")(start_epoch=0.5), modifier_named("Distillation")()])
    manager.attach(called, optimizer, 4, teacher=make_cnn())
    manager.run.scaler = scaler
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(
                called(torch.randn(8, 3, 8, 8, device="cuda")), torch.arange(8).cuda() % 4
            )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(quantizer.low.is_cuda and quantizer.low.isfinite().all() for _, quantizer in quantizers(model))
    assert quantize.export(model).spec["0.weight"].format.name == "int8"


def test_the_gpu_rounds_as_the_cpu_does():
    model = make_cnn()
    quantize.prepare(model)
    model(torch.randn(4, 3, 8, 8))
    weights = {name: layer.rounded("weight") for name, layer in model.named_modules() if hasattr(layer, "rounded")}
    model.cuda()
    for name, expected in weights.items():
        assert torch.equal(model.get_submodule(name).rounded("weight").cpu(), expected)
