"""The CUDA backend: NVIDIA GPUs of compute capability 9.0, 10.0 and 10.3, with the portable Triton kernels."""
