"""The three stages of training: trunk with its indexers, draft blocks on the frozen trunk, confidence head."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from data import Split, TokenStream, wrap
from drafts import Verified, every_nth_anchor, fit_confidence, verify_drafts
from losses import balance_experts, draft_loss, index_loss, next_token_loss
from optim import NEVER_TRAINED, Optimiser
from storage import rounded_weights

from deepinfer.model.reference import Numerics, Reference

WARMUP = 0.015
HOLD_UNTIL = 0.45  # then the rate falls in a straight line
DENSE_UNTIL = 0.12  # attention sees every compressed row, the indexer only watches
LONG_FROM, LONG_EVERY, LONG_TOKENS = 0.40, 4, 8192
ROUND_FROM = 0.78  # storage, caches and activations round from here on
FINAL_RATE = 0.02
ANCHOR_STEP = 4


@dataclasses.dataclass
class Settings:
    """Sizes of a step. micro_tokens is what one forward pass holds."""

    step_tokens: int = 32768
    micro_tokens: int = 32768
    sequence_tokens: int = 2048
    long_tokens: int = LONG_TOKENS
    draft_sequences: int = 16
    index_every: int = 1


class Log:
    """Progress lines on the screen every few seconds, and every record in a file."""

    def __init__(self, path: Path | None, every_seconds: float = 10.0) -> None:
        self.file = path.open("a") if path else None
        self.every, self.last, self.started = every_seconds, 0.0, time.time()

    def due(self) -> bool:
        return time.time() - self.last >= self.every

    def write(self, **record) -> None:
        self.last = time.time()
        record = {"t": round(self.last - self.started, 1)} | {
            k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}
        print(" ".join(f"{k}={v}" for k, v in record.items()), flush=True)
        if self.file:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()


@dataclasses.dataclass
class Clock:
    """Progress from `begin` to `end` over a number of seconds, or of steps when those are given."""

    seconds: float
    steps: int | None = None
    begin: float = 0.0
    end: float = 1.0

    def ticks(self) -> Iterator[tuple[int, float]]:
        """(step, progress) until the time or the steps are used up; at least one step."""
        started, step = time.time(), 0
        while True:
            part = step / self.steps if self.steps else (time.time() - started) / max(self.seconds, 1e-9)
            if part >= 1 and step:
                return
            yield step, self.begin + (self.end - self.begin) * min(part, 1.0)
            step += 1


def rate_factor(progress: float) -> float:
    """Warm up, hold, then fall to FINAL_RATE."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return max(min(1.0, (1 - progress) / (1 - HOLD_UNTIL)), FINAL_RATE)


@dataclasses.dataclass
class Model:
    """Master weights and the reference network that reads them (or their rounded form)."""

    masters: dict[str, torch.Tensor]
    table: dict
    net: Reference
    device: torch.device

    def part(self, draft: bool) -> dict[str, torch.Tensor]:
        return {n: m for n, m in self.masters.items() if n.startswith("mtp.") == draft}

    def require_grad(self, draft: bool) -> dict[str, torch.Tensor]:
        """Makes the trunk's (or the draft's) masters the ones that learn; returns them."""
        for name, master in self.masters.items():
            master.requires_grad_(name.startswith("mtp.") == draft and not name.endswith(NEVER_TRAINED))
        return self.part(draft)


def training_numerics(model: Model, rounding: bool) -> Numerics:
    dtype = model.net.numerics.dtype
    return Numerics("fp8_32", "canonical", dtype) if rounding else Numerics("none", "float32", dtype)


def deployed(model: Model) -> None:
    """The network as a user gets it: weights as stored, caches and activations rounded."""
    with torch.no_grad():
        model.net.weights = rounded_weights(model.masters, model.table)
    model.net.numerics = training_numerics(model, True)


def trunk_stage(model: Model, optimiser: Optimiser, stream: TokenStream, clock: Clock, settings: Settings, log: Log,
                save=None) -> None:
    """Next-token training of the backbone; indexers learn from their own loss in the same step."""
    trunk = model.require_grad(draft=False)
    config = model.net.config
    dense = dataclasses.replace(config, index_topk=10**9, candidate_topk_blocks=10**9)
    micro, seen, timed, saved = settings.micro_tokens, 0, time.time(), time.time()
    for step, progress in clock.ticks():
        rounding, factor = progress >= ROUND_FROM, rate_factor(progress)
        model.net.config = dense if progress < DENSE_UNTIL else config
        model.net.numerics = training_numerics(model, rounding)
        model.net.weights = rounded_weights(trunk, model.table) if rounding else model.masters
        long = progress >= LONG_FROM and step % LONG_EVERY == 0
        length = settings.long_tokens if long else settings.sequence_tokens
        while True:
            try:
                losses = _trunk_step(model, stream, settings, micro, length, factor, step)
                break
            except torch.cuda.OutOfMemoryError:
                micro //= 2
                _forget_gradients(trunk)
                log.write(stage="trunk", out_of_memory=True, micro_tokens=micro)
        optimiser.step(factor)
        seen += settings.step_tokens
        if log.due():
            speed = settings.step_tokens * (step + 1) / (time.time() - timed)
            log.write(stage="trunk", step=step, progress=progress, tokens=seen, tokens_per_s=int(speed), length=length,
                      passes=stream.passes, **{k: float(v) for k, v in losses.items()})
            if not torch.isfinite(losses["loss"]):
                raise FloatingPointError(f"trunk loss is {float(losses['loss'])} at step {step}")
        if save and time.time() - saved > 120:
            save()
            saved = time.time()
    model.net.config = config


def _trunk_step(model, stream, settings, micro, length, factor, step) -> dict:
    sequences = max(1, micro // length)
    parts = max(1, settings.step_tokens // (sequences * length))
    with_index = step % settings.index_every == 0
    wanted = {"router"} | ({"index_scores", "compressed_attention"} if with_index else set())
    total = {}
    for _ in range(parts):
        inputs, targets = stream.batch(sequences, length)
        taps: dict = {}
        loss = next_token_loss(model.net.forward(inputs, taps=taps, wanted=wanted), targets)
        record = {"loss": loss.detach()}
        if with_index:
            index = index_loss(taps, model.net.config)
            record["index_loss"] = index.detach()
            loss = loss + index
        (loss / parts).backward()
        chosen = {f"layers.{n.split('.')[1]}.ffn": t for n, t in taps.items() if n.endswith(".ids")}
        record["worst_load"] = balance_experts(model.masters, chosen, min(1.0, 0.1 + factor))
        total = {k: total.get(k, 0) + v / parts for k, v in record.items()}
    return total


def _forget_gradients(parameters: dict[str, torch.Tensor]) -> None:
    for parameter in parameters.values():
        parameter.grad = None
    torch.cuda.empty_cache()


def draft_stage(model: Model, optimiser: Optimiser, stream: TokenStream, clock: Clock, settings: Settings,
                log: Log) -> None:
    """Trains the draft blocks and the Markov head on the frozen, rounded trunk."""
    deployed(model)
    trunk = {n: w for n, w in model.net.weights.items() if not n.startswith("mtp.")}
    draft = model.require_grad(draft=True)
    net, chosen = model.net, {}
    plain_moe = net.moe

    def moe(prefix, x, experts_per_token, taps, tap):
        out = plain_moe(prefix, x, experts_per_token, taps, tap)
        if prefix.startswith("mtp."):
            chosen[prefix] = taps[f"{tap}.ids"]
        return out

    net.moe = moe
    try:
        for step, progress in clock.ticks():
            factor = rate_factor(progress)
            rounding = progress >= 0.6
            inputs, _ = stream.batch(settings.draft_sequences, settings.sequence_tokens)
            net.numerics = training_numerics(model, True)
            taps: dict = {}
            with torch.no_grad():
                net.weights = trunk
                target = net.forward(inputs, taps=taps, wanted={"dspark"})
            net.weights = trunk | (rounded_weights(draft, model.table) if rounding else draft)
            net.numerics = dataclasses.replace(net.numerics, act_quant="fp8_32" if rounding else "none")
            loss, agreement = _draft_step(net, taps["dspark.features"], inputs, target, step)
            loss.backward()
            optimiser.step(factor)
            worst = balance_experts(model.masters, chosen, min(1.0, 0.1 + factor))
            if log.due():
                log.write(stage="draft", step=step, progress=progress, loss=float(loss.detach()),
                          worst_load=float(worst), agreement=[round(float(a), 3) for a in agreement])
    finally:
        del net.moe
        deployed(model)


def _draft_step(net, features, inputs, target, step):
    block = net.config.dspark_block_size
    first = step % ANCHOR_STEP
    anchors = torch.arange(first, inputs.shape[1] - block - 1, ANCHOR_STEP, device=inputs.device)
    anchors = anchors.expand(inputs.shape[0], -1)
    drafted = net.draft(features, inputs, anchors)
    places = anchors[..., None] + 1 + torch.arange(block, device=inputs.device)  # where the target predicts row i
    gold = inputs.gather(1, (places + 1).flatten(1)).view(places.shape)
    logits, _, _ = net.markov_chain(drafted.base_logits, drafted.gold, tokens=gold)
    batch = torch.arange(inputs.shape[0], device=inputs.device)[:, None, None]
    wanted = target[batch, places].flatten(0, 1)
    # A block that runs over a document's end teaches nothing: rows after a begin token are left out.
    scored = gold.masked_fill((gold == 0).cumsum(-1) > 0, -100)
    return draft_loss(logits.flatten(0, 1), wanted, scored.flatten(0, 1))


def gather_drafts(model: Model, split: Split, most_tokens: int, documents: int, seconds: float, seed: int) -> Verified:
    """Verified drafts at every 4th position of the first tokens of randomly ordered documents of a split."""
    block, parts, started = model.net.config.dspark_block_size, [], time.time()
    order = torch.randperm(len(split.documents), generator=torch.Generator().manual_seed(seed)).tolist()
    for index in order[:documents]:
        ids = torch.from_numpy(wrap(split.documents[index])[:most_tokens].astype("int64")).to(model.device)
        anchors = every_nth_anchor(ids.numel(), block, ANCHOR_STEP, model.device)
        if anchors.numel():
            parts.append(verify_drafts(model.net, ids, anchors))
        if parts and time.time() - started > seconds:
            break
    return Verified.join(parts)


def confidence_stage(model: Model, split: Split, most_tokens: int, documents: int, seconds: float, log: Log) -> None:
    """Fits the confidence head on text that neither trunk nor draft has seen."""
    deployed(model)
    verified = gather_drafts(model, split, most_tokens, documents, seconds, seed=7)
    tested = verified.tested()
    weight = fit_confidence(verified.features[tested], verified.accepted[tested])
    name = f"mtp.{model.net.config.num_nextn_predict_layers - 1}.confidence_head.proj.weight"
    with torch.no_grad():
        model.masters[name].copy_(weight)
    deployed(model)
    log.write(stage="confidence", drafts=verified.accepted.shape[0],
              mean_accepted=float(verified.accepted.sum(1).float().mean()))
