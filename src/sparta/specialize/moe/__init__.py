"""The operation ``moe``: its spec and dense kernel, its op, and the ragged Triton product."""
