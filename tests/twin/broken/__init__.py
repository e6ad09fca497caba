"""Whole kernels with one mistake each: what they are (`bugs`), and how they are compiled and run (`build`)."""
