"""What a replay returns is the caller's own, whatever is among its results."""

import torch

from sparta.compiler.run.cuda_graph import _cloned


def test_results_are_copied_whatever_they_are():
    whole = torch.randn(4, 6)
    given = [whole, 1, whole[:, :3], torch.empty(0), torch.arange(3), whole.bfloat16(), None]
    found = _cloned(given)
    for one, two in zip(found, given, strict=True):
        if isinstance(two, torch.Tensor):
            assert torch.equal(one, two)
            assert one.dtype == two.dtype
            assert one.numel() == 0 or one.data_ptr() != two.data_ptr()
        else:
            assert one is two
    assert found[2].is_contiguous()  # as a clone of a tensor with gaps is
    assert _cloned([]) == []
