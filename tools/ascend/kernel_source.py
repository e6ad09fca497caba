"""Kernel sources as tokens and functions: enough of C++ for the linter and the manifest, without a compiler."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_ascendc"
PROBES = KERNELS / "twin" / "probes"
DEVICE = {"__aicore__", "__global__", "__simd_vf__", "__simd_callee__", "__simt_vf__", "__simt_callee__"}
_TOKEN = re.compile(r"[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*|<<<|>>>|::|->|[^\s\w]")
_IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE | re.DOTALL)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(\S+)", re.MULTILINE)
_NOT_A_NAME = {"if", "for", "while", "switch", "return", "sizeof", "alignas", "decltype", "__attribute__", "__mix__",
               "__schedmode__", "__launch_bounds__", "noexcept", "operator"}  # fmt: skip


@dataclass(frozen=True)
class Token:
    """A word, number or sign, and the line it stands on."""

    text: str
    line: int


@dataclass(frozen=True)
class Function:
    """A function with its body. `owner` is the class it is defined in, "" for a free function."""

    name: str
    owner: str
    head: tuple[Token, ...]
    body: tuple[Token, ...]
    first_line: int
    last_line: int

    @property
    def is_device(self) -> bool:
        """Whether a core of the device runs it."""
        return any(token.text in DEVICE for token in self.head)

    @property
    def is_kernel(self) -> bool:
        """Whether the host launches it."""
        return any(token.text == "__global__" for token in self.head)


@dataclass(frozen=True)
class Macro:
    """A `#define` with a body."""

    name: str
    body: tuple[Token, ...]

    @property
    def is_host(self) -> bool:
        """Whether it is part of the host's half: it launches, returns a status or writes a message."""
        texts = {token.text for token in self.body}
        return bool(texts & {"snprintf", "DI_BAD_CALL"}) or any(text.startswith("DI_LAUNCH") for text in texts)


@dataclass(frozen=True)
class Source:
    """One file. `loose` are the declarations at namespace scope that are no functions, one token list for each."""

    path: Path
    tokens: tuple[Token, ...]
    includes: tuple[tuple[str, int], ...]
    macros: tuple[Macro, ...]
    functions: tuple[Function, ...]
    classes: frozenset[str]
    loose: tuple[tuple[Token, ...], ...]


def tokens_of(text: str, first_line: int = 1) -> tuple[Token, ...]:
    """The tokens of a text without comments, strings and directives."""
    found, line, last = [], first_line, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", last, match.start())
        last = match.start()
        found.append(Token(match.group(), line))
    return tuple(found)


def parse(text: str, path: Path) -> Source:
    """Reads a source. Nothing is expanded: a macro's call looks like a function's."""
    includes = [(m[1], text.count("\n", 0, m.start()) + 1) for m in _INCLUDE.finditer(text)]
    text, macros = _IGNORED.sub(_blank, text), []
    for match in _DIRECTIVE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        words = match.group().strip().lstrip("#").split(None, 1)
        if words[0] == "define":
            body = re.sub(r"^\w+(\([^)]*\))?", "", words[1])
            macros.append(Macro(re.match(r"\w+", words[1]).group(), tokens_of(body.replace("\\\n", " \n"), line)))
    tokens = tokens_of(_DIRECTIVE.sub(_blank, text))
    functions: list[Function] = []
    classes: set[str] = set()
    loose: list[tuple[Token, ...]] = []
    _scope(tokens, 0, "", functions, classes, loose)
    return Source(path, tokens, tuple(includes), tuple(macros), tuple(functions), frozenset(classes), tuple(loose))


def read(path: Path) -> Source:
    """The source at a path."""
    return parse(path.read_text(encoding="utf-8"), path)


def kernel_files() -> list[Path]:
    """Every kernel and every header that kernels share."""
    return sorted([*KERNELS.glob("*.asc"), *KERNELS.glob("*.h")])


def probe_files() -> list[Path]:
    """The probes that the bring-up builds for a device, and their header. The others are the twin's own tests."""
    own = {f"probe_{name}.asc" for name in ("bench", "bugs", "estimate", "peer")}
    return [path for path in sorted([*PROBES.glob("*.asc"), *PROBES.glob("*.h")]) if path.name not in own]


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def closing(tokens: tuple[Token, ...], start: int) -> int:
    """Index of the bracket that closes the one at `start`, or the number of tokens."""
    pairs = {"{": "}", "(": ")", "[": "]"}
    opened, closed = tokens[start].text, pairs[tokens[start].text]
    depth = 0
    for index in range(start, len(tokens)):
        depth += (tokens[index].text == opened) - (tokens[index].text == closed)
        if depth == 0:
            return index
    return len(tokens)


def _scope(tokens, start, owner, functions, classes, loose) -> int:
    """Reads declarations from `start` to the end of their scope; returns the index of its closing brace."""
    head, index = [], start
    while index < len(tokens):
        token = tokens[index]
        if token.text == "}":
            return index
        if token.text == ";" or (token.text == ":" and [t.text for t in head] in (["public"], ["private"])):
            if token.text == ";" and head and not owner:
                loose.append(tuple(head))
            head = []
        elif token.text == "(":
            end = closing(tokens, index)
            head += tokens[index : end + 1]
            index = end
        elif token.text == "{":
            index = _block(tokens, index, tuple(head), owner, functions, classes, loose)
            texts = [t.text for t in head]
            if "=" in texts or _keyword(texts) in ("class", "struct", "union", "enum"):
                head.append(token)  # what follows, up to the semicolon, belongs to the same declaration
                head = head if "=" in texts else []
            else:
                head = []
        else:
            head.append(token)
        index += 1
    return index


def _keyword(texts: list[str]) -> str:
    """Which kind of scope a declaration's head opens, outside of template parameters and parentheses."""
    depth = 0
    for text in texts:
        depth += (text in "<(") - (text in ">)") if len(text) == 1 else 0
        if depth == 0 and text in ("namespace", "class", "struct", "union", "enum", "extern"):
            return text
    return ""


def _block(tokens, index, head, owner, functions, classes, loose) -> int:
    """Handles one braced block that follows `head`; returns the index of its closing brace."""
    texts, end = [token.text for token in head], closing(tokens, index)
    kind = _keyword(texts)
    if kind in ("namespace",) or (kind == "extern" and "(" not in texts):
        return _scope(tokens, index + 1, owner, functions, classes, loose)
    if kind in ("class", "struct", "union") and "(" not in texts:
        name = _class_name(texts)
        classes.add(name)
        return _scope(tokens, index + 1, name, functions, classes, loose)
    name = _function_name(texts)
    if name and "=" not in _outside(texts):
        first = head[0].line
        functions.append(Function(name, owner, head, tokens[index + 1 : end], first, tokens[min(end, len(tokens) - 1)].line))
    return end


def _class_name(texts: list[str]) -> str:
    depth, last = 0, ""
    for text in texts:
        depth += (text == "<") - (text == ">")
        if depth == 0 and text == ":":
            break
        if depth == 0 and re.match(r"[A-Za-z_]", text) and text not in ("class", "struct", "union", "final", "template"):
            last = text
    return last


def _outside(texts: list[str]) -> list[str]:
    """The tokens outside of parentheses and template brackets."""
    depth, kept = 0, []
    for text in texts:
        depth += (text in "<([") - (text in ">)]") if len(text) == 1 else 0
        if depth == 0:
            kept.append(text)
    return kept


def _function_name(texts: list[str]) -> str:
    """The name in front of the parameter list: the first parenthesis that follows a name, attributes aside."""
    depth = 0
    for index, text in enumerate(texts):
        if text == "(" and depth == 0 and index and re.match(r"[A-Za-z_]", texts[index - 1]):
            if texts[index - 1] not in _NOT_A_NAME:
                return texts[index - 1]
        depth += (text in "<(") - (text in ">)") if len(text) == 1 else 0
    return ""
