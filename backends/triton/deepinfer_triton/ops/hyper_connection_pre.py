"""hyper_connection_pre and residual_site: the same two launches, with and without a post step before and a norm after."""

from __future__ import annotations

from deepinfer_triton.mixing import mix
from deepinfer_triton.support import DENSE, offer, serves
from deepinfer_triton.targets import Target


def hyper_connection_pre(
    target: Target, streams, fn, base, scale, pre_prev, rms_eps, hc_eps, iterations, count, out, pre, post, comb
) -> None:
    mix(
        target, None, None, None, fn, base, scale, pre_prev, None, rms_eps, hc_eps, iterations, count, streams,
        out, None, None, pre, post, comb,
    )  # fmt: skip


def residual_site(
    target: Target, y, post, comb, fn, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, iterations, count, streams,
    out, out_codes, out_scales, pre, post_out, comb_out,
) -> None:  # fmt: skip
    mix(
        target, y, post, comb, fn, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, iterations, count, streams,
        out, out_codes, out_scales, pre, post_out, comb_out,
    )  # fmt: skip


TARGETS = ("interpreter", "sm90", "sm100", "sm103")
"""The front half of Ascend's compiler takes no output row as room for float32 sums."""

MAKERS = [
    offer("hyper_connection_pre", hyper_connection_pre, supports=serves(streams=DENSE, out=DENSE), targets=TARGETS),
    offer("residual_site", residual_site, supports=serves(streams=DENSE), targets=TARGETS),
]
