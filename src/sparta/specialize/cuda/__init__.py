"""CUDA kernels: Triton kernels and the implements that reach them.

Nothing here imports Triton until a kernel is built, so that the registry stands complete on a machine without it.
"""
