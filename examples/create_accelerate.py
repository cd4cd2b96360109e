"""Sparse training in a loop that Accelerate drives: prepare first, then initialize with what it returned.

Gradients are accumulated over two batches; the recipe's time is that of real optimizer steps. Needs the `hf` extra.
"""

import sys

import torch
from torch import nn

import sparta

try:
    from accelerate import Accelerator
except ImportError:
    print("accelerate is not installed: pip install 'sparta-torch[hf]'")
    sys.exit(0)

torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
inputs = torch.randn(256, 16)
targets = (inputs[:, :4].sum(1) > 0).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=16)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

manager, optimizer = sparta.create.initialize(
    model,
    optimizer,
    len(loader),
    accumulation_steps=2,
    quantization=False,
    recipe_variables={"num_epochs": 8, "sparsity": 0.8, "init_lr": 5e-3},
)
for _ in range(manager.max_epochs):
    for batch, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
manager.finalize()

right = float((model(inputs).argmax(1) == targets).float().mean())
print(f"{manager.step} optimizer steps = {manager.epoch:g} epochs; loss {loss.item():.3f}, accuracy {right:.1%}")
print(f"{1 - manager.spec().density:.0%} of the weights are zero")
