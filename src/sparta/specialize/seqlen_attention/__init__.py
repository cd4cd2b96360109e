"""The operation ``seqlen_attention``: attention over sequences of several lengths."""
