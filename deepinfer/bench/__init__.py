"""Measurements with stored results: generation beside the floor from the op cards, and the host's own cost."""
