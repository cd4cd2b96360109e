"""Turn a training script into a sparse one with a single call: real data, real accuracy, before and after.

Trains a small network on the handwritten digits that come with scikit-learn: once as it is, once with
`sparta.create.initialize`, which prunes nine weights of ten while the network learns. The loop is the same.
"""

import copy

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import sparta

torch.manual_seed(0)
torch.set_num_threads(1)
EPOCHS = 40

digits = load_digits()
parts = train_test_split(digits.data, digits.target, test_size=0.3, random_state=0, stratify=digits.target)
x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in parts)
x_train, x_test = x_train.float() / 16, x_test.float() / 16
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x_train, y_train), 64, shuffle=True, generator=torch.Generator().manual_seed(0)
)
start = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Any training loop."""
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def accuracy(model: nn.Module) -> float:
    """Share of the test digits that are read right."""
    model.eval()
    return float((model(x_test).argmax(1) == y_test).float().mean())


dense = copy.deepcopy(start)
train(dense, torch.optim.Adam(dense.parameters(), lr=4e-3), EPOCHS)

model = copy.deepcopy(start)
optimizer = torch.optim.Adam(model.parameters())
manager, optimizer = sparta.create.initialize(
    model,
    optimizer,
    len(loader),
    quantization=False,
    recipe_variables={"num_epochs": EPOCHS, "sparsity": 0.9, "init_lr": 4e-3, "final_lr": 1e-5},
)
train(model, optimizer, manager.max_epochs)
manager.finalize()

print(manager.spec().table())
print(f"dense  : accuracy {accuracy(dense):.1%}")
print(f"sparse : accuracy {accuracy(model):.1%}, {1 - manager.spec().density:.0%} of the weights are zero")
