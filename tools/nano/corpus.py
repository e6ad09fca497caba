"""The text nano is trained on: which files, from which packages, in which split.

`python tools/nano/corpus.py choose --site SITE --wheels DIR` wrote `manifest.json.gz` once, before any training;
`load_split` reads a split back from anybody's copy of the same packages and checks every file's sha256.
A held-out (or calibration) file shares at most 20 % of its distinct 64-byte shingles, taken at every offset, with
all training text together; near duplicates of it were dropped from training, not the other way round.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import sysconfig
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MANIFEST = Path(__file__).with_name("manifest.json.gz")
SHINGLE_BYTES = 64
MAX_SHARED = 0.20
HELDOUT_BYTES = 1_150_000
CALIBRATION_BYTES = 1_500_000
SEED = 20411

STDLIB = "cpython-stdlib==3.11.7"
# Source -> (licence, package folders inside it). Everything here may be copied and trained on; "stdlib" is the
# running interpreter's library, the others are wheels at a pinned version.
SOURCES = {
    STDLIB: ("PSF-2.0", ["."]),
    "torch==2.13.0": ("BSD-3-Clause", ["torch", "torchgen"]),
    "sympy==1.14.0": ("BSD-3-Clause", ["sympy"]),
    "networkx==3.6.1": ("BSD-3-Clause", ["networkx"]),
    "numpy==2.4.6": ("BSD-3-Clause", ["numpy"]),
    "mpmath==1.3.0": ("BSD-3-Clause", ["mpmath"]),
    "pygments==2.21.0": ("BSD-2-Clause", ["pygments"]),
    "setuptools==84.2.1": ("MIT", ["setuptools", "pkg_resources"]),
    "huggingface_hub==2.4.0": ("Apache-2.0", ["huggingface_hub"]),
    "pydantic==2.14.4": ("MIT", ["pydantic"]),
    "rich==15.0.0": ("MIT", ["rich"]),
    "jinja2==3.1.6": ("BSD-3-Clause", ["jinja2"]),
    "pip==23.2.1": ("MIT", ["pip"]),
    "typer==0.29.2": ("MIT", ["typer"]),
    "click==8.5.1": ("BSD-3-Clause", ["click"]),
    "filelock==4.3.1": ("MIT", ["filelock"]),
    "fsspec==2026.9.0": ("BSD-3-Clause", ["fsspec"]),
    "pytest==9.2.0": ("MIT", ["_pytest"]),
    "httpx2==2.16.2": ("BSD-3-Clause", ["httpx2"]),
    "twisted==26.10.0": ("MIT", ["twisted"]),
    "django==5.2.19": ("BSD-3-Clause", ["django"]),
    "sqlalchemy==2.1.9": ("MIT", ["sqlalchemy"]),
}
SKIP_PARTS = ("site-packages", "__pycache__", "torch/testing/_internal", "pygments/lexers/_", "pip/_vendor/chardet",
              "sympy/parsing/autolev", "sympy/physics/quantum/tests")


@dataclass(frozen=True)
class Document:
    """One file of the corpus: where it comes from and its bytes (UTF-8)."""

    source: str
    path: str
    data: bytes


class CorpusError(Exception):
    """A file of the manifest is missing or differs; names the package that has it."""


def source_files(source: str, stdlib: Path, sites: list[Path], wheels: Path | None) -> dict[str, bytes]:
    """Path -> bytes of every Python file of one source, from a folder of installed packages or from its wheel."""
    folders = SOURCES[source][1]
    name, version = source.split("==")
    roots = [stdlib] if source == STDLIB else sites
    found: dict[str, bytes] = {}
    for root in roots:
        if source != STDLIB and not list(root.glob(f"{name}-{version}*.dist-info")):
            continue
        for folder in folders:
            for path in sorted((root / folder).rglob("*.py")):
                found[path.relative_to(root).as_posix()] = path.read_bytes()
    if not found and wheels is not None:
        for wheel in sorted(wheels.glob(f"{name}-{version}-*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(archive.namelist()):
                    if member.endswith(".py") and member.split("/")[0] in folders:
                        found[member] = archive.read(member)
    return found


def shingles(data: bytes) -> np.ndarray:
    """Sorted distinct 64-bit hashes of all 64-byte windows of `data` (none if it is shorter)."""
    h = np.frombuffer(data, np.uint8).astype(np.uint64) + np.uint64(1)
    factor, width = 0x9E3779B97F4A7C15, 1
    with np.errstate(over="ignore"):
        while width < SHINGLE_BYTES:
            if h.size <= width:
                return np.zeros(0, np.uint64)
            h = h[:-width] * np.uint64(factor) + h[width:]
            factor, width = factor * factor % 2**64, width * 2
    return np.unique(h)


class ShingleSet:
    """Counts which of a fixed set of shingles occur in a text; a bitmap in front keeps misses cheap."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = np.unique(hashes)
        self.bitmap = np.zeros(1 << 24, bool)
        self.bitmap[self.hashes >> np.uint64(40)] = True

    def found_in(self, data: bytes) -> np.ndarray:
        """Indices into `hashes` of the shingles that `data` contains."""
        h = shingles(data)
        h = h[self.bitmap[h >> np.uint64(40)]]
        at = np.searchsorted(self.hashes, h)
        at[at == self.hashes.size] = 0
        return at[self.hashes[at] == h]


def is_prose_like(data: bytes) -> bool:
    """Drops tables, generated files and other text that teaches nothing about code."""
    if not 200 <= len(data) <= 320_000:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    ratio = len(zlib.compress(data, 6)) / len(data)
    digits = sum(data.count(c) for c in b"0123456789") / len(data)
    return 0.10 < ratio < 0.62 and digits < 0.12


def choose(stdlib: Path, sites: list[Path], wheels: Path | None) -> dict:
    """The manifest: draws held-out and calibration files at random, then clears their near duplicates away."""
    documents, seen = [], set()
    for source in SOURCES:
        files = source_files(source, stdlib, sites, wheels)
        if not files:
            raise CorpusError(f"{source} is neither installed under --site nor a wheel in --wheels")
        for path, data in files.items():
            digest = hashlib.sha256(data).hexdigest()
            if any(part in path for part in SKIP_PARTS) or digest in seen or not is_prose_like(data):
                continue
            seen.add(digest)
            documents.append(Document(source, path, data))
    rng = random.Random(SEED)
    pool = [i for i, d in enumerate(documents) if d.source == STDLIB and 2_000 <= len(d.data) <= 60_000]
    rng.shuffle(pool)
    candidates, size = [], 0
    while size < 2.2 * (HELDOUT_BYTES + CALIBRATION_BYTES):
        candidates.append(pool.pop())
        size += len(documents[candidates[-1]].data)
    per_file = {i: shingles(documents[i].data) for i in candidates}
    index = ShingleSet(np.concatenate(list(per_file.values())))
    members = {i: np.searchsorted(index.hashes, h) for i, h in per_file.items()}
    splits, dropped = assign(documents, candidates, index, members)
    rows = [{"source": d.source, "path": d.path, "bytes": len(d.data), "split": splits[i],
             "sha256": hashlib.sha256(d.data).hexdigest()}
            for i, d in enumerate(documents) if i in splits]
    licences = {source: licence for source, (licence, _) in SOURCES.items()}
    return {"seed": SEED, "licences": licences, "dropped_near_duplicates": dropped, "files": rows}


def assign(documents, candidates, index, members) -> tuple[dict[int, str], list[str]]:
    """Split of each kept document. A training file that holds 8 % of a candidate by itself is a near duplicate."""
    hits = {i: index.found_in(d.data) for i, d in enumerate(documents) if i not in members}
    own = {i: set(m.tolist()) for i, m in members.items()}
    splits: dict[int, str] = {}
    taken, dropped, totals = [], set(), {"heldout": 0, "calibration": 0}
    limits = {"heldout": HELDOUT_BYTES, "calibration": CALIBRATION_BYTES}
    for i in candidates:
        split = "heldout" if totals["heldout"] < HELDOUT_BYTES - 30_000 else "calibration"
        if totals[split] + len(documents[i].data) > limits[split]:
            continue
        mine, mask = members[i], np.zeros(index.hashes.size, bool)
        mask[mine] = True
        near = {j for j, h in hits.items() if h.size and mask[h].sum() > 0.08 * mine.size}
        rest = np.zeros(index.hashes.size, bool)
        for j, h in hits.items():
            if j not in near:
                rest[h] = True
        for j in candidates:
            if j != i:
                rest[members[j]] = True
        if len(near) > 3 or rest[mine].sum() > 0.9 * MAX_SHARED * mine.size or not own[i]:
            continue
        taken.append(i)
        dropped |= near
        splits[i] = split
        totals[split] += len(documents[i].data)
    for i in range(len(documents)):
        if i not in splits and i not in dropped:
            splits[i] = "train"
    return splits, sorted(f"{documents[j].source} {documents[j].path}" for j in dropped)


def load_manifest(path: Path = MANIFEST) -> dict:
    """The manifest as a dict with keys seed, licences, dropped_near_duplicates and files."""
    return json.loads(gzip.decompress(path.read_bytes()))


def load_split(split: str, stdlib: Path, sites: list[Path], wheels: Path | None = None,
               sources: set[str] | None = None) -> list[Document]:
    """The documents of one split ("train", "calibration", "heldout"), of some sources or all, every sha256 checked.

    Raises CorpusError naming the package whose files are missing or differ.
    """
    manifest = load_manifest()
    wanted = [row for row in manifest["files"]
              if row["split"] == split and (sources is None or row["source"] in sources)]
    cache: dict[str, dict[str, bytes]] = {}
    documents = []
    for row in wanted:
        source = row["source"]
        if source not in cache:
            cache[source] = source_files(source, stdlib, sites, wheels)
        data = cache[source].get(row["path"])
        if data is None:
            raise CorpusError(f"{row['path']} of {source} is not there; install {source} or give its wheel")
        if hashlib.sha256(data).hexdigest() != row["sha256"]:
            raise CorpusError(f"{row['path']} differs from {source}'s; sha256 {row['sha256']} is needed")
        documents.append(Document(source, row["path"], data))
    return documents


def overlap_report(stdlib: Path, sites: list[Path], wheels: Path | None) -> dict[str, float]:
    """Largest share of a held-out (calibration) file's shingles found in training, and in the other split."""
    splits = {s: load_split(s, stdlib, sites, wheels) for s in ("train", "calibration", "heldout")}
    report = {}
    for target, others in (("heldout", "train"), ("heldout", "calibration"), ("calibration", "train")):
        own = [shingles(d.data) for d in splits[target]]
        index = ShingleSet(np.concatenate(own))
        mask = np.zeros(index.hashes.size, bool)
        for d in splits[others]:
            mask[index.found_in(d.data)] = True
        report[f"{target} in {others}"] = max(float(mask[np.searchsorted(index.hashes, h)].mean()) for h in own)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["choose", "check"])
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--wheels", type=Path)
    args = parser.parse_args()
    sites = args.site or [Path(sysconfig.get_paths()["purelib"])]
    if args.action == "choose":
        manifest = choose(args.stdlib, sites, args.wheels)
        MANIFEST.write_bytes(gzip.compress(json.dumps(manifest, separators=(",", ":")).encode(), 9, mtime=0))
    files = load_manifest()["files"]
    for split in ("train", "calibration", "heldout"):
        rows = [row for row in files if row["split"] == split]
        print(split, len(rows), "files", sum(row["bytes"] for row in rows), "bytes")
    print(overlap_report(args.stdlib, sites, args.wheels))


if __name__ == "__main__":
    main()
