"""Specialise: choose by measurement the fastest way to run one fused operator.

A :class:`~sparta.specialize.kernel_spec.KernelSpec` says what is needed, every *implement* in one registry says whether
it can and what to try, and the tuner times the candidates, dense among them. Nothing here fuses; the caller does.
"""
