"""A plot of a rank slice's extrapolation beside the published curve, scaled by bandwidth and by compute (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer.bench import extrapolate as ex
from deepinfer.errors import ConfigError

_CURVES = (
    ("published, SM100", 1.0, "-"),
    ("scaled by bandwidth", ex.BY_BANDWIDTH, "--"),
    ("scaled by compute", ex.BY_COMPUTE, ":"),
)


def check_plot() -> None:
    """ConfigError where there is no matplotlib, told before what is to be drawn is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plot", f"needs matplotlib ({error}): pip install deepinfer[plot]") from None


def plot(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Draws decode and prefill of some results (one per expert-parallel size). ConfigError without matplotlib."""
    check_plot()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (decode, prefill) = pyplot.subplots(1, 2, figsize=(12, 5))
    for axes, published in ((decode, ex.PUBLISHED_DECODE), (prefill, ex.PUBLISHED_PREFILL)):
        for label, factor, style in _CURVES:
            axes.plot(*zip(*ex.scaled(published, factor), strict=True), style, color="grey", marker="o", label=label)
    for result in results:
        for kind, axes, key, label in (
            ("decode", decode, "requests", "no drafts"), ("verify", decode, "requests", "3 drafts, 75 % accepted"),
            ("prefill", prefill, "tokens", "all layers"), ("replayed prefill", prefill, "tokens", "layers that a replay runs"),
        ):  # fmt: skip
            points = sorted((one[key], one["tokens_per_second"]) for one in result["whole_model"] if one["kind"] == kind)
            if points:
                axes.plot(*zip(*points, strict=True), marker="x", label=f"EP{result['ranks']}, {label}")
    for axes, size in ((decode, "requests a rank"), (prefill, "tokens a step")):
        axes.set(xscale="log", yscale="log", xlabel=size, ylabel="tokens per second and rank, extrapolated")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("One rank's slice, exchanges between ranks not counted")
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError("plot", f"{path} cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
