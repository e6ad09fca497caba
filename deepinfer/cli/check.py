"""`deepinfer check`: what a checkpoint is, what it takes in bytes, and everything that is wrong with it.

Works from full shards, from headers only and from the index only; nothing is loaded.
"""

from __future__ import annotations

import json
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from deepinfer_hal.backend import Capabilities

from deepinfer.checkpoint.index import INDEX_FILE, SINGLE_FILE
from deepinfer.checkpoint.plan import MIN_LOGIT_ROWS, BytePlan, PreparedNbytes, plan_bytes
from deepinfer.checkpoint.reader import Checkpoint, open_checkpoint
from deepinfer.config import DEFAULT_PROMPT_GRAPH_TOKENS
from deepinfer.errors import CapacityError, CheckpointError, ConfigError, DeepInferError
from deepinfer.model.graph_plan import GraphPlan
from deepinfer.model_config import ModelConfig
from deepinfer.model_path import resolve_model
from deepinfer.units import format_bytes, format_count, human_int

DEFAULT_MODEL_LEN = 4096
MODES = ("auto", "full", "headers", "index")


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong: the error's class and what it carries."""

    kind: str
    message: str
    file: str | None = None
    tensor: str | None = None
    nbytes: int | None = None


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `deepinfer check` prints. `plan` and `architecture` are None if config.json cannot be read.

    `mode`: what was read; `assumed`: shapes come from the configuration, not from the files. `device_bytes` is the
    memory of the backend's device where that is known.
    """

    model: str
    mode: str
    problems: list[Problem]
    assumed: bool = False
    backend: str | None = None
    device_bytes: int | None = None
    tensors: int = 0
    checkpoint_bytes: int = 0
    architecture: dict[str, Any] | None = None
    plan: BytePlan | None = None

    def to_builtins(self) -> dict[str, Any]:
        """Plain dicts and lists, with the plan's totals beside its parts."""
        content = msgspec.to_builtins(self)
        if self.plan is not None:
            content["plan"] |= {"weight_bytes": self.plan.weight_bytes, "total_bytes": self.plan.total_bytes}
        return content


def run_check(
    model: str,
    backend: str | None = None,
    ep: int = 1,
    max_model_len: int | str | None = None,
    max_num_seqs: int | str = 64,
    mode: str = "auto",
    enforce_eager: bool = False,
    max_prompt_graph_tokens: int | str | None = None,
) -> CheckReport:
    """Examine a checkpoint; what is wrong with it becomes a problem of the report.

    Raises ConfigError for a bad argument (a model that is not there, a mode that does not exist, a length the model
    cannot have) and BackendUnavailable for a backend that cannot be used.
    """
    folder = resolve_model(model)
    if mode not in MODES:
        raise ConfigError("mode", f"{mode!r} is not one of {', '.join(MODES)}")
    chosen = _choose_mode(folder) if mode == "auto" else mode
    length, sequences = _size("max_model_len", max_model_len), _size("max_num_seqs", max_num_seqs)
    prompt_rows = _size("max_prompt_graph_tokens", max_prompt_graph_tokens, least=0)
    prepared, device_bytes, name, capabilities = _backend_facts(backend)
    try:
        checkpoint = open_checkpoint(folder, chosen)
    except ConfigError as error:
        return CheckReport(
            model=str(model), mode=chosen, backend=name, device_bytes=device_bytes, problems=[_problem(error)]
        )
    config = checkpoint.config
    plan = plan_bytes(
        config,
        max_model_len=length or min(DEFAULT_MODEL_LEN, config.text.max_position_embeddings),
        max_num_seqs=sequences or 64,
        ranks=ep,
        with_graphs=capabilities.graphs and not enforce_eager,
        max_prompt_graph_tokens=DEFAULT_PROMPT_GRAPH_TOKENS if prompt_rows is None else prompt_rows,
        graph_workspace_bytes=capabilities.graph_workspace_bytes,
        prepared_nbytes=prepared,
    )
    problems = [_problem(error) for error in checkpoint.problems]
    if device_bytes and plan.total_bytes > device_bytes:
        problems.append(_problem(_too_large(plan, device_bytes)))
    return CheckReport(
        model=str(model),
        mode=chosen,
        assumed=checkpoint.assumed,
        backend=name,
        tensors=len(checkpoint.tensors),
        checkpoint_bytes=checkpoint.nbytes,
        architecture=describe(checkpoint),
        plan=plan,
        device_bytes=device_bytes,
        problems=problems,
    )


def check_command(
    model: str,
    backend: str | None = None,
    ep: int = 1,
    max_model_len: int | str | None = None,
    max_num_seqs: int | str = 64,
    as_json: bool = False,
    mode: str = "auto",
    enforce_eager: bool = False,
    max_prompt_graph_tokens: int | str | None = None,
) -> int:
    """Print the report; the exit status is 0 for a sound checkpoint and 1 otherwise. Raises as `run_check` does."""
    report = run_check(model, backend, ep, max_model_len, max_num_seqs, mode, enforce_eager, max_prompt_graph_tokens)
    if as_json:
        print(json.dumps(report.to_builtins(), indent=2))
    else:
        print_report(report)
    return 1 if report.problems else 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The architecture in a dozen lines, as plain values."""
    config, text = checkpoint.config, checkpoint.config.text
    runs = [(ratio, len(list(run))) for ratio, run in groupby(layer.ratio for layer in text.layers)]
    return {
        "name": config.architectures[0],
        "parameters": count_parameters(checkpoint),
        "layers": text.num_hidden_layers,
        "attention": ", ".join(f"{count} x {f'ratio {ratio}' if ratio else 'window only'}" for ratio, count in runs),
        "hidden_size": text.hidden_size,
        "heads": f"{text.num_attention_heads} x {text.head_dim}, {text.qk_rope_head_dim} rotated",
        "window_tokens": text.sliding_window,
        "kv_source_layers": list(text.kv_source_layer_ids),
        "index_source_layers": list(text.index_source_layer_ids),
        "index": f"{text.index_n_heads} x {text.index_head_dim}, top {text.index_topk}",
        "experts": f"{text.n_routed_experts}, width {text.moe_intermediate_size}, top {text.num_experts_per_tok}",
        "engram_layers": list(text.engram_layer_ids),
        "engram_rows": [table.rows for table in text.engram_tables] if text.engram_layer_ids else [],
        "draft_blocks": text.num_nextn_predict_layers,
        "vision": _describe_vision(config),
        "vocabulary": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
    }


def count_parameters(checkpoint: Checkpoint) -> int:
    """Weights that the configuration asks for; two to a byte where packed, scales not counted."""
    counted = (spec for spec in checkpoint.specs.values() if spec.dtype != "F8_E8M0")
    return sum(prod(spec.shape) * (2 if spec.dtype == "I8" else 1) for spec in counted)


def print_report(report: CheckReport) -> None:
    """Tables for people, on standard output."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    source = f"{report.mode}, shapes assumed from config.json" if report.assumed else report.mode
    size = f"{format_bytes(report.checkpoint_bytes)} ({report.checkpoint_bytes} bytes)"
    console.print(f"[bold]{escape(report.model)}[/bold]  {report.tensors} tensors, {size}, read: {source}")
    if report.architecture is not None:
        console.print(_architecture_table(report.architecture))
    if report.plan is not None:
        console.print(_plan_table(report.plan, report.backend, report.device_bytes))
    if not report.problems:
        console.print("no problems")
    for problem in report.problems:
        console.print(f"[red]{problem.kind}[/red] {escape(problem.message)}")


def _architecture_table(architecture: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table("architecture", "", box=None, pad_edge=False)
    for key, value in architecture.items():
        shown = format_count(value) if key == "parameters" else str(value)
        table.add_row(key.replace("_", " "), shown.strip("[]"))
    return table


def _plan_table(plan: BytePlan, backend: str | None, device_bytes: int | None) -> Any:
    from rich.table import Table

    table = Table(
        f"bytes per rank, {plan.ranks} rank{'s' if plan.ranks > 1 else ''}", "", "from", box=None, pad_edge=False
    )
    for group, nbytes in plan.weights.items():
        table.add_row(f"  {group}", format_bytes(nbytes), "")
    table.add_row("weights", format_bytes(plan.weight_bytes), f"layout of {backend}" if backend else "layout on disk")
    per_token = f"{plan.kv_bytes_per_token:g} bytes per token"
    table.add_row("KV cache", format_bytes(plan.kv_bytes), f"{plan.num_blocks} blocks of 128 tokens, {per_token}")
    table.add_row(
        "window and carry state", format_bytes(plan.state_bytes), f"{plan.max_num_seqs} x {plan.slot_bytes} bytes"
    )
    table.add_row(
        "token history", format_bytes(plan.history_bytes), f"{plan.max_num_seqs} x {plan.max_model_len} x 4 bytes"
    )
    table.add_row("workspace", format_bytes(plan.workspace_bytes), f"{plan.max_num_batched_tokens} rows a step")
    table.add_row("logits", format_bytes(plan.logits_bytes), f"{max(plan.max_num_seqs, MIN_LOGIT_ROWS)} rows, float32")
    if plan.graphs is not None:
        table.add_row("graphs", format_bytes(plan.graphs.total_bytes), _graphs_text(plan.graphs))
    has = f"device has {format_bytes(device_bytes)}" if device_bytes else ""
    table.add_row("total", format_bytes(plan.total_bytes), has)
    return table


def _graphs_text(graphs: GraphPlan) -> str:
    prompts = f", prompts to {graphs.prompt_rows[-1]} rows" if graphs.prompt_rows else ""
    return f"{graphs.graphs}, of {graphs.sizes[0]} to {graphs.sizes[-1]} sequences{prompts}"


def _describe_vision(config: ModelConfig) -> str:
    if config.vision is None:
        return "none"
    return (
        f"{config.vision.num_hidden_layers} blocks of width {config.vision.hidden_size} (recognised, images not served)"
    )


def _choose_mode(folder: Path) -> str:
    """`index` if no shard is there, `headers` if the first one is mostly a hole, else `full`."""
    shards = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX_FILE).is_file() and not shards:
        return "index"
    named = [shard for shard in shards if shard.name.startswith("model-") or shard.name == SINGLE_FILE]
    if named:
        status = named[0].stat()
        if status.st_blocks * 512 < status.st_size // 2:
            return "headers"
    return "full"


def _size(field: str, value: int | str | None, least: int = 1) -> int | None:
    if value is None:
        return None
    try:
        size = human_int(value)
    except ValueError as error:
        raise ConfigError(field, str(error)) from None
    if size < least:
        raise ConfigError(field, f"{value} must be at least {least}")
    return size


def _backend_facts(spec: str | None) -> tuple[PreparedNbytes | None, int | None, str | None, Capabilities]:
    """(prepared_nbytes, bytes of the device or None, name, capabilities) of a backend; Nones and defaults if none was asked
    for."""
    if spec is None:
        return None, None, None, Capabilities()
    from deepinfer_hal.registry import open_backend

    backend, index = open_backend(spec)
    info = next((device for device in backend.probe() if device.index == index), None)
    return backend.prepared_nbytes, (info.memory_bytes or None) if info else None, backend.name, backend.capabilities(index)


def _too_large(plan: BytePlan, device_bytes: int) -> CapacityError:
    return CapacityError(
        f"needs {format_bytes(plan.total_bytes)}, the device has {format_bytes(device_bytes)}: use more ranks (--ep), "
        "a smaller --max-model-len or fewer --max-num-seqs",
        needed_bytes=plan.total_bytes,
        available_bytes=device_bytes,
    )


def _problem(error: DeepInferError) -> Problem:
    if isinstance(error, CheckpointError):
        return Problem(type(error).__name__, str(error), error.file, error.tensor, error.nbytes)
    if isinstance(error, CapacityError):
        return Problem(type(error).__name__, str(error), nbytes=error.needed_bytes)
    return Problem(type(error).__name__, str(error), file="config.json")
