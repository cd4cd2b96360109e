"""``triton-block``, the Triton kernel for weights pruned in blocks, and what belongs to it."""
