"""`deepinfer chat`: a plain loop in which the model continues the conversation's text; no template is applied."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from deepinfer.cli.generate import describe_output
from deepinfer.cli.options import EngineOptions, Json, SamplingOptions
from deepinfer.cli.terminal import note

HELP = "/exit ends, /reset forgets the conversation, Ctrl-C stops an answer"


class Conversation:
    """The text so far, as whole turns: the oldest are forgotten when the model's window is full."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def say(self, text: str) -> str:
        """Adds the user's line; returns the prompt, which the model continues."""
        self.turns.append(text + "\n")
        return "".join(self.turns)

    def answer(self, text: str) -> None:
        """Adds what the model said."""
        self.turns.append(text if text.endswith("\n") else text + "\n")

    def forget_oldest(self) -> bool:
        """Drops the oldest turn before the last line; False if there is none."""
        if len(self.turns) < 2:
            return False
        del self.turns[0]
        return True


def chat(engine: EngineOptions, sampling: SamplingOptions, as_json: Json = False) -> int:
    """Talks to a model: each line is added to the text, and the model continues it. Standard input may be a pipe."""
    params = sampling.params()
    if params.n != 1:
        raise typer.BadParameter(f"--n {params.n}: a conversation goes on from one answer; deepinfer generate gives several")
    from deepinfer import LLM

    llm = LLM(**engine.settings())
    conversation = Conversation()
    if not as_json:
        note(HELP)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() and not as_json else "")
        except (EOFError, KeyboardInterrupt):
            return 0
        if line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            conversation = Conversation()
        elif line.strip() == "/help":
            note(HELP)
        elif line.strip():
            _turn(llm, conversation, line, params, as_json)


def _turn(llm: Any, conversation: Conversation, line: str, params: Any, as_json: bool) -> None:
    """One question and its answer; an error is shown, and the loop goes on."""
    conversation.say(line)
    while not fits(llm, "".join(conversation.turns), params) and conversation.forget_oldest():
        pass
    prompt = "".join(conversation.turns)
    if as_json:
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        print(json.dumps(describe_output(output), ensure_ascii=False), flush=True)
        text, error = output.outputs[0].text if output.outputs else "", output.error
    else:
        text, error = _stream(llm, prompt, params)
    if error:
        note(f"error: {error}")
        conversation.turns.pop()
    else:
        conversation.answer(text)


def fits(llm: Any, prompt: str, params: Any) -> bool:
    """Whether the prompt and as many tokens as may be generated fit the engine's longest sequence."""
    return len(llm.tokenizer.encode(prompt)) + (params.max_tokens or 1) <= llm.engine.scheduler.max_model_len


def _stream(llm: Any, prompt: str, params: Any) -> tuple[str, str | None]:
    """Prints the answer as it comes; what an interrupt leaves counts as the answer."""
    parts: list[str] = []
    error = None
    stream = llm.stream(prompt, params)
    try:
        for output in stream:
            if output.outputs:
                parts.append(output.outputs[0].text)
                print(parts[-1], end="", flush=True)
            error = output.error
    except KeyboardInterrupt:
        stream.close()
    print(flush=True)
    return "".join(parts), error
