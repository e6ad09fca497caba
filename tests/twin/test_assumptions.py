"""The page of assumptions says what the twin's table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    subprocess.run([sys.executable, str(ROOT / "tools/ascend/assumptions.py"), "--check"], check=True)
