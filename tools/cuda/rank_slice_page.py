"""The tables and the plot of docs/nvidia-rank-slice.md from stored reports of `deepinfer bench rank-slice`.

    python tools/cuda/rank_slice_page.py reports/h200/rank-slice*.json [--plot docs/rank-slice-h200.png] [--ops N]

Prints Markdown. What a later report measured of the same expert-parallel size stands in the place of an earlier one's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer.bench.slice_tables import loops_table, ops_tables, phases_table, read_slices, steps_table
from deepinfer.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--ops", type=int, default=12, help="ops of a step that are listed")
    arguments = parser.parse_args()
    try:
        results = read_slices(arguments.reports)
        if arguments.plot is not None:
            from deepinfer.bench.slice_plot import plot

            plot(arguments.plot, results)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(steps_table(results))
    print(loops_table(results))
    for title, table in ops_tables(results, arguments.ops):
        print(f"{title}:\n\n{table}")
    print(phases_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
