"""The table of checks, in the order in which they run."""

from deepinfer_hal.conformance.checks import (
    bad_calls,
    batch,
    capturable,
    chunks,
    claims,
    composites,
    discrete,
    empty,
    extremes,
    graphs,
    inputs,
    memory,
    nan,
    overwrite,
    paging,
    poison,
    repeat,
    sentinels,
    stream_order,
    untouched,
    values,
    views,
    weights,
)
from deepinfer_hal.conformance.checks._base import CORE, FULL, PROFILES, Check, Checks, Profile, get_profile

CHECKS = Checks(
    module.CHECK
    for module in (
        claims, empty, values, discrete, untouched, overwrite, sentinels, inputs, poison, views, nan, extremes, bad_calls,
        repeat, batch, paging, chunks, composites, weights, stream_order, capturable, graphs, memory,
    )  # fmt: skip
)

__all__ = ["CHECKS", "CORE", "FULL", "PROFILES", "Check", "Checks", "Profile", "get_profile"]
