"""Chains: runs of layers, norms and attentions of a graph as one call into C++, with memory planned once."""
