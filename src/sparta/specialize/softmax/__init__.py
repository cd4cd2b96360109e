"""The operation ``softmax``: its spec and dense kernel, its op, and the Triton implement."""
