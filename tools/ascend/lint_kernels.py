"""Lints the AscendC kernels and the bring-up's probes: what device code may not hold, by rule. Needs no compiler.

    python tools/ascend/lint_kernels.py [FILE ...]      prints file:line: rule: sentence, and exits 1 if there is one
    python tools/ascend/lint_kernels.py --rules         the rules

A function is the device's if it is marked `__aicore__`, `__global__`, `__simd_vf__` or `__simd_callee__`; macros count as
the device's unless they launch or write messages. There is no way to switch a rule off at a line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import api_manifest  # noqa: E402
from kernel_source import Function, Source, Token, closing, kernel_files, probe_files, read  # noqa: E402

RULES = {
    "host-call": "device code calls what is neither AscendC's (the manifest) nor a device function of the kernels",
    "std": "device code names the C++ library, or a source includes one of its headers",
    "static-data": "data with static storage: a static or thread_local variable, or one outside of functions, unless constexpr",
    "exception": "device code throws or catches",
    "heap": "device code allocates with new or delete",
    "intrinsic": "device code uses what lies below the C++ API: compiler built-ins, assembler, the C API",
    "recursion": "a device function reaches itself",
    "virtual": "a virtual function or run-time type information",
    "double": "device code computes in double: the type, or a literal without f",
    "mixed-memory": "a kernel uses both TPipe or its queues and LocalMemAllocator or tensors at addresses",
    "soc-state": "a kernel that places tensors itself lacks InitSocState() at its start or PipeBarrier<PIPE_ALL>() at its end",
    "launch": "a kernel is started by anything but DI_LAUNCH, DI_LAUNCH_CUBE and DI_LAUNCH_MIX",
}
_INCLUDES = re.compile(r'"(?:di_\w+|kernel_operator|probe)\.h"|<stdio\.h>')
_WORDS = {
    "std": {"std"},
    "exception": {"throw", "try", "catch"},
    "heap": {"new", "delete"},
    "virtual": {"virtual", "override", "dynamic_cast", "typeid"},
    "double": {"double"},
}
_INTRINSIC = re.compile(
    r"__builtin_\w+|asm|__asm(?:__)?|__nv\w+|asc_(?!vf_call$)\w+|(?:set|wait)_flag|pipe_barrier|get_(?:sub)?block\w*|"
    r"(?:copy|load)_(?:gm|ubuf|cbuf|matrix|l1)\w*|mad(?:_\w+)?|set_(?:vector_mask|ctrl|atomic|padding|mask)\w*|ffts_\w+|dcci|"
    r"(?:sub_)?block_(?:idx|num)"
)
_DOUBLE = re.compile(r"(?:\d[\d']*\.[\d']*|\.\d[\d']*|\d[\d']*(?=[eE]))(?:[eE][+-]?\d+)?[lL]?|0[xX][\da-fA-F.]+[pP][+-]?\d+")
_LANGUAGE = {
    "if", "for", "while", "switch", "return", "sizeof", "alignof", "static_cast", "reinterpret_cast", "const_cast", "decltype",
    "static_assert", "constexpr", "defined", "and", "or", "not",
}  # fmt: skip
_TYPES = {
    "bool", "char", "short", "int", "long", "unsigned", "signed", "float", "double", "void", "auto", "size_t", "int8_t",
    "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "GM_ADDR",
}  # fmt: skip
_WAY_1 = {"TPipe", "TQue", "TQueBind", "TBuf", "TBufPool", "GetTPipePtr"}
_LAUNCHES = ("DI_LAUNCH", "DI_LAUNCH_CUBE", "DI_LAUNCH_MIX", "DI_BY_TYPES")


@dataclass(frozen=True, order=True)
class Finding:
    """A place where a rule is broken."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class Known:
    """What a source can name: its own definitions, and those of the headers."""

    api: frozenset[str]
    free: frozenset[str]
    methods: frozenset[str]
    kernels: frozenset[str]
    classes: frozenset[str]
    macros: frozenset[str]

    @staticmethod
    def of(source: Source, sources: list[Source], entries: list[api_manifest.Entry]) -> Known:
        """The names that `source` sees, those of the manifest included."""
        sources = [one for one in sources if one is source or one.path.suffix == ".h"]
        functions = [function for source in sources for function in source.functions]
        return Known(
            frozenset({entry.name for entry in entries} | {member for entry in entries for member in entry.members}),
            frozenset(function.name for function in functions if function.is_device and not function.owner),
            frozenset(function.name for function in functions if function.is_device and function.owner),
            frozenset(function.name for function in functions if function.is_kernel),
            frozenset(name for source in sources for name in source.classes),
            frozenset(macro.name for source in sources for macro in source.macros if not macro.is_host),
        )


def _words(name: str, tokens: tuple[Token, ...]) -> Iterator[Finding]:
    """Rules that a single word breaks."""
    for index, token in enumerate(tokens):
        before = tokens[index - 1].text if index else ""
        for rule, words in _WORDS.items():
            if token.text in words and not (rule == "heap" and before == "="):
                yield Finding(name, token.line, rule, f"`{token.text}` in device code")
        if _INTRINSIC.fullmatch(token.text) and before not in (".", "->"):
            yield Finding(name, token.line, "intrinsic", f"`{token.text}` is below the documented C++ API")
        if token.text[0] in ".0123456789" and _DOUBLE.fullmatch(token.text):
            yield Finding(name, token.line, "double", f"the literal {token.text} is a double; write {token.text}f")
        beside = {t.text for t in tokens[max(0, index - 1) : index + 2]}
        if token.text in ("static", "thread_local") and "constexpr" not in beside:
            yield Finding(name, token.line, "static-data", f"`{token.text}` data in device code; make it constexpr or pass it in")


def _calls(source: Source, function: Function, known: Known) -> Iterator[Finding]:
    """Calls of what is not known to run on the device. A name after a type is a declaration, not a call."""
    tokens, name = function.body, source.path.name
    own = {one.name for one in source.functions if one.is_device and one.owner and one.owner == function.owner}
    plain = known.api | known.free | known.classes | known.macros | _LANGUAGE | _TYPES | own | _declared(source, function)
    for index in range(len(tokens) - 1):
        token, before = tokens[index], tokens[index - 1].text if index else ""
        if before == "template":
            before = tokens[index - 2].text
        if not re.match(r"[A-Za-z_]", token.text) or not _is_called(tokens, index) or before == "::":
            continue
        through = before in (".", "->")
        declares = re.match(r"[\w>&*]", before) and before not in _LANGUAGE | {"else", "do", "case", "->"}
        declares = declares or (before == "," and _declarator(tokens, index))
        if token.text in known.kernels and not through:
            yield Finding(name, token.line, "launch", f"device code calls the kernel {token.text}")
        elif token.text not in (plain | known.methods if through else plain) and not declares:
            yield Finding(name, token.line, "host-call", f"{token.text} is no device function and not in the manifest")


def _declarator(tokens: tuple[Token, ...], index: int) -> bool:
    """Whether the name at `index`, behind a comma, is one more variable of a declaration: `Type a(1), b(2);`."""
    depth, start = 0, index
    while start > 0 and tokens[start - 1].text not in (";", "{", "}"):
        start -= 1
        text = tokens[start].text
        depth += (text in ")]") - (text in "([") if len(text) == 1 else 0
        if depth < 0:
            return False
    return bool(re.match(r"[A-Za-z_]", tokens[start].text) and re.match(r"[A-Za-z_<:]", tokens[start + 1].text))


def _is_called(tokens: tuple[Token, ...], index: int) -> bool:
    """Whether the name at `index` is followed by its arguments, template arguments in between or not."""
    after = index + 1
    if tokens[after].text == "<":
        depth = 0
        for after in range(index + 1, min(len(tokens), index + 40)):  # noqa: B007  (the position is what is wanted)
            depth += (tokens[after].text == "<") - (tokens[after].text == ">")
            if depth == 0 or tokens[after].text in (";", "{", "&"):
                break
        if tokens[after].text != ">":
            return False
        after += 1
    return after < len(tokens) and tokens[after].text == "("


def _loose(source: Source) -> Iterator[Finding]:
    """Data outside of functions, and virtual functions without a body."""
    for tokens in source.loose:
        texts = [token.text for token in tokens]
        if set(texts) & {"using", "typedef", "constexpr", "static_assert", "friend", "struct", "class", "enum", "union"}:
            continue
        if "(" in texts and "=" not in texts[: texts.index("(")]:
            continue  # a function without a body
        said = " ".join(texts[:6])
        yield Finding(source.path.name, tokens[0].line, "static-data", f"`{said}` outside of functions is not constexpr")


def _includes(source: Source) -> Iterator[Finding]:
    for what, line in source.includes:
        if not _INCLUDES.fullmatch(what):
            yield Finding(source.path.name, line, "std", f"#include {what}: kernels include di_*.h and kernel_operator.h alone")


def _launches(source: Source, known: Known) -> Iterator[Finding]:
    """Kernels that the host's half names outside of a launch, and the vendor's launch syntax."""
    for token in source.tokens:
        if token.text == "<<<":
            yield Finding(source.path.name, token.line, "launch", "`<<<` starts a kernel; use DI_LAUNCH")
    for function in source.functions:
        if function.is_device:
            continue
        inside, index = -1, 0
        while index < len(function.body):
            token = function.body[index]
            if token.text in _LAUNCHES and index + 1 < len(function.body) and function.body[index + 1].text == "(":
                inside = max(inside, closing(function.body, index + 1))
            elif token.text in known.kernels and index > inside:
                yield Finding(source.path.name, token.line, "launch", f"the kernel {token.text} is named outside of DI_LAUNCH")
            index += 1


def _mentions(function: Function) -> set[str]:
    return {token.text for token in (*function.head, *function.body)}


def _static_tensors(tokens: tuple[Token, ...]) -> bool:
    """Whether tensors are placed by hand: an allocator, or LocalTensor<T>(position, address, size)."""
    for index, token in enumerate(tokens):
        if token.text == "LocalMemAllocator":
            return True
        if token.text == "LocalTensor" and index + 1 < len(tokens) and tokens[index + 1].text == "<":
            rest = [t.text for t in tokens[index : index + 12]]
            if "(" in rest and "TPosition" in rest[rest.index("(") : rest.index("(") + 4]:
                return True
    return False


def _memory(sources: list[Source]) -> Iterator[Finding]:
    """Follows every kernel to all functions and classes that it reaches."""
    functions = [(source, function) for source in sources for function in source.functions if function.is_device]
    fields = _fields(sources)
    for source, kernel in functions:
        if not kernel.is_kernel:
            continue
        reached, names, frontier = [kernel], set(), _mentions(kernel)
        while frontier - names:
            names |= frontier
            found = [f for s, f in functions if (f.name in frontier and not f.owner or f.owner in frontier) and f not in reached]
            reached += found
            frontier = {name for function in found for name in _mentions(function)}
            frontier |= {name for owner in names for name in fields.get(owner, ())}
        if not any(_static_tensors((*f.head, *f.body)) for f in reached):
            continue
        barrier = any("PipeBarrier<PIPE_ALL>" in "".join(t.text for t in f.body) for f in reached)
        if "InitSocState" not in names or not barrier:
            text = f"{kernel.name} places tensors itself and needs InitSocState() first and PipeBarrier<PIPE_ALL>() last"
            yield Finding(source.path.name, kernel.first_line, "soc-state", text)
        if names & _WAY_1:
            both = ", ".join(sorted(names & _WAY_1))
            text = f"{kernel.name} uses {both} and places tensors itself, which the page of LocalMemAllocator rules out"
            yield Finding(source.path.name, kernel.first_line, "mixed-memory", text)


def _fields(sources: list[Source]) -> dict[str, set[str]]:
    """Words of each class's own text, which name the types of its fields."""
    found: dict[str, set[str]] = {}
    for source in sources:
        for index, token in enumerate(source.tokens[:-1]):
            if token.text in ("class", "struct") and source.tokens[index + 1].text in source.classes:
                start = next((i for i in range(index, len(source.tokens)) if source.tokens[i].text in "{;>,"), index)
                if source.tokens[start].text == "{":
                    inner = source.tokens[start : closing(source.tokens, start)]
                    found.setdefault(source.tokens[index + 1].text, set()).update(t.text for t in inner)
    return found


def _recursion(sources: list[Source]) -> Iterator[Finding]:
    """Unqualified calls and calls through `this` among device functions of one class, or of none."""
    functions = [(source, function) for source in sources for function in source.functions if function.is_device]
    calls: dict[tuple[str, str], set[tuple[str, str]]] = {}
    known = {(function.owner, function.name) for _, function in functions}
    for _, function in functions:
        reached = calls.setdefault((function.owner, function.name), set())
        for index, token in enumerate(function.body[:-1]):
            before = [t.text for t in function.body[max(0, index - 2) : index]]
            through = before[-1:] in (["."], ["->"]) and before[-2:-1] != ["this"]
            if through or before[-1:] == ["::"] or not _is_called(function.body, index):
                continue
            reached |= {key for key in ((function.owner, token.text), ("", token.text)) if key in known}
    for source, function in functions:
        seen, frontier = set(), set(calls[function.owner, function.name])
        while frontier - seen:
            seen |= frontier
            frontier = {key for name in frontier for key in calls.get(name, ())}
        if (function.owner, function.name) in seen:
            yield Finding(source.path.name, function.first_line, "recursion", f"{function.name} reaches itself")


def lint(sources: list[Source]) -> list[Finding]:
    """Every finding in the sources, which must be all that a kernel needs: callers and callees."""
    entries, found = api_manifest.load(), []
    for source in sources:
        name, known = source.path.name, Known.of(source, sources, entries)
        found += [*_includes(source), *_loose(source), *_launches(source, known)]
        virtual = [token for token in source.tokens if token.text == "virtual"]
        found += [Finding(name, token.line, "virtual", "`virtual` in a kernel source") for token in virtual]
        for function in source.functions:
            if function.is_device:
                found += [*_words(name, function.body), *_calls(source, function, known)]
        for macro in source.macros:
            if not macro.is_host:
                found += [*_words(name, macro.body)]
    return sorted({*found, *_memory(sources), *_recursion(sources)})


def _declared(source: Source, function: Function) -> set[str]:
    """Names that a function may call without knowing them: types that are parameters of templates, its own parameters
    and its lambdas.
    """
    texts = [token.text for token in source.tokens]
    found = {after for before, after in zip(texts, texts[1:], strict=False) if before in ("class", "typename")}
    head, body = [t.text for t in function.head], [t.text for t in function.body]
    found |= {name for name, after in zip(head, head[1:], strict=False) if after in (",", ")")}
    return found | {name for name, *after in zip(body, body[1:], body[2:], strict=False) if after == ["=", "["]}


def main(arguments: list[str]) -> int:
    if "--rules" in arguments:
        print("\n".join(f"{rule:13} {text}" for rule, text in RULES.items()))
        return 0
    chosen = {Path(argument).name for argument in arguments}
    found = [f for f in lint([read(path) for path in (*kernel_files(), *probe_files())]) if not chosen or f.file in chosen]
    print("\n".join(str(finding) for finding in found) or "no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
