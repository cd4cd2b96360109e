"""The operation ``attention``: its spec and dense kernel, its op, and one file for each implement."""
