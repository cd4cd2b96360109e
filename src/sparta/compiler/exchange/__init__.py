"""Contracts for other compilers: requests and responses in JSON, and a reader that needs nothing of ours."""
