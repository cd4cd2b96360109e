"""Levels that no mask can reach are told, not cut short in silence."""

import pytest

from scheduler.nets import small_net
from sparta.scheduler import AmbaLevelPruneScheduler, NMMaskGenerator, Setup


@pytest.mark.parametrize("algo", [0, 1])
def test_levels_that_a_pattern_cannot_reach_are_told(algo):
    scheduler = AmbaLevelPruneScheduler(
        Setup(NMMaskGenerator()),
        total_iters=4,
        sparsity_table=[30, 90],
        output_dir=None,
        save_dir=None,
        prun_algo=algo,
    )
    model = scheduler.prepare_sparse_model(small_net())
    with pytest.warns(UserWarning, match=r"level 90% comes to"):
        scheduler.prune_model(model, 0, (1, 3, 8, 8))
