"""Run by a test: train pruned, distilled and quantised from one step to another, from and to a file."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from create.quantize.nets import NETS, train
from sparta.create.manager import Manager
from sparta.create.modifiers import modifier_named


def main(name, first, last, source, target):
    make, batch_of = NETS[name]
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pruning = modifier_named("MagnitudePruning")(final_sparsity=0.6, end_epoch=1.5, update_frequency=0.25)
    quantization = modifier_named("Quantization")(
        start_epoch=1, disable_quantization_observer_epoch=2.25, freeze_bn_stats_epoch=2.5
    )
    distillation = modifier_named("Distillation")(start_epoch=0.5)
    manager = Manager([pruning, quantization, distillation])
    manager.attach(model, optimizer, 4, teacher="self")
    if first:
        saved = torch.load(source)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        manager.load_state_dict(saved["manager"])
    train(model, batch_of, optimizer, last - first, first=first)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "manager": manager.state_dict()}, target
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
