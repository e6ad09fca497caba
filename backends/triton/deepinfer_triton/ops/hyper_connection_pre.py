"""hyper_connection_pre and residual_site: the same two launches, in the second op after a post step and with a norm."""

from __future__ import annotations

from deepinfer_triton.mixing import mix
from deepinfer_triton.ops.hyper_connection_post import hyper_connection_post
from deepinfer_triton.support import DENSE, NVIDIA, offer, serves
from deepinfer_triton.targets import Target


def hyper_connection_pre(
    target: Target, streams, fn, base, scale, pre_prev, rms_eps, hc_eps, iterations, count, out, pre, post, comb
) -> None:
    mix(
        target, fn, base, scale, pre_prev, None, rms_eps, hc_eps, iterations, count, streams, out, None, None, pre, post,
        comb,
    )  # fmt: skip


def residual_site(
    target: Target, y, post, comb, fn, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, iterations, count, streams,
    out, out_codes, out_scales, pre, post_out, comb_out,
) -> None:  # fmt: skip
    if y is not None:
        hyper_connection_post(target, y, post, comb, count, streams)
    mix(
        target, fn, base, scale, pre_prev, norm_weight, rms_eps, hc_eps, iterations, count, streams, out, out_codes,
        out_scales, pre, post_out, comb_out,
    )  # fmt: skip


MAKERS = [
    offer("hyper_connection_pre", hyper_connection_pre, supports=serves(streams=DENSE, out=DENSE), targets=NVIDIA),
    offer("residual_site", residual_site, supports=serves(streams=DENSE), targets=NVIDIA),
]
