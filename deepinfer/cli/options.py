"""Flags that commands share: which model and engine, how tokens are chosen. Names and defaults are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import typer

from deepinfer.units import human_int

_MODEL, _ENGINE, _SAMPLING = "Model", "Engine", "Sampling"


def human_size(text: str | int) -> int:
    """`4k` and the like, as a value of an option; a usage error otherwise."""
    try:
        return human_int(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def human_count(text: str | int) -> int:
    """A size of at least 1."""
    value = human_size(text)
    if value < 1:
        raise typer.BadParameter(f"{text!r} is too few: at least 1")
    return value


def _size(help: str, panel: str) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, parser=human_size, metavar="N")


def _flag(help: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass
class EngineOptions:
    """Fields of EngineConfig. None leaves its default."""

    model: Annotated[str, _flag("Folder of a checkpoint, or nano, which ships with the package.", _MODEL)] = "nano"
    backend: Annotated[str, _flag("auto, or a backend's name such as cpu, with an index as in cpu:0.", _MODEL)] = "auto"
    dtype: Annotated[Literal["auto", "bfloat16", "float32"], _flag("Of the residual streams.", _ENGINE)] = "auto"
    act_quant: Annotated[Literal["fp8_32", "none"], _flag("Quantisation of activations.", _ENGINE)] = "fp8_32"
    kv_cache_dtype: Annotated[Literal["auto", "float32"], _flag("auto: the model's quantised rows.", _ENGINE)] = "auto"
    max_model_len: Annotated[int | None, _size("Tokens of prompt and output, such as 4k.", _ENGINE)] = None
    max_num_seqs: Annotated[int | None, _size("Sequences that run together.", _ENGINE)] = None
    max_num_batched_tokens: Annotated[int | None, _size("Token rows of one step at most.", _ENGINE)] = None
    kv_cache_bytes: Annotated[int | None, _size("Size of the KV cache, such as 512M.", _ENGINE)] = None
    batch_invariant: Annotated[bool, _flag("Bits of a request depend on nothing else.", _ENGINE, "--batch-invariant")] = False
    fallback: Annotated[Literal["allow", "forbid"], _flag("May reference ops serve where no kernel does?", _ENGINE)] = "allow"
    enforce_eager: Annotated[bool, _flag("Capture no graphs of steps.", _ENGINE, "--enforce-eager")] = False
    max_prompt_graph_tokens: Annotated[int | None, _size("Rows of the largest captured step with prompts.", _ENGINE)] = None
    threads: Annotated[int | None, _size("CPU threads.", _ENGINE)] = None

    def settings(self) -> dict[str, Any]:
        """Arguments of `LLM(...)` and EngineConfig.create(...), without those left to their defaults."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass
class SamplingOptions:
    """Fields of SamplingParams. None leaves its default."""

    max_tokens: Annotated[int, _size("Tokens to generate at most.", _SAMPLING)] = 128
    temperature: Annotated[float | None, _flag("0 is greedy. \\[default: 1]", _SAMPLING)] = None
    top_k: Annotated[int | None, _flag("Keep the k most probable tokens.", _SAMPLING)] = None
    top_p: Annotated[float | None, _flag("Keep the smallest set of this probability.", _SAMPLING)] = None
    min_p: Annotated[float | None, _flag("Keep tokens of this share of the best one's probability.", _SAMPLING)] = None
    presence_penalty: Annotated[float | None, _flag("Subtracted for tokens that occurred.", _SAMPLING)] = None
    frequency_penalty: Annotated[float | None, _flag("Subtracted per occurrence.", _SAMPLING)] = None
    repetition_penalty: Annotated[float | None, _flag("Divides logits of tokens that occurred.", _SAMPLING)] = None
    seed: Annotated[int | None, _flag("64-bit seed of the draws.", _SAMPLING)] = None
    n: Annotated[int | None, _flag("Choices per prompt.", _SAMPLING, "--n")] = None
    stop: Annotated[list[str], _flag("Text that ends a choice; may be repeated.", _SAMPLING)] = field(default_factory=list)
    stop_token_ids: Annotated[list[int], _flag("Token that ends a choice; may be repeated.", _SAMPLING)] = field(
        default_factory=list
    )
    logit_bias: Annotated[list[str], _flag("Added to a token's logit; may be repeated.", _SAMPLING, metavar="ID=VALUE")] = field(
        default_factory=list
    )
    ignore_eos: Annotated[bool, _flag("Go on after an end token.", _SAMPLING, "--ignore-eos")] = False
    min_tokens: Annotated[int | None, _flag("Nothing ends a choice earlier.", _SAMPLING)] = None
    logprobs: Annotated[int | None, _flag("Report so many alternatives per token (with --json).", _SAMPLING)] = None
    prompt_logprobs: Annotated[int | None, _flag("The same for the prompt's tokens.", _SAMPLING)] = None

    def params(self) -> Any:
        """SamplingParams; RequestError names what is out of range."""
        from deepinfer.sampling_params import SamplingParams

        given = {name: value for name, value in vars(self).items() if value is not None and value != []}
        if self.logit_bias:
            given["logit_bias"] = dict(parse_bias(one) for one in self.logit_bias)
        return SamplingParams(**given)


def parse_bias(text: str) -> tuple[int, float]:
    """`17=-100` as (17, -100.0); a usage error otherwise."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias {text!r} must be a token id and a number, as in 17=-100") from None
