"""Measures a nano checkpoint with the reference network: bits per byte, ablations, drafts, confidence.

`python tools/nano/evaluate.py --model DIR --data .nano [--device cuda] [--ablations] [--documents N]`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hal"), str(Path(__file__).parent)]

from data import Split, load_split, wrap  # noqa: E402
from drafts import Verified, area_under_curve, calibration_error  # noqa: E402

from deepinfer.model import reference_ops  # noqa: E402
from deepinfer.model.reference import Numerics, Reference  # noqa: E402


@torch.no_grad()
def bits_per_byte(net: Reference, split: Split, device: torch.device, indices=None, seconds: float = math.inf,
                  most_tokens: int | None = None, random_rows: bool = False) -> tuple[float, int]:
    """Bits per byte over whole documents, each from begin; every byte is counted. Also the bytes measured.

    most_tokens: measure only that many tokens of each document (bytes are then estimated by share; for ablations).
    random_rows: every index source selects visible rows at random instead of by score.
    """
    nats, size, started = 0.0, 0.0, time.time()
    for index in range(len(split.documents)) if indices is None else indices:
        document = split.documents[index][:most_tokens]
        ids = torch.from_numpy(wrap(document)[:-1].astype("int64")).to(device)
        override = random_selection(net.config, ids.numel(), device) if random_rows else None
        logits = net.forward(ids[None], taps={}, select_override=override, wanted=set())[0]
        targets = ids[1:]
        for start in range(0, targets.numel(), 4096):
            part = logits[start : start + 4096][: targets.numel() - start]
            nats += float(torch.nn.functional.cross_entropy(part, targets[start : start + 4096], reduction="sum"))
        size += float(split.bytes[index]) * document.size / split.documents[index].size
        if time.time() - started > seconds:
            break
    return nats / math.log(2) / max(size, 1e-9), int(size)


def random_selection(config, tokens: int, device) -> dict[int, torch.Tensor]:
    """For each index source, index_topk visible rows drawn at random for every token."""
    generator = torch.Generator(device=device).manual_seed(3)
    chosen = {}
    for layer in config.index_source_layer_ids:
        ratio = config.ratio(layer)
        rows = tokens // ratio
        visible = reference_ops.visible_rows(tokens, rows, ratio, device)
        noise = torch.rand(tokens, rows, generator=generator, device=device).masked_fill(~visible, -torch.inf)
        chosen[layer] = reference_ops.top_mask(noise, config.index_topk)[None]
    return chosen


def ablations(net: Reference, split: Split, device, indices, seconds: float = math.inf, most_tokens=None) -> dict:
    """Bits per byte on the same documents as is, with random index rows, without Engram, without sinks."""
    def measure(changed: Reference, **options) -> float:
        return bits_per_byte(changed, split, device, indices, seconds, most_tokens, **options)[0]

    result = {"as_is": measure(net), "random_indexer": measure(net, random_rows=True)}
    no_engram = dataclasses.replace(net.config, engram_layer_ids=())
    result["no_engram"] = measure(Reference(no_engram, net.weights, net.numerics, net.token_map))
    sinkless = {n: torch.full_like(w, -1e9) if n.endswith("attn_sink") else w for n, w in net.weights.items()}
    result["no_sinks"] = measure(Reference(net.config, sinkless, net.numerics, net.token_map))
    return result


def draft_report(verified: Verified) -> dict:
    """Mean accepted of a block, per-place acceptance given earlier ones, and the confidence head's ECE and AUC."""
    tested = verified.tested()
    probability, outcome = verified.confidence[tested].sigmoid(), verified.accepted[tested]
    return {
        "drafts": verified.accepted.shape[0],
        "mean_accepted": float(verified.accepted.sum(1).float().mean()),
        "mean_accepted_against_text": float(verified.gold_accepted.sum(1).float().mean()),
        "accepted_given_earlier": [round(float(a[t].float().mean()), 4) if bool(t.any()) else None
                                   for a, t in zip(verified.accepted.T, tested.T, strict=True)],
        "ece_15_bins": calibration_error(probability, outcome),
        "auc": area_under_curve(probability, outcome),
    }


def held_out_xz_bits_per_byte(split: Split, tokenizer_path: Path) -> float:
    """`xz -9e` of the split's documents end to end, in bits per byte."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    text = b"".join(tokenizer.decode(d.tolist(), skip_special_tokens=False).encode() for d in split.documents)
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def load_network(folder: Path, device: torch.device, dtype: torch.dtype) -> Reference:
    """The checkpoint as stored, with default numerics, on a device."""
    net = Reference.from_folder(folder, Numerics("fp8_32", "canonical", dtype))
    net.weights = {n: w.to(device) for n, w in net.weights.items()}
    net.token_map = net.token_map.to(device)
    net.config = dataclasses.replace(net.config, image_token_id=None)
    return net


def full_report(folder: Path, data: Path, device: torch.device, *, documents: int | None = None,
                with_ablations: bool = True, draft_documents: int = 40, draft_tokens: int = 768,
                seconds: float = math.inf, dtype: torch.dtype = torch.bfloat16,
                most_tokens: int | None = None) -> dict:
    """Everything the model card says. `seconds` bounds each part; parts cut short report how much they measured."""
    import stages

    torch.set_float32_matmul_precision("highest")
    net, split = load_network(folder, device, dtype), load_split(data, "heldout")
    indices = range(len(split.documents))[:documents]
    bpb, size = bits_per_byte(net, split, device, indices, seconds, most_tokens)
    report = {"bits_per_byte": bpb, "bytes": size, "of_bytes": int(split.bytes.sum()),
              "xz_9e_bits_per_byte": held_out_xz_bits_per_byte(split, folder / "tokenizer.json")}
    model = stages.Model({}, {}, net, device)
    verified = stages.gather_drafts(model, split, draft_tokens, draft_documents, seconds, seed=5)
    report["drafts"] = draft_report(verified)
    if with_ablations:
        report["ablations"] = ablations(net, split, device, list(indices)[::3], seconds, most_tokens)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "deepinfer" / "models" / "nano")
    parser.add_argument("--data", type=Path, default=ROOT / ".nano")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--documents", type=int)
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    args = parser.parse_args()
    report = full_report(args.model, args.data, torch.device(args.device), documents=args.documents,
                         with_ablations=args.ablations, seconds=args.seconds, dtype=getattr(torch, args.dtype))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
