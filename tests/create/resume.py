"""Run by a test: train to a step, save; or load in this new process, train on, and write the weights."""

import sys
from pathlib import Path

import torch

from create.models import MODELS, loss_of, take_steps
from sparta.create import initialize

STEPS = 4
VARIABLES = {"num_epochs": 4, "sparsity": 0.8}


def begin(name, pruning):
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fresh = iter(range(10**6, 10**7))
    options = {"loss_closure": lambda: loss_of(model, next(fresh))} if pruning == "obs" else {}
    manager, _ = initialize(
        model, optimizer, STEPS, pruning=pruning, quantization=False, recipe_variables=VARIABLES, **options
    )
    if pruning in {"obs", "mfac"}:
        manager.pruning_modifiers[0].num_grads = 3
    return model, optimizer, manager


def main(mode, pruning, name, folder):
    torch.set_num_threads(1)
    model, optimizer, manager = begin(name, pruning)
    saved = Path(folder) / f"{name}-{pruning}.pt"
    if mode == "save":
        take_steps(model, optimizer, 6)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "manager": manager.state_dict()}
        torch.save(state, saved)
        return
    state = torch.load(saved, weights_only=True)  # tensors and plain values, nothing else
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    manager.load_state_dict(state["manager"])
    take_steps(model, optimizer, 10, first=6)
    manager.finalize()
    torch.save(model.state_dict(), Path(folder) / f"{name}-{pruning}.end.pt")


if __name__ == "__main__":
    mode, folder, *pairs = sys.argv[1:]
    for pair in pairs:
        model_name, kind = pair.split(":")
        main(mode, kind, model_name, folder)
