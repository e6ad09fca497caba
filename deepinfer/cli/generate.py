"""`deepinfer generate`: text from prompts given as arguments, in a file, or on standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.cli.options import EngineOptions, Json, SamplingOptions
from deepinfer.cli.terminal import note, print_json

PromptFile = Annotated[
    Path | None,
    typer.Option(help="One prompt a line; .jsonl: a string, or an object with prompt or prompt_token_ids, a line."),
]


def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; none or `-` reads one from standard input.")] = None,
    prompt_file: PromptFile = None,
    echo: Annotated[bool | None, typer.Option("--echo/--no-echo", help="Print prompts too; default: to a terminal.")] = None,
    as_json: Json = False,
) -> int:
    """Generates text. One prompt streams to a terminal; several run together, and their outputs come in order.

    The exit status is 1 if any prompt failed; the others' outputs are printed all the same.
    """
    requests = read_prompts(prompts or [], prompt_file)
    params = sampling.params()
    from deepinfer import LLM

    with_prompt = sys.stdout.isatty() if echo is None else echo
    stream = not as_json and len(requests) == 1 and params.n == 1 and sys.stdout.isatty()
    llm = LLM(**engine.settings())
    if stream:
        return stream_one(llm, requests[0], params, with_prompt)
    outputs = llm.generate(requests, params, use_tqdm=not as_json and sys.stderr.isatty())
    if as_json:
        print_json([describe_output(output) for output in outputs])
    else:
        _print_outputs(outputs, with_prompt)
    return 1 if any(output.error for output in outputs) else 0


def read_prompts(arguments: list[str], file: Path | None) -> list[Any]:
    """Prompts from the arguments, then from the file; from standard input if there are neither. Usage error if none."""
    prompts: list[Any] = [_read_stdin() if text == "-" else text for text in arguments]
    if file is not None:
        prompts += _read_file(file)
    if not prompts and not sys.stdin.isatty():
        text = _read_stdin()
        prompts = [text] if text else []
    if not prompts:
        raise typer.BadParameter("no prompt: give one as an argument, with --prompt-file, or on standard input")
    return prompts


def _read_stdin() -> str:
    return sys.stdin.read().removesuffix("\n")


def _read_file(file: Path) -> list[Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--prompt-file {file}: {error}") from None
    # not splitlines: JSON strings, and text, may hold a form feed or U+2028
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_read_json(file, number, line) if file.suffix == ".jsonl" else line for number, line in lines]


def _read_json(file: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        message = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise typer.BadParameter(f"--prompt-file {file}, line {number}: no JSON: {message}") from None


def describe_output(output: Any) -> dict[str, Any]:
    """A RequestOutput as `--json` prints it; log-probabilities only where they were asked for."""
    described: dict[str, Any] = {"prompt": output.prompt, "outputs": [], "error": output.error}
    for choice in output.outputs:
        entry = {"text": choice.text, "token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason}
        if choice.logprobs is not None:
            entry["logprobs"] = [_describe_logprobs(one) for one in choice.logprobs]
        described["outputs"].append(entry)
    if output.prompt_logprobs is not None:
        described["prompt_logprobs"] = [one and _describe_logprobs(one) for one in output.prompt_logprobs]
    return described


def _describe_logprobs(entry: dict[int, Any]) -> dict[str, Any]:
    return {
        str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token} for token, one in entry.items()
    }


def stream_one(llm: Any, prompt: Any, params: Any, with_prompt: bool) -> int:
    """Prints one prompt's text as it comes; a Ctrl-C keeps what is there and ends it."""
    if with_prompt and isinstance(prompt, str):
        print(f"\x1b[2m{prompt}\x1b[0m", end="", flush=True)
    error = None
    for output in llm.stream(prompt, params):
        if output.outputs:
            print(output.outputs[0].text, end="", flush=True)
        error = output.error
    print()
    if error:
        note(f"error: {error}")
    return 1 if error else 0


def _print_outputs(outputs: list[Any], with_prompt: bool) -> None:
    several = len(outputs) > 1 or any(len(output.outputs) > 1 for output in outputs)
    for number, output in enumerate(outputs, 1):
        if output.error:
            note(f"error: prompt {number}: {output.error}" if len(outputs) > 1 else f"error: {output.error}")
        for choice in output.outputs:
            if several:
                print(f"--- prompt {number}, choice {choice.index + 1} ({choice.finish_reason})")
            print(f"{output.prompt or ''}{choice.text}" if with_prompt else choice.text)
