"""Microseconds of each native CPU kernel at nano's shapes, for one decode token and for 64.

Run it with the parts' folders on the path (or the package installed): python tools/bench_native.py [--threads 2] [op ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "hal"), str(ROOT / "backends/cpu")]

from deepinfer_cpu import kernels, weights  # noqa: E402
from deepinfer_hal import formats  # noqa: E402
from deepinfer_hal.card import get_card  # noqa: E402
from deepinfer_hal.weights import CanonicalWeight  # noqa: E402

H, M, HEADS, D, LORA, GROUPS, O_LORA, E, INTER, VOCAB, WINDOW = 256, 4, 4, 512, 64, 2, 64, 8, 128, 2048, 134
BF16, F32, U8, I32 = torch.bfloat16, torch.float32, torch.uint8, torch.int32


def fp8(role: str, *shape: int) -> Any:
    """A handle of a random FP8 weight."""
    pairs = [formats.quantise_weight_fp8(part) for part in torch.randn(shape).reshape(-1, *shape[-2:])]
    values, scales = (torch.stack(parts).reshape(*shape[:-2], *parts[0].shape) for parts in zip(*pairs, strict=True))
    return weights.prepare_weight(role, CanonicalWeight("fp8_block32", values, scales))


def fp4(role: str, *shape: int) -> Any:
    return weights.prepare_weight(role, CanonicalWeight("fp4_row32", *formats.quantise(torch.randn(shape), "mxfp4_32")))


def bf16(role: str, *shape: int) -> Any:
    return weights.prepare_weight(role, CanonicalWeight("bf16", torch.randn(shape).to(BF16)))


def codes(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return formats.quantise(torch.randn(rows, width), "fp8_32")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def problems(t: int) -> dict[str, tuple[str, tuple]]:
    """Label -> (op, arguments) for t decode tokens, each of its own request at position 191."""
    rand = torch.randn
    x_q, lat_q, o_q, low_q = codes(t, H), codes(t, LORA), codes(t, HEADS * D), codes(t, GROUPS * O_LORA)
    attn_in, streams = rand(t, LORA + D).to(BF16), rand(t, M, H).to(BF16)
    pre, comb = torch.rand(t, M), torch.rand(t, M, M)
    ring = torch.cat(formats.quantise(rand(t * WINDOW, D), "fp8_32"), 1)
    main = torch.cat(formats.quantise(rand(t * 4 * 64, D), "fp4_16"), 1).view(t * 4, -1)
    index = torch.zeros(t * 4, 64 * 68, dtype=U8)
    index[:, : 64 * 64] = torch.randint(0, 256, (t * 4, 64 * 64), dtype=U8)
    index[:, 64 * 64 :] = 127
    table = torch.randperm(t * 4).to(I32).view(t, 4)
    zero, owner, position = torch.zeros(t, dtype=I32), torch.arange(t, dtype=I32), torch.full((t,), 191, dtype=I32)
    base, modulo, rope = torch.arange(t, dtype=I32) * WINDOW, torch.full((t,), WINDOW, dtype=I32), rand(512, 64)
    rows = torch.arange(64, dtype=I32).repeat(t, 1) * 2
    q, iq = rand(t, HEADS, D).to(BF16), formats.quantise(rand(t, HEADS, 128), "mxfp4_32")
    scores, logits = rand(t, 192), rand(t, VOCAB)
    out = torch.empty
    lin = {
        "linear attn_in 576x256": (*x_q, fp8("attn_in", LORA + D, H), None, attn_in, None),
        "linear wq_b 2048x64": (*lat_q, fp8("wq_b", HEADS * D, LORA), None, out(t, HEADS * D, dtype=BF16), None),
        "linear wo_b 256x128": (*low_q, fp8("wo_b", H, GROUPS * O_LORA), None, out(t, H, dtype=BF16), None),
        "linear head 2048x256": (streams[:, 0], None, bf16("head", VOCAB, H), None, logits, None),
    }
    site = (rand(24, M * H), rand(24), rand(3), pre, rand(H).to(BF16), 1e-20, 1e-6, 20, None)
    moe = (bf16("gate", E, H), rand(E), fp4("experts_gate_up", E, 2 * INTER, H), fp4("experts_down", E, H, INTER))
    shared = (fp8("shared_gate_up", 2 * INTER, H), fp8("shared_down", H, INTER))
    found = {label: ("linear", args) for label, args in lin.items()}
    o_low = (out(t, GROUPS * O_LORA, dtype=U8), out(t, GROUPS * O_LORA // 32, dtype=U8))
    found["grouped_linear wo_a"] = ("grouped_linear", (*o_q, fp8("wo_a", GROUPS, O_LORA, HEADS * D // GROUPS), None, *o_low))
    y = rand(t, H).to(BF16)
    site_out = (streams, out(t, H, dtype=BF16), *codes(t, H), out(t, M), pre.clone(), comb.clone())
    found["residual_site"] = ("residual_site", (y, pre, comb, *site, *site_out))
    found["hyper_connection_post"] = ("hyper_connection_post", (y, pre, comb, None, streams))
    found["rms_norm q_norm"] = ("rms_norm", (attn_in[:, :LORA], rand(LORA).to(BF16), 1e-20, None, None, *codes(t, LORA)))
    found["rope q"] = ("rope", (position, rope, False, None, q))
    found["quantise o"] = ("quantise", (rand(t, HEADS * D).to(BF16), "fp8_32", None, *codes(t, HEADS * D), None))
    found["write_kv window"] = (
        "write_kv",
        (attn_in[:, LORA:], rand(D).to(BF16), 1e-20, position, rope, base, "fp8_32", 0, None, ring, None),
    )
    window = (ring, base, zero, modulo, "fp8_32")
    tail = (owner, position, rand(HEADS), D**-0.5, 128, None, out(t, HEADS, D, dtype=BF16))
    found["sparse_attention 128"] = ("sparse_attention", (q, *window, None, None, "fp4_16", 0, None, *tail))
    found["sparse_attention 128 + 64"] = ("sparse_attention", (q, *window, main, table, "fp4_16", 64, rows, *tail))
    seen = torch.full((t,), 192, dtype=I32)
    found["score_index 192"] = (
        "score_index",
        (*iq, rand(t, HEADS).to(BF16), index, table, owner, seen, None, 8, "mxfp4_32", 64, None, scores),
    )
    found["select_topk 192 -> 64"] = ("select_topk", (scores, None, 8, None, out(t, 64, dtype=I32)))
    found["select_candidate_blocks"] = ("select_candidate_blocks", (scores, seen, 8, None, out(t, 32, dtype=I32)))
    found["moe_layer"] = (
        "moe_layer",
        (y, *x_q, *moe, *shared, 2, 1.5, 10.0, None, out(t, H, dtype=BF16), out(E, dtype=I32)),
    )
    ids, history = torch.zeros(t, dtype=I32), torch.zeros(t, 512, dtype=I32)
    found["gather_tokens"] = ("gather_tokens", (history, owner, owner, position, None, ids, out(t, 4, dtype=I32)))
    found["embedding_gather"] = ("embedding_gather", (ids, bf16("embedding", VOCAB, H), None, streams))
    found["copy_rows"] = ("copy_rows", (streams.view(t, -1).view(U8), owner, owner, out(t, M * H * 2, dtype=U8)))
    return found


def microseconds(call: Callable[[], None]) -> float:
    """Best of five batches: other work on the machine only ever adds."""
    call()
    best = float("inf")
    for _ in range(5):
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < 0.02:
            call()
            calls += 1
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="only ops whose label contains one of these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64])
    options = parser.parse_args()
    if kernels.native() is None:
        sys.exit(f"no native kernels: {kernels.native_unavailable_reason()}")
    torch.manual_seed(0)
    kernels.set_num_threads(options.threads)
    print(f"level {kernels.instruction_set()}, {options.threads} threads; microseconds a call")
    print(f"{'':30}" + "".join(f"{f'T = {t}':>12}" for t in options.rows))
    by_rows = [problems(t) for t in options.rows]
    for label in by_rows[0]:
        if options.ops and not any(text in label for text in options.ops):
            continue
        times = []
        for found in by_rows:
            op, args = found[label]
            fn = kernels.bind(get_card(op))
            times.append(microseconds(lambda fn=fn, args=args: fn(*args)))
        print(f"{label:30}" + "".join(f"{t:12.1f}" for t in times))


if __name__ == "__main__":
    main()
