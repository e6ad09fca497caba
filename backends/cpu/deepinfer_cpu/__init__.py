"""The CPU backend: references everywhere, native kernels where a C++ compiler built them."""
