"""C++ kernels in Python, with the same results: what a machine without a compiler trains and simulates with."""
