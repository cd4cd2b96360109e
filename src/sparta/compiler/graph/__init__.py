"""The graph of a model between capture and kernels: program, passes, signature and JSON form."""
