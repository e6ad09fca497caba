"""Lets the tests run from a checkout that is not installed: the parts' folders go on the import path."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent
for part in (".", "hal", "backends/cpu", "backends/triton", "backends/ascend", "backends/cuda"):
    folder = str((ROOT / part).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
