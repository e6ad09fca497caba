"""Estimates of AscendC kernels at V4.1's shapes: estimate.py --op sparse_attention --shape decode. See --help."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "hal"), str(ROOT / "backends/ascend")]

from deepinfer_ascend.estimate.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
