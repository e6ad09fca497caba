"""Writes agreement.json beside a checkpoint: the fixed prompts and the tolerance by which two backends agree on it.

`python tools/nano/agreement.py [--model DIR]`. Backends are compared teacher-forced along the CPU's greedy tokens: 64
after each of 8 prompts from held-out files, whose lengths lie on both sides of the window, of the top-k and of the
candidate pool. tau is twice the 99.9th percentile of |logit difference| over those positions when the embedding is off
by 2e-7: where the top-2 gap is larger, argmax must be equal.

There is a tau for each act_quant. Both are made by the reference network with canonical rows and float32 streams: BF16
streams would round such noise away. With `none` it is small, since only cached rows have bins that noise can flip; with
`fp8_32` flipped codes of activations change logits about as much as another order of summation does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hal"), str(ROOT / "backends" / "cpu"), str(Path(__file__).parent)]

import measure  # noqa: E402

from deepinfer.config import EngineConfig  # noqa: E402
from deepinfer.model.reference import Numerics, Reference  # noqa: E402
from deepinfer.runner.forced import Part, forced_step  # noqa: E402
from deepinfer.runner.runner import Runner  # noqa: E402
from deepinfer.tokenizer import Tokenizer  # noqa: E402

PROMPT_TOKENS = (24, 64, 110, 127, 180, 240, 300, 400)
NEW_TOKENS = 64
NOISE, RUNS, PERCENTILE = 2e-7, 6, 99.9


def choose_prompts(folder: Path) -> list[np.ndarray]:
    """int32 ids of one prompt from each of the first held-out files that are long enough."""
    files = measure.encode(measure.held_out_documents(), Tokenizer.from_folder(folder))
    long_enough = [file.ids for file in files if len(file.ids) > max(PROMPT_TOKENS)]
    return [ids[:length] for ids, length in zip(long_enough, PROMPT_TOKENS, strict=False)]


def greedy(folder: Path, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """Each prompt with its greedy tokens behind it, by the engine on the CPU with default numerics."""
    longest = max(PROMPT_TOKENS) + NEW_TOKENS
    config = EngineConfig.create(
        model=str(folder), backend="cpu", max_model_len=longest, max_num_seqs=len(prompts), num_blocks=8 * len(prompts)
    )
    runner, texts, done = Runner.from_config(config), list(prompts), [0] * len(prompts)
    tables = np.arange(8 * len(prompts), dtype=np.int32).reshape(len(prompts), 8)
    for _ in range(NEW_TOKENS):
        parts = [Part(i, tables[i], done[i], ids[done[i] :]) for i, ids in enumerate(texts)]
        done = [len(ids) for ids in texts]
        rows = np.cumsum([len(part.ids) for part in parts]) - 1
        tokens = forced_step(runner, parts).logits(rows).argmax(-1).numpy().astype(np.int32)
        texts = [np.append(ids, token) for ids, token in zip(texts, tokens, strict=True)]
    return texts


@torch.no_grad()
def logits_of(net: Reference, texts: list[np.ndarray]) -> torch.Tensor:
    """float32 [8 * 64, V]: predictions of the greedy tokens."""
    inputs = [torch.from_numpy(ids[:-1].astype(np.int64))[None] for ids in texts]
    return torch.cat([net.forward(ids, taps={}, wanted=set())[0, -NEW_TOKENS:] for ids in inputs])


def tolerance(folder: Path, texts: list[np.ndarray], act_quant: str) -> tuple[float, float]:
    """tau, and the share of positions whose top-2 gap exceeds it."""
    net = Reference.from_folder(folder, Numerics(act_quant, "canonical", torch.float32))
    plain, stored, differences = logits_of(net, texts), net.weights, []
    embedding = stored["embed.weight"]
    for run in range(RUNS):
        noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(run))
        net.weights = {**stored, "embed.weight": embedding * (1 + NOISE * noise)}
        differences.append((logits_of(net, texts) - plain).abs().flatten())
    tau, best = 2 * float(np.percentile(torch.cat(differences).numpy(), PERCENTILE)), plain.topk(2).values
    return tau, float((best[:, 0] - best[:, 1] > tau).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "deepinfer" / "models" / "nano")
    folder = parser.parse_args().model
    prompts = choose_prompts(folder)
    texts = greedy(folder, prompts)
    found = {act_quant: tolerance(folder, texts, act_quant) for act_quant in ("none", "fp8_32")}
    document = {
        "tau": {act_quant: tau for act_quant, (tau, _) in found.items()},
        "positions_above_tau": {act_quant: share for act_quant, (_, share) in found.items()},
        "noise": NOISE, "runs": RUNS, "percentile": PERCENTILE,
        "prompts": [ids.tolist() for ids in prompts],
        "greedy": [ids[len(prompt) :].tolist() for ids, prompt in zip(texts, prompts, strict=True)],
    }  # fmt: skip
    (folder / "agreement.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    for act_quant, (tau, share) in found.items():
        print(f"act_quant {act_quant}: tau {tau:.3e}, the top-2 gap exceeds it at {share:.1%} of the positions")


if __name__ == "__main__":
    main()
