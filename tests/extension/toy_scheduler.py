"""A scheduler of one's own: prunes one half at once."""

import torch
from torch import nn

import sparta
from sparta.scheduler import BaseScheduler, register_scheduler


@register_scheduler("HalfScheduler")
class HalfScheduler(BaseScheduler):
    """Prunes one half of every layer when the model is prepared."""

    def prepare_sparse_model(self, model):
        model = super().prepare_sparse_model(model)
        self.update_sparsity_per_layer(model, 0.5)
        return model


def main():
    scheduler = sparta.build_sparse_scheduler({"scheduler": {"type": "HalfScheduler"}})
    model = scheduler.prepare_sparse_model(nn.Linear(8, 4))
    assert model(torch.randn(2, 8)).shape == (2, 4)
    _, spec = scheduler.export_sparse_model(model)
    assert spec.density == 0.5
