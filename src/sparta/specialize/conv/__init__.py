"""The operations ``conv2d`` and ``conv1d``: spec, dense, op, and the kernels for the CPU."""
