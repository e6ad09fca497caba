"""`deepinfer bench latency | throughput | host`: prints a summary, and stores a report on request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.options import EngineOptions, Json, human_count
from deepinfer.cli.terminal import print_json, print_rich, table
from deepinfer.units import format_bytes, format_count

Report = Annotated[Path | None, typer.Option(help="Store the whole result as JSON in this file.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs; the median is reported, with min and max.")]
Warmup = Annotated[int, typer.Option(min=0, help="Runs before the timed ones.")]


def _tokens(help: str) -> Any:
    return typer.Option(parser=human_count, metavar="N", help=help)


def throughput(
    engine: EngineOptions,
    num_prompts: Annotated[int, _tokens("Prompts, submitted at once.")] = 64,
    input_len: Annotated[int, _tokens("Tokens of each prompt.")] = 128,
    output_len: Annotated[int, _tokens("Tokens generated for each prompt.")] = 128,
    repeats: Repeats = 3,
    warmup: Warmup = 1,
    report: Report = None,
    as_json: Json = False,
) -> int:
    """Tokens per second of many prompts together, with each step's time beside the floor from the op cards."""
    return _generation("throughput", engine, (num_prompts, input_len, output_len), repeats, warmup, report, as_json)


def latency(
    engine: EngineOptions,
    input_len: Annotated[int, _tokens("Tokens of the prompt.")] = 128,
    output_len: Annotated[int, _tokens("Tokens generated.")] = 128,
    repeats: Repeats = 5,
    warmup: Warmup = 1,
    report: Report = None,
    as_json: Json = False,
) -> int:
    """Time to the first token and per token of one prompt alone, with each step's time beside the floor."""
    return _generation("latency", engine, (1, input_len, output_len), repeats, warmup, report, as_json)


def host(
    model: Annotated[str, typer.Option(help="Its tokenizer turns tokens into text, as in real use.")] = "nano",
    backend: Annotated[str, typer.Option(help="Its kernels are called on no rows.")] = "auto",
    num_seqs: Annotated[int, _tokens("Sequences that decode together.")] = 64,
    steps: Annotated[int, _tokens("Steps timed.")] = 500,
    report: Report = None,
    as_json: Json = False,
) -> int:
    """What the host itself costs: plan and settle of a step with a runner that does nothing, and the call of a bound op."""
    from deepinfer.bench.host import measure_host

    result = measure_host(model, backend, num_seqs, steps)
    settings = {"model": model, "backend": backend}
    return _finish("host", settings, result, report, as_json, print_host)


def _generation(
    kind: str, engine: EngineOptions, shape: tuple[int, int, int], repeats: int, warmup: int, report: Path | None, as_json: bool
) -> int:
    from deepinfer.bench.generation import Workload, measure
    from deepinfer.config import EngineConfig

    workload = Workload(*shape)
    settings = engine.settings()
    settings.setdefault("max_model_len", workload.input_len + workload.output_len)
    config = EngineConfig.create(**settings)
    result = measure(config, workload, repeats, warmup)
    return _finish(kind, settings, result, report, as_json, print_generation)


def _finish(kind: str, settings: dict[str, Any], result: dict[str, Any], path: Path | None, as_json: bool, show: Any) -> int:
    from deepinfer.bench.report import make_report, write_report

    document = make_report(kind, settings, result)
    if path is not None:
        write_report(path, document)
    if as_json:
        print_json(document)
    else:
        show(result)
    return 0


def print_generation(result: dict[str, Any]) -> None:
    """The summary of `throughput` and `latency`."""
    load, ceilings = result["workload"], result["ceilings"]
    rows = table(f"{load['num_prompts']} x {load['input_len']} + {load['output_len']} tokens on {result['device']}", "")
    speed = result["output_tokens_per_second"]
    rows.add_row("output tokens/s", _spread(speed, ".1f"))
    first = result["first_token_ms"]
    rows.add_row("prompts done after", _spread(first, ".1f", " ms"))
    for name, key in (("decode step", "decode_step"), ("prefill step", "prefill_step")):
        if result[key]:
            rows.add_row(name, _step_text(result[key]))
    rows.add_row("bandwidth", f"{ceilings['bandwidth'] / 1e9:.1f} GB/s, copying {format_bytes(ceilings['copy_bytes'])}")
    products = [f"{value / 1e9:.0f} GFLOP/s {name}" for name, value in ceilings["gemm_flops"].items()]
    rows.add_row("arithmetic", ", ".join(products))
    rows.add_row("served by references", ", ".join(sorted(result["reference_fallbacks"])) or "nothing")
    print_rich(rows)
    print_rich(_memory_table(result["memory"]))
    print_rich(_ops_table(result["ops"]))


def _step_text(step: dict[str, Any]) -> str:
    floor = f"floor {step['floor_ms']:.2f} ms, {step['times_floor']:.1f} times the floor"
    return f"{_spread(step['ms'], '.2f', ' ms')}, {step['rows']:.0f} rows; {floor}"


def _spread(values: dict[str, float], digits: str, unit: str = "") -> str:
    """`12.3 ms  (min 11.9, max 13.0)`, with a 99th percentile where there is one."""
    others = [f"{name} {values[name]:{digits}}" for name in ("min", "p99", "max") if name in values]
    return f"{values['median']:{digits}}{unit}  ({', '.join(others)})"


def _memory_table(memory: dict[str, Any]) -> Any:
    planned, tracked = memory["planned"], memory["tracked"]
    rows = table("bytes", "planned", "held")
    for pool in planned:
        rows.add_row(pool, format_bytes(planned[pool]), format_bytes(tracked[pool]))
    rows.add_row("total", format_bytes(sum(planned.values())), format_bytes(sum(tracked.values())))
    rows.add_row("peak RSS above import", "", format_bytes(memory["peak_rss_above_import"]))
    return rows


def _ops_table(ops: list[dict[str, Any]]) -> Any:
    rows = table("op, whole run", "calls", "traced ms", "floor ms", "bytes", "FLOPs")
    for op in ops[:12]:
        rows.add_row(
            op["op"], str(op["calls"]), f"{op['traced_ms']:.1f}", f"{op['floor_ms']:.1f}", format_bytes(op["bytes"]),
            format_count(op["flops"]),
        )  # fmt: skip
    return rows


def print_host(result: dict[str, Any]) -> None:
    """The summary of `host`."""
    call = result["bound_call_us"]
    rows = table(f"host, {result['num_seqs']} sequences, {result['steps']} steps", "")
    rows.add_row("plan + settle", _spread(result["plan_and_settle_ms"], ".3f", " ms"))
    if call["call"] is None:
        rows.add_row("bound call", "this backend has no kernel to call")
    else:
        rows.add_row("bound call", f"{_spread(call['call'], '.2f', ' us')} on no rows; slowest {call['slowest_op']}")
        rows.add_row("binding adds", f"{_spread(call['added'], '.2f', ' us')} to the kernel's callable, {call['ops']} ops")
    print_rich(rows)
