"""Measures a nano checkpoint through the engine: bits per byte of held-out files beside `xz -9e`, drafts, confidence.

`python tools/nano/measure.py` prints what the model card promises, with default numerics, from the packaged checkpoint.
Each file starts from the begin token and all its bytes count. After every step of a file the draft block proposes five
tokens, which the engine verifies by running them; then the text goes on from where it was. `--drafts` sets how many
places, at multiples of four tokens and evenly spread; `--all` takes every fourth token of every file.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import lzma
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hal"), str(ROOT / "backends" / "cpu"), str(Path(__file__).parent)]

import corpus  # noqa: E402
from drafts import area_under_curve, calibration_error  # noqa: E402

from deepinfer.config import EngineConfig  # noqa: E402
from deepinfer.model.state import BLOCK_TOKENS  # noqa: E402
from deepinfer.runner.forced import Part, forced_step  # noqa: E402
from deepinfer.runner.runner import Runner  # noqa: E402
from deepinfer.tokenizer import Tokenizer  # noqa: E402

STEP_TOKENS = 2048
PARALLEL = 32
ANCHOR_EVERY = 4


@dataclasses.dataclass
class File:
    """A held-out file. ids int32 [T]: begin token, then the text; done: tokens that ran; slot, blocks: its state."""

    path: str
    size_bytes: int
    ids: np.ndarray
    done: int = 0
    nats: float = 0.0
    slot: int = -1
    blocks: np.ndarray | None = None

    def part(self, tokens: int) -> Part:
        return Part(self.slot, self.blocks, self.done, self.ids[self.done : self.done + tokens])


@dataclasses.dataclass
class Drafts:
    """Verified blocks, one row each. accepted bool [n, b]: this draft and all before it are the target's greedy choices
    along the drafted text; text_accepted: the same against the file; confidence float [n, b]: probabilities."""

    accepted: list[np.ndarray] = dataclasses.field(default_factory=list)
    text_accepted: list[np.ndarray] = dataclasses.field(default_factory=list)
    confidence: list[np.ndarray] = dataclasses.field(default_factory=list)

    def report(self) -> dict:
        """Mean accepted, acceptance of each place given earlier ones, and how well confidence foretells it."""
        accepted, text, confidence = (np.concatenate(a) for a in (self.accepted, self.text_accepted, self.confidence))
        tested = np.concatenate((np.ones_like(accepted[:, :1]), accepted[:, :-1]), 1)
        probability, outcome = torch.from_numpy(confidence[tested]), torch.from_numpy(accepted[tested])
        given = [float(a[t].mean()) if t.any() else None for a, t in zip(accepted.T, tested.T, strict=True)]
        return {
            "drafts": len(accepted),
            "mean_accepted": float(accepted.sum(1).mean()),
            "mean_accepted_against_text": float(text.sum(1).mean()),
            "accepted_given_earlier": given,
            "confidence_ece_15_bins": calibration_error(probability, outcome),
            "confidence_auc": area_under_curve(probability, outcome),
        }


def held_out_documents(paths: Sequence[str] | None = None) -> list[corpus.Document]:
    """The held-out documents from this Python's standard library, each sha256 checked. Raises corpus.CorpusError."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documents = corpus.load_split("heldout", stdlib, [Path(sysconfig.get_paths()["purelib"])])
    return [d for d in documents if paths is None or d.path in paths]


def encode(documents: Sequence[corpus.Document], tokenizer: Tokenizer) -> list[File]:
    """Token ids of each document; its bytes are those that the tokens decode to, which must be the file's own."""
    files = []
    for document in documents:
        ids = tokenizer.encode(document.data.decode("utf-8"))
        if b"".join(tokenizer.bytes_of(i) for i in ids[1:]) != document.data:
            raise corpus.CorpusError(f"the tokens of {document.path} do not decode to its bytes")
        files.append(File(document.path, len(document.data), np.array(ids, np.int32)))
    return files


def xz_bits_per_byte(documents: Sequence[corpus.Document]) -> float:
    """`xz -9e` of the documents end to end, in the order of the manifest."""
    text = b"".join(d.data for d in documents)
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def open_runner(model: str, files: Sequence[File], threads: int | None, **settings) -> Runner:
    """An engine large enough for PARALLEL of the files at a time."""
    blocks = sorted((blocks_of(file) for file in files), reverse=True)[:PARALLEL]
    config = EngineConfig.create(
        model=model, backend="cpu", max_model_len=BLOCK_TOKENS * blocks[0], num_blocks=sum(blocks),
        max_num_seqs=PARALLEL, max_num_batched_tokens=STEP_TOKENS, threads=threads, **settings,
    )  # fmt: skip
    return Runner.from_config(config, with_draft=True)


def blocks_of(file: File) -> int:
    """Paged blocks of a file, with room for drafts behind its end."""
    return -(-(len(file.ids) + 8) // BLOCK_TOKENS)


def measure(
    runner: Runner, files: list[File], drafts: int, progress: Callable[[int], None] = lambda tokens: None
) -> Drafts:
    """Runs the files, adds up their nats, and drafts about so many times (0: never); progress gets tokens done."""
    total = sum(len(file.ids) for file in files)
    stride = STEP_TOKENS // min(PARALLEL, len(files))
    if drafts:
        stride = min(stride, max(total // drafts // ANCHOR_EVERY, 1) * ANCHOR_EVERY)
    found = Drafts()
    for active in in_parallel(runner, files):
        parts = [file.part(stride) for file in active]
        score(parts, active, forced_step(runner, parts).logits())
        for file, part in zip(active, parts, strict=True):
            file.done += len(part.ids)
        if drafts:
            draft_and_verify(runner, active, stride, found)
        progress(sum(len(part.ids) for part in parts))
    return found


def in_parallel(runner: Runner, files: Sequence[File]) -> Iterator[list[File]]:
    """Yields the files that are open until all are done, the longest opened first; an open one has slot and blocks."""
    waiting = sorted(files, key=lambda file: len(file.ids))
    slots, free, active = list(range(runner.num_slots)), list(range(runner.num_blocks)), []
    while waiting or active:
        while waiting and slots and blocks_of(waiting[-1]) <= len(free):
            file = waiting.pop()
            file.slot, file.blocks = slots.pop(), np.array([free.pop() for _ in range(blocks_of(file))], np.int32)
            active.append(file)
        yield active
        for file in [file for file in active if file.done == len(file.ids)]:
            slots.append(file.slot)
            free.extend(file.blocks.tolist())
            active.remove(file)


def score(parts: Sequence[Part], files: Sequence[File], logits: torch.Tensor) -> None:
    """Adds each next token's nats. logits float32 [rows of all parts, V]."""
    targets = np.full(len(logits), -100, np.int64)
    ends = np.cumsum([len(part.ids) for part in parts])
    for part, file, end in zip(parts, files, ends, strict=True):
        known = file.ids[part.start + 1 : part.start + len(part.ids) + 1]
        targets[end - len(part.ids) :][: len(known)] = known
    losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets), reduction="none").double()
    for file, nats in zip(files, np.add.reduceat(losses.numpy(), np.concatenate(([0], ends[:-1]))), strict=True):
        file.nats += float(nats)


def draft_and_verify(runner: Runner, files: Sequence[File], stride: int, found: Drafts) -> None:
    """One block after the last token of each file that has room for it, run by the target and then forgotten."""
    size = runner.text.dspark_block_size
    ready = [file for file in files if file.done % stride == 0 and file.done + size < len(file.ids)]
    if not ready:
        return
    gold = np.array([file.ids[file.done] for file in ready], np.int32)
    slots, anchors = np.array([f.slot for f in ready], np.int32), np.array([f.done - 1 for f in ready], np.int32)
    draft = runner.network.draft(runner.upload(slots), runner.upload(anchors), runner.upload(gold))
    tokens, confidence = draft.tokens.cpu().numpy().copy(), draft.confidence.cpu().numpy().copy()
    parts = [
        Part(file.slot, file.blocks, file.done, np.concatenate(([first], row)).astype(np.int32))
        for file, first, row in zip(ready, gold, tokens, strict=True)
    ]
    greedy = forced_step(runner, parts).logits().argmax(-1).view(len(ready), size + 1)[:, :size].numpy()
    text = np.stack([file.ids[file.done + 1 : file.done + 1 + size] for file in ready])
    found.accepted.append(np.logical_and.accumulate(tokens == greedy, 1))
    found.text_accepted.append(np.logical_and.accumulate(tokens == text, 1))
    found.confidence.append(confidence)


def quality(files: Sequence[File], documents: Sequence[corpus.Document], drafts: Drafts) -> dict:
    """The report of files that were measured."""
    size, xz = sum(file.size_bytes for file in files), xz_bits_per_byte(documents)
    bits = sum(file.nats for file in files) / math.log(2) / size
    report = {
        "files": len(files), "bytes": size, "tokens": sum(len(file.ids) for file in files), "bits_per_byte": bits,
        "xz_9e_bits_per_byte": xz, "ratio": bits / xz,
    }  # fmt: skip
    return report | (drafts.report() if drafts.accepted else {})


def weights_sha256(folder: Path) -> str:
    """Of the bytes of all shards in order: which weights a report is about."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def print_report(report: dict) -> None:
    sizes = f"{report['bytes']} bytes, {report['tokens']} tokens"
    print(f"{report['files']} held-out files, {sizes}, {report['seconds']:.0f} s")
    print(f"bits per byte           {report['bits_per_byte']:.4f}")
    print(f"xz -9e, concatenated    {report['xz_9e_bits_per_byte']:.4f}")
    print(f"ratio                   {report['ratio']:.4f}   (bar: at most 0.9)")
    if "drafts" not in report:
        return
    given = ", ".join("-" if p is None else f"{p:.3f}" for p in report["accepted_given_earlier"])
    print(f"drafts                  {report['drafts']}")
    print(f"mean accepted of 5      {report['mean_accepted']:.3f}   (bar: at least 1.5; against the text "
          f"{report['mean_accepted_against_text']:.3f})")
    print(f"accepted given earlier  {given}")
    print(f"confidence ECE          {report['confidence_ece_15_bins']:.4f}   (bar: at most 0.05)")
    print(f"confidence AUC          {report['confidence_auc']:.4f}   (bar: at least 0.70)")


def run(arguments: argparse.Namespace) -> dict:
    """Loads, measures with a progress bar on stderr, and returns the report."""
    from rich.console import Console
    from rich.progress import Progress

    documents = held_out_documents()[: arguments.files]
    folder = Path(arguments.model)
    files = encode(documents, Tokenizer.from_folder(folder))
    runner = open_runner(str(folder), files, arguments.threads)
    total, started = sum(len(file.ids) for file in files), time.monotonic()
    drafts = -(-total // ANCHOR_EVERY) if arguments.all else arguments.drafts
    with Progress(console=Console(file=sys.stderr)) as bar:
        task = bar.add_task("tokens", total=total)
        found = measure(runner, files, drafts, lambda tokens: bar.advance(task, tokens))
    report = quality(files, documents, found) | {"seconds": time.monotonic() - started}
    about = {"model": folder.name, "weights_sha256": weights_sha256(folder), "numerics": "default"}
    return about | {"threads": torch.get_num_threads(), **report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "deepinfer" / "models" / "nano"), help="folder of the checkpoint")
    parser.add_argument("--drafts", type=int, default=6000, help="about so many drafts (0: none)")
    parser.add_argument("--all", action="store_true", help="draft at every fourth position of every file")
    parser.add_argument("--files", type=int, help="only so many files")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", nargs="?", const=str(ROOT / "reports" / "nano-quality.json"), metavar="FILE",
                        help="also write the report (by default to reports/nano-quality.json)")
    arguments = parser.parse_args()
    try:
        report = run(arguments)
    except corpus.CorpusError as error:
        raise SystemExit(f"error: {error}") from None
    print_report(report)
    if arguments.json:
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
