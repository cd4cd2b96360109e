"""A few ops of the list under hostile arguments, in a process of their own; `make fuzz` calls all of them."""

from fuzz import ops


def test_no_op_of_the_list_ends_the_process():
    names = [str(function) for function in ops.allowed_overloads()]
    chosen = sorted(
        {*names[::40], "aten.lstm.input", "aten.sum.default", "aten.index_put.default", "aten.as_strided.default"}
    )
    bad, fine = ops.caught(chosen, trials=10, seed=1)
    assert bad == {}
    assert set(fine) == set(chosen)
    assert sum(fine.values()) > 0
