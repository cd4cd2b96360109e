"""The operation ``linear``: spec, dense, op, and one file or folder for each implement."""
