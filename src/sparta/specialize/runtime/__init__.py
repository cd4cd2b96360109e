"""What built kernels need at run time: handles that ops reach them by, and libraries of C++ operators."""
