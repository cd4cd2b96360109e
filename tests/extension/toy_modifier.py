"""A modifier of one's own: keeps weights within a limit from an epoch on, and is named in a recipe."""

import torch
from torch import nn

import sparta
from sparta.create import Modifier, modifier


@modifier
class ClampModifier(Modifier):
    """Clamps all weights after every step."""

    limit: float = 1.0

    def after_step(self, run):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.clamp_(-self.limit, self.limit)


RECIPE = """
modifiers:
  - !EpochRangeModifier {start_epoch: 0.0, end_epoch: 2.0}
  - !ClampModifier {start_epoch: 0.0, limit: 0.01}
"""


def main():
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recipe = sparta.create.Recipe.from_yaml(RECIPE)
    manager, optimizer = sparta.create.initialize(model, optimizer, steps_per_epoch=3, recipe=recipe)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    manager.finalize()
    assert float(model.weight.detach().abs().max()) <= 0.01
