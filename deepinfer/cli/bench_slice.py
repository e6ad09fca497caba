"""`deepinfer bench rank-slice`: one rank of a large model on random weights of its true shapes, extrapolated to the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.bench import Report
from deepinfer.cli.options import Json, human_size
from deepinfer.cli.terminal import note, print_json, print_rich, table
from deepinfer.units import format_bytes

MEASURES = (
    "Measured: the engine's network and sampler on random weights and caches of the model's shapes, on this rank alone. Not "
    "measured: exchanges between ranks, and what trained weights would choose."
)


def rank_slice(
    model: Annotated[str, typer.Option(help="v41, the released shapes; or a folder or name whose config.json is taken.")] = "v41",
    backend: Annotated[str, typer.Option(help="auto, or a backend's name with an index as in cuda:0.")] = "auto",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the slice; from one of each kind on, the whole follows.")] = 6,
    ranks: Annotated[str, typer.Option(help="Expert-parallel sizes, of which the slice is one rank.")] = "64",
    requests: Annotated[str, typer.Option(help="Sequences of the decode steps; none: `-`.")] = "8,16,32,64,128,256",
    verify: Annotated[str, typer.Option(help="Of these, the sequences of the verify steps; default: all; none: `-`.")] = "",
    context: Annotated[int, typer.Option(parser=human_size, metavar="N", help="Tokens before each.")] = 131_072,
    prefill: Annotated[str, typer.Option(help="Tokens of the prefill steps; none: `-`.")] = "4k,16k,64k",
    ops_at: Annotated[str, typer.Option(help="Sizes of which every op is timed too; none: `-`.")] = "64,4k",
    verify_ops_at: Annotated[str, typer.Option(help="Sequences of which the verify step's ops alone are.")] = "-",
    gap_steps: Annotated[int, typer.Option(min=0, help="Decode steps of the engine's own loop, for the gap between steps.")] = 64,
    seconds: Annotated[float, typer.Option(min=0, help="For each of --ranks; later steps are left out.")] = 0.0,
    memory: Annotated[bool, typer.Option("--memory", help="Print what it takes of memory; measure nothing.")] = False,
    report: Report = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the extrapolation beside the published curve into this file.")] = None,
    as_json: Json = False,
) -> int:
    """Decode, verify, draft and prefill steps of one rank's slice of the model, each op beside its floor, and the whole model."""
    from deepinfer_hal.conformance.report import check_writable
    from deepinfer_hal.registry import open_backend

    from deepinfer.bench.rank_slice import measure
    from deepinfer.bench.report import make_report, write_report
    from deepinfer.bench.slice_config import make_slice
    from deepinfer.bench.slice_workload import Workload

    config = _model_config(model)
    sizes = _sizes(requests)
    load = Workload(
        sizes, _sizes(verify) if verify else sizes, context, _sizes(prefill), _sizes(ops_at), gap_steps, seconds,
        _sizes(verify_ops_at),
    )  # fmt: skip
    load.check()
    cuts = [make_slice(config, layers, one) for one in _sizes(ranks)]
    if memory:
        return _print_memory(cuts, load, *open_backend(backend))
    if report is not None:
        check_writable(report)
    if plot is not None:
        from deepinfer.bench.slice_plot import check_plot

        check_plot()
    device, index = open_backend(backend)
    results = []
    for cut in cuts:
        note(f"EP{cut.ranks}: layers {', '.join(map(str, cut.layers))} ({', '.join(cut.kinds)})")
        results.append(measure(device, index, cut, load, note))
    settings = {"model": model, "backend": backend, "layers": layers, "ranks": ranks, "requests": requests, "context": context}
    document = make_report("rank-slice", settings, {"measures": MEASURES, "slices": results})
    if report is not None:
        write_report(report, document)
    if plot is not None:
        from deepinfer.bench.slice_plot import plot as draw

        draw(plot, results)
    if as_json:
        print_json(document)
    else:
        for result in results:
            print_slice(result)
    return 1 if any("error" in step for result in results for step in result["steps"]) else 0


def _print_memory(cuts: list[Any], load: Any, device: Any, index: int) -> int:
    """What each slice takes beside what the device has; 1 if one does not fit."""
    from deepinfer.bench.slice_memory import plan_memory

    free = device.memory_info(index).free_bytes
    plans = [plan_memory(cut, load, device, index) for cut in cuts]
    for cut, plan in zip(cuts, plans, strict=True):
        print(f"EP{cut.ranks}, {len(cut.layers)} layers: {format_bytes(plan.total)} ({plan})")
    print(f"{device.name}:{index} has {format_bytes(free)} free" if free else f"{device.name}:{index} does not tell its memory")
    return 1 if free and any(plan.total > free for plan in plans) else 0


def _model_config(name: str) -> Any:
    from deepinfer.bench.v41 import released_config
    from deepinfer.model_config import ModelConfig
    from deepinfer.model_path import resolve_model

    return ModelConfig.from_dict(released_config()) if name == "v41" else ModelConfig.from_folder(resolve_model(name))


def _sizes(text: str) -> tuple[int, ...]:
    """`8,4k` as numbers; `-` as none."""
    return () if text.strip() == "-" else tuple(human_size(one) for one in text.split(","))


def print_slice(result: dict[str, Any]) -> None:
    """Tables for people: steps, the whole model with its terms, ops."""
    from deepinfer.bench.phases import describe
    from deepinfer.bench.slice_tables import phase_totals

    print(f"\nEP{result['ranks']}: {result['experts']} experts, layers {result['layers']} on {result['device']}")
    print(MEASURES)
    print_rich(_steps_table(result))
    for one in result["whole_model"]:
        print(_arithmetic(one))
    if result["missing_kinds"]:
        print(f"no extrapolation: the slice has no layer of kind {', '.join(result['missing_kinds'])}; give more --layers")
    for gap in result["gaps"]:
        print(_gap_text(gap))
    for step in result["steps"]:
        if step.get("ops"):
            print_rich(_ops_table(step))
    print(f"the benchmark's own time: {describe(phase_totals(result))}")


def _steps_table(result: dict[str, Any]) -> Any:
    rows = table("step of the slice", "requests", "tokens each", "ms", "sum of parts", "draft ms", "captured")
    for step in result["steps"]:
        name = step["kind"], str(step["requests"]), str(step["tokens"])
        if "error" in step:
            rows.add_row(*name, "failed", "", "", step["error"][:60])
            continue
        parts = {part: timing["median"] for part, timing in step["parts"].items()}
        draft = parts.pop("draft", None)
        rows.add_row(
            *name, f"{1e3 * step['whole']['median']:.3f}", f"{1e3 * sum(parts.values()):.3f}",
            "" if draft is None else f"{1e3 * draft:.3f}", "yes" if step["whole"]["graph"] else step["eager_because"][:60],
        )  # fmt: skip
    return rows


def _arithmetic(one: dict[str, Any]) -> str:
    """The whole model's step with its summands, in a line."""
    terms = " + ".join(f"{term['count']:g} x {1e6 * term['seconds']:.1f} us {term['name']}" for term in one["terms"])
    size = f"{one['requests']} requests" if "prefill" not in one["kind"] else f"{one['tokens']} tokens"
    speed = f"{one['tokens_per_second']:.0f} tokens/s"
    if one["published_scaled"]:
        there = " and ".join(f"{value:.0f} {how.replace('_', ' ')}" for how, value in one["published_scaled"].items())
        speed += f" (published figure scaled: {there})"
    return f"whole model, {one['kind']} {size}: {terms} = {1e3 * one['seconds']:.3f} ms, {speed}"


def _gap_text(gap: dict[str, Any]) -> str:
    """The engine loop's step beside the device's work."""
    if "error" in gap:
        return f"engine loop, {gap['requests']} requests: failed: {gap['error']}"
    text = f"engine loop, {gap['requests']} requests: {1e3 * gap['step_seconds']:.3f} ms a step of the slice"
    if gap["between_seconds"] is not None:
        share, largest = 100 * gap["between_share"], 1e6 * gap["between_largest"]
        text += f", {1e6 * gap['between_seconds']:.1f} us idle between steps ({share:.2f} %; largest {largest:.1f} us)"
    if gap["device_seconds"] is None:
        return f"{text}; steps are eager, so the device's share is not told"
    idle = f"{1e6 * gap['gap_seconds']:.1f} us more than the device's work alone ({100 * gap['idle_share']:.2f} %)"
    return f"{text}, {idle}; {gap['graphs']} graphs"


def _ops_table(step: dict[str, Any]) -> Any:
    size = f"{step['kind']} {step['requests']} x {step['tokens']}, whole model"
    rows = table(size, "role or kind", "us", "share", "floor us", "of floor", "bytes of the slice")
    for op in step["ops"][:24]:
        rows.add_row(
            op["op"], op["role"], f"{1e6 * op['seconds']:.1f}", f"{100 * op['share']:.1f} %", f"{1e6 * op['floor_seconds']:.1f}",
            f"{op['floor_seconds'] / op['seconds']:.2f}" if op["seconds"] else "", format_bytes(op["bytes"]),
        )  # fmt: skip
    return rows
