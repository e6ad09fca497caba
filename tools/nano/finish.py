"""Finishes the draft on a CPU: its last feed-forward part, Markov head and confidence head, on verified drafts.

`python tools/nano/finish.py collect --model DIR --split calibration --out cal.pt` drafts through the engine at every
eighth token of a split's files and keeps, for each draft, what the target said about it. `finish.py fit --model DIR
--calibration cal.pt --more train.pt --out DIR2` then trains what comes last in the draft on those rows: towards the
target's distribution on both files. The confidence head is fitted at the end on calibration text alone, which the
trunk has never seen. The parts before stay as they are, so a row needs only the input of that feed-forward part and
how its output is mixed in.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, linear, log_softmax

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hal"), str(ROOT / "backends" / "cpu"), str(Path(__file__).parent)]

from config import tensor_table  # noqa: E402
from drafts import area_under_curve, calibration_error, fit_confidence  # noqa: E402
from export import export_checkpoint, read_stored  # noqa: E402
from storage import rounded_weights  # noqa: E402

from deepinfer.model import reference_ops  # noqa: E402
from deepinfer.model.reference import Numerics, Reference, load_checkpoint  # noqa: E402

STRIDE_TOKENS, MOST_TOKENS, TOP = 8, 2400, 32
HARD_SHARE = 0.5
BATCH_ROWS = 1024
CONFIDENCE_RATE = 2e-3


def collect(args: argparse.Namespace) -> None:
    """Saves rows of drafts; every key's leading axis counts drafts.

    x [n, b, H]: input of the last block's feed-forward; scale [n, b] and rest [n, b, H]: the raw state is rest +
    scale * output; previous, tokens, greedy [n, b]: the token before, the draft, the target's choice after the drafts
    so far; top_values, top_ids [n, b, 32]: the target's likeliest tokens there, log probabilities.
    """
    import corpus
    import measure
    import numpy as np

    from deepinfer.runner.forced import Part, forced_step
    from deepinfer.tokenizer import Tokenizer

    sites = [Path(sysconfig.get_paths()["purelib"])]
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documents = corpus.load_split(args.split, stdlib, sites, sources={corpus.STDLIB})
    documents = [d for d in documents if 1000 < len(d.data) < 60_000]
    random.Random(args.seed).shuffle(documents)
    files = measure.encode(documents[: args.files], Tokenizer.from_folder(args.model))
    for file in files:
        file.ids = file.ids[:MOST_TOKENS]
    runner = measure.open_runner(str(args.model), files, args.threads)
    seen = _watch_last_site(runner.network)
    rows: list[dict] = []
    started = time.time()
    for active in measure.in_parallel(runner, files):
        parts = [file.part(STRIDE_TOKENS) for file in active]
        forced_step(runner, parts)
        for file, part in zip(active, parts, strict=True):
            file.done += len(part.ids)
        size = runner.text.dspark_block_size
        ready = [f for f in active if f.done % STRIDE_TOKENS == 0 and f.done + size < len(f.ids)]
        if ready:
            gold = np.array([f.ids[f.done] for f in ready], np.int32)
            slots, anchors = (np.array(v, np.int32) for v in ([f.slot for f in ready], [f.done - 1 for f in ready]))
            seen["on"] = True
            draft = runner.network.draft(runner.upload(slots), runner.upload(anchors), runner.upload(gold))
            seen["on"] = False
            tokens = draft.tokens.numpy().copy()
            row = _state_row(seen, draft.raw_hidden, len(ready), size)
            steps = [Part(f.slot, f.blocks, f.done, np.concatenate(([g], t)).astype(np.int32))
                     for f, g, t in zip(ready, gold, tokens, strict=True)]
            logits = forced_step(runner, steps).logits().view(len(ready), size + 1, -1)[:, :size]
            top = log_softmax(logits, -1).topk(TOP)
            row |= {"previous": torch.from_numpy(np.concatenate((gold[:, None], tokens[:, :-1]), 1)).long(),
                    "tokens": torch.from_numpy(tokens).long(), "greedy": logits.argmax(-1),
                    "top_values": top.values.half(), "top_ids": top.indices.short()}
            rows.append(row)
        if time.time() - started > args.seconds:
            break
    torch.save({key: torch.cat([row[key] for row in rows]) for key in rows[0]}, args.out)


def _watch_last_site(network) -> dict:
    """Keeps the buffers of the last feed-forward site of a draft block, at the moment its output is mixed in."""
    seen, finish_site = {"on": False}, network.blocks.finish_site

    def watched(residual, views):
        if seen["on"]:
            rows = views.x.shape[0]
            seen.update(x=views.x.clone(), y=views.y.clone(), scale=(residual.pre[:rows] * views.post).sum(-1))
        return finish_site(residual, views)

    network.blocks.finish_site = watched
    return seen


def _state_row(seen: dict, raw: torch.Tensor, requests: int, size: int) -> dict:
    scale = seen["scale"].view(requests, size)
    rest = raw.float() - scale[..., None] * seen["y"].view(requests, size, -1).float()
    return {"x": seen["x"].view(requests, size, -1).half(), "scale": scale, "rest": rest}


class LastPart:
    """The learning tail of the draft, rounded straight through; what comes before it is in the rows."""

    def __init__(self, folder: Path) -> None:
        self.config, self.weights = load_checkpoint(folder)
        self.config_json = json.loads((folder / "config.json").read_text())
        self.table = tensor_table(self.config_json)
        self.block = f"mtp.{self.config.num_nextn_predict_layers - 1}."
        tails = ("ffn.experts.", "ffn.shared_experts.", "norm.weight", "markov_head.", "confidence_head.")
        self.learning = {n: w.clone().requires_grad_() for n, w in self.weights.items()
                         if n.startswith(tuple(self.block + tail for tail in tails))}
        self.net = Reference(self.config, dict(self.weights), Numerics("fp8_32", "canonical"),
                             torch.zeros(self.config.vocab_size, dtype=torch.int32))

    def refresh(self) -> None:
        """Takes the learning weights into use, rounded as they will be stored."""
        self.net.weights |= rounded_weights(self.learning, {n: self.table[n] for n in self.learning})

    def __call__(self, rows: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft logits [n, V], raw state [n, H] and Markov embedding [n, rank]."""
        net, block = self.net, self.block
        y = net.moe(block + "ffn", rows["x"].float(), self.config.dspark_num_experts_per_tok, {}, "router")
        raw = _through_bf16(rows["rest"] + rows["scale"][..., None] * y)
        normed = reference_ops.rms_norm(raw, net.weights[block + "norm.weight"], self.config.rms_norm_eps)
        markov = embedding(rows["previous"], net.weights[block + "markov_head.embed.weight"])
        added = linear(markov, net.weights[block + "markov_head.head.weight"])
        return net.head(_through_bf16(normed)) + added, raw, markov


def _through_bf16(x: torch.Tensor) -> torch.Tensor:
    return x + (x.bfloat16().float() - x).detach()


def tested_rows(path: Path, part: slice) -> dict:
    """The rows of drafts whose predecessors in the block were all accepted, flattened; from a part of the file."""
    data = {key: value[part] for key, value in torch.load(path, weights_only=True).items()}
    accepted = (data["tokens"] == data["greedy"]).cumprod(1).bool()
    tested = torch.cat((torch.ones_like(accepted[:, :1]), accepted[:, :-1]), 1)
    rows = {key: value[tested] for key, value in data.items()}
    rows["top_ids"] = rows["top_ids"].long()
    rows["place"] = torch.arange(tested.shape[1]).expand(tested.shape)[tested]
    return rows


@torch.no_grad()
def run_rows(last: LastPart, rows: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """hit bool [n]: the draft now equals the target's choice. features [n, F]: what the confidence head reads."""
    last.refresh()
    hits, features = [], []
    for start in range(0, rows["scale"].shape[0], 2048):
        part = {key: value[start : start + 2048] for key, value in rows.items()}
        logits, raw, markov = last(part)
        hits.append(logits.argmax(-1) == part["greedy"])
        features.append(torch.cat((raw, markov), -1))
    return torch.cat(hits), torch.cat(features)


def check(last: LastPart, rows: dict) -> dict:
    """Confidence and acceptance on rows kept out of the fit; acceptance of a block from its places' rates."""
    hit, features = run_rows(last, rows)
    rank = last.config.dspark_markov_rank
    confidence = last.net.confidence_logits(features[:, :-rank], features[:, -rank:]).detach().sigmoid()
    rates = torch.stack([hit[rows["place"] == place].float().mean() for place in range(5)])
    found = {"mean_accepted": float(rates.cumprod(0).sum()), "auc": area_under_curve(confidence, hit),
             "ece": calibration_error(confidence, hit)}
    return {name: round(value, 4) for name, value in found.items()}


def fit(args: argparse.Namespace) -> None:
    """Trains the tail and writes the finished checkpoint."""
    torch.manual_seed(args.seed)
    last = LastPart(args.model)
    count = torch.load(args.calibration, weights_only=True)["scale"].shape[0]
    kept = int(count * args.keep_out)
    outside = tested_rows(args.calibration, slice(0, kept)) if kept else None
    middle = kept + int((count - kept) * (1 - args.head_share))
    sets = [tested_rows(args.calibration, slice(kept, middle))] + [tested_rows(path, slice(None)) for path in args.more]
    rows = {key: torch.cat([part[key] for part in sets]) for key in sets[0]}
    confidence = [w for n, w in last.learning.items() if "confidence" in n]
    others = [w for n, w in last.learning.items() if "confidence" not in n]
    adam = torch.optim.AdamW([{"params": others, "rate": args.rate}, {"params": confidence, "rate": CONFIDENCE_RATE}],
                             betas=(0.9, 0.99), weight_decay=0.0)
    total = rows["scale"].shape[0]
    print("before", check(last, outside) if outside else "", flush=True)
    steps, step = args.epochs * (total // BATCH_ROWS), 0
    for epoch in range(args.epochs):
        order = torch.randperm(total)
        for start in range(0, total - BATCH_ROWS + 1, BATCH_ROWS):
            picked = order[start : start + BATCH_ROWS]
            for group in adam.param_groups:
                group["lr"] = group["rate"] * max(0.02, 1 - step / steps) * min(1.0, (step + 1) / 20)
            loss = tail_loss(last, {k: v[picked] for k, v in rows.items()}, args.confidence_share)
            adam.zero_grad()
            loss.backward()
            adam.step()
            step += 1
        print(f"epoch {epoch + 1} loss {float(loss.detach()):.4f}", check(last, outside) if outside else "", flush=True)
    # Rows that the state was trained on are hit too often: the head is fitted on others.
    hit, features = run_rows(last, tested_rows(args.calibration, slice(middle, count)))
    with torch.no_grad():
        confidence[0].copy_(fit_confidence(features, hit))
    print("fitted on unseen text", check(last, outside) if outside else "", flush=True)
    changed = {n.removesuffix(".weight") for n in last.learning}
    same = {n: t for n, t in read_stored(args.model).items() if n.rpartition(".")[0] not in changed}
    masters = last.weights | last.learning
    print(export_checkpoint(args.out, last.config_json, masters, args.model, same), "bytes written")


def tail_loss(last: LastPart, rows: dict, confidence_share: float) -> torch.Tensor:
    """Cross entropy to the target's top tokens and to its choice, plus the confidence's to the draft's own certainty.

    The probability of the draft's best token foretells acceptance well and carries no noise, so the state learns to
    hold it; how far to trust it is fitted afterwards, on verified drafts.
    """
    last.refresh()
    logits, state, markov = last(rows)
    confidence = last.net.confidence_logits(state, markov)
    log_draft = log_softmax(logits, -1)
    target = rows["top_values"].float().softmax(-1)
    soft = -(target * log_draft.gather(-1, rows["top_ids"])).sum(-1).mean()
    hard = -log_draft.gather(-1, rows["greedy"][:, None]).mean()
    certain = binary_cross_entropy_with_logits(confidence, log_draft.detach().amax(-1).exp())
    return soft + HARD_SHARE * hard + confidence_share * certain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["collect", "fit"])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint that train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="rows file (collect) or checkpoint folder (fit)")
    parser.add_argument("--split", default="calibration", choices=["calibration", "train"])
    parser.add_argument("--files", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--more", type=Path, action="append", default=[])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--confidence-share", type=float, default=1.0)
    parser.add_argument("--head-share", type=float, default=0.5,
                        help="part of the calibration drafts that only the confidence head sees")
    parser.add_argument("--keep-out", type=float, default=0.0, help="part of the calibration drafts to check on")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    collect(args) if args.action == "collect" else fit(args)


if __name__ == "__main__":
    main()
