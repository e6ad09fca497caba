"""Reads docs/porting.md: its commands, and the code it quotes beside where that comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deepinfer.porting import new_backend

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "porting.md"

_QUOTE = re.compile(r"<!-- quote: (?P<source>[^\n]+) -->\n```\w+\n(?P<code>.*?)```\n", re.DOTALL)
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Quote:
    """source: "PATH MARKER" of the tree, or "new [--no-torch-device] NAME PATH" of a generated package."""

    source: str
    code: str


def quotes() -> list[Quote]:
    return [Quote(found["source"], found["code"]) for found in _QUOTE.finditer(DOC.read_text(encoding="utf-8"))]


def commands() -> list[str]:
    """The lines of all shell blocks, in order."""
    blocks = _COMMANDS.findall(DOC.read_text(encoding="utf-8"))
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def quoted_code(quote: Quote, scratch: Path) -> str:
    """The code that a quote must equal; packages are generated below `scratch`."""
    words = quote.source.split()
    if words[0] != "new":
        return _marked((ROOT / words[0]).read_text(encoding="utf-8"), words[1])
    bare = words[1] == "--no-torch-device"
    name, path = words[2:] if bare else words[1:]
    on_chip = {"with_torch_device": False} if bare else {"torch_device": "toychip", "torch_module": "toychip"}
    new_backend(name, scratch / name, **on_chip)
    return (scratch / name / path).read_text(encoding="utf-8")


def _marked(text: str, marker: str) -> str:
    """The lines between `[marker]` and `[/marker]`, without blank lines at the ends."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip(" #/") == f"[{marker}]")
    stop = next(i for i, line in enumerate(lines) if line.strip(" #").removeprefix("// ") == f"[/{marker}]")
    inside = lines[start + 1 : stop]
    while inside and not inside[0].strip():
        inside.pop(0)
    while inside and not inside[-1].strip():
        inside.pop()
    return "\n".join(inside) + "\n"


def rewrite(scratch: Path) -> None:
    """Puts the code of today into the document: `python -m tests.unit.porting_doc`."""
    text = DOC.read_text(encoding="utf-8")
    for quote in quotes():
        language = "cpp" if ".cpp" in quote.source else "python"
        old = f"<!-- quote: {quote.source} -->\n```{language}\n{quote.code}```\n"
        text = text.replace(old, f"<!-- quote: {quote.source} -->\n```{language}\n{quoted_code(quote, scratch)}```\n")
    DOC.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rewrite(Path(folder))
