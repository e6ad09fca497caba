"""Portable Triton kernels of the op cards: a provider for backends that can run Triton, and no backend itself.

Importing this package does not import Triton; `deepinfer_triton.provider` says what there is, and why if there is
nothing.
"""
