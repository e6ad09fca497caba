"""All commands of `deepinfer`, assembled. Their modules import torch only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

import deepinfer
from deepinfer.cli import (
    bench,
    bench_slice,
    chat,
    environment,
    generate,
    hal,
    hal_bench,
    hal_ladder,
    hal_new,
    hal_prove,
    hal_report,
    hal_test,
)
from deepinfer.cli.groups import add_command, new_app
from deepinfer.cli.options import Json, human_size

app = new_app("Serves DeepSeek-V4.1 models on CPUs and accelerators, over one hardware abstraction layer.")
hal_app = new_app("The hardware abstraction layer: backends, devices, kernels.")
bench_app = new_app("Measurements, each beside the floor that this machine sets.")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; works anywhere on the line.")] = False,
) -> int:
    """Prints the version, or the help when there is no command."""
    if version:
        print(f"deepinfer {deepinfer.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    return 0


def check(
    model: Annotated[str, typer.Option(help="Folder of a checkpoint, or nano.")] = "nano",
    backend: Annotated[str | None, typer.Option(help="Plan the layouts of this backend; default: those on disk.")] = None,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Ranks that experts are spread over.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(parser=human_size, metavar="N", help="Such as 4k.")] = None,
    max_num_seqs: Annotated[int, typer.Option(parser=human_size, metavar="N", help="Sequences that run together.")] = 64,
    mode: Annotated[str, typer.Option(help="Read full shards, headers or the index only: auto, full, headers, index.")] = "auto",
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Plan no graphs of steps.")] = False,
    max_prompt_graph_tokens: Annotated[
        int | None, typer.Option(parser=human_size, metavar="N", help="Rows of the largest captured step with prompts.")
    ] = None,
    as_json: Json = False,
) -> int:
    """What a checkpoint is, what it takes in bytes per rank, and everything that is wrong with it."""
    from deepinfer.cli.check import check_command

    return check_command(model, backend, ep, max_model_len, max_num_seqs, as_json, mode, enforce_eager, max_prompt_graph_tokens)


add_command(app, "generate", generate.generate)
add_command(app, "chat", chat.chat)
add_command(app, "check", check)
add_command(app, "collect-env", environment.collect_env)
add_command(hal_app, "list", hal.hal_list)
add_command(hal_app, "new", hal_new.hal_new)
add_command(hal_app, "ladder", hal_ladder.hal_ladder)
add_command(hal_app, "test", hal_test.hal_test)
add_command(hal_app, "record", hal_test.hal_record)
add_command(hal_app, "bench", hal_bench.hal_bench)
add_command(hal_app, "prove", hal_prove.hal_prove)
add_command(hal_app, "explain", hal_prove.hal_explain)
add_command(hal_app, "verify", hal_report.hal_verify)
add_command(hal_app, "diff", hal_report.hal_diff)
add_command(hal_app, "report", hal_report.hal_report)
add_command(hal_app, "table", hal_report.hal_table)
add_command(bench_app, "latency", bench.latency)
add_command(bench_app, "throughput", bench.throughput)
add_command(bench_app, "host", bench.host)
add_command(bench_app, "rank-slice", bench_slice.rank_slice)
app.add_typer(hal_app, name="hal")
app.add_typer(bench_app, name="bench")
