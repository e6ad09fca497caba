"""One file per op: the kernel, the function that starts it, and what it serves."""
