"""From the manifest to what training reads: the tokenizer, and one compressed file of token ids a split.

`python tools/nano/prepare.py --out .nano --wheels DIR` writes tokenizer.json, tokenizer_config.json and
train/calibration/heldout `.npz` files. Each document is its bare tokens; data.py adds begin and end.
"""

from __future__ import annotations

import argparse
import io
import lzma
import random
import sysconfig
import time
from pathlib import Path

import corpus
import numpy as np
import tokenizer as nano_tokenizer

TOKENIZER_TRAINING_BYTES = 40_000_000


def tokenizer_texts(documents: list[corpus.Document]) -> list[str]:
    """A random part of the training split: the whole standard library, then others until the budget is used."""
    order = [d for d in documents if d.source == corpus.STDLIB]
    others = [d for d in documents if d.source != corpus.STDLIB]
    random.Random(corpus.SEED).shuffle(others)
    texts, size = [], 0
    for document in order + others:
        if size > TOKENIZER_TRAINING_BYTES:
            break
        texts.append(document.data.decode("utf-8"))
        size += len(document.data)
    return texts


def encode_documents(tokenizer, documents: list[corpus.Document]) -> dict[str, np.ndarray]:
    """Arrays: ids uint16 (all documents end to end), lengths int32 (tokens), bytes int32, is_stdlib bool."""
    encodings = []
    tokenizer.encode_special_tokens = True  # a file that spells a special token is still plain text
    for start in range(0, len(documents), 256):
        texts = [d.data.decode("utf-8") for d in documents[start : start + 256]]
        encodings += [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return {"ids": np.concatenate(encodings), "lengths": np.array([e.size for e in encodings], np.int32),
            "bytes": np.array([len(d.data) for d in documents], np.int32),
            "is_stdlib": np.array([d.source == corpus.STDLIB for d in documents])}


def save_split(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """One xz file of an .npz; the two bytes of an id are stored apart, which compresses better."""
    ids = arrays["ids"]
    planes = {"low": (ids & 0xFF).astype(np.uint8), "high": (ids >> 8).astype(np.uint8)}
    buffer = io.BytesIO()
    np.savez(buffer, **planes, **{k: v for k, v in arrays.items() if k != "ids"})
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=1))


def prepare_small(out: Path, most_bytes: int = 1_500_000) -> None:
    """A little of the running standard library, whatever its version: enough to see that training runs."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents, size = [], 0
    for path in sorted(root.glob("*.py")):
        data = path.read_bytes()
        if corpus.is_prose_like(data) and size < most_bytes:
            documents.append(corpus.Document(corpus.STDLIB, path.name, data))
            size += len(data)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = nano_tokenizer.train(d.data.decode("utf-8") for d in documents)
    nano_tokenizer.save(tokenizer, out)
    for split, part in (("train", documents[4:]), ("calibration", documents[:2]), ("heldout", documents[2:4])):
        save_split(out / f"{split}.npz.xz", encode_documents(tokenizer, part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--wheels", type=Path)
    args = parser.parse_args()
    sites = args.site or [Path(sysconfig.get_paths()["purelib"])]
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    splits = {s: corpus.load_split(s, args.stdlib, sites, args.wheels) for s in ("train", "calibration", "heldout")}
    tokenizer = nano_tokenizer.train(tokenizer_texts(splits["train"]))
    nano_tokenizer.save(tokenizer, args.out)
    print(f"tokenizer trained after {time.time() - started:.0f} s")
    for split, documents in splits.items():
        arrays = encode_documents(tokenizer, documents)
        save_split(args.out / f"{split}.npz.xz", arrays)
        text_bytes, tokens = int(arrays["bytes"].sum()), arrays["ids"].size
        size = (args.out / f"{split}.npz.xz").stat().st_size
        print(f"{split}: {len(documents)} files, {text_bytes} bytes, {tokens} tokens, {text_bytes / tokens:.3f} bytes "
              f"each, {size} bytes on disk, {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
