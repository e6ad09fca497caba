"""The manifest of AscendC identifiers (kernels_ascendc/manifest): what kernels may name, with signature, page and grade.

    python tools/ascend/api_manifest.py               a table of every entry
    python tools/ascend/api_manifest.py --header      the declarations that clang checks kernels against
    python tools/ascend/api_manifest.py --check       exits 1 and names what is wrong

Instructions take page and grade from the twin's instructions.def. An entry that neither a kernel nor a probe of the
twin uses is an error, as is a name of AscendC that a kernel uses and the manifest lacks. `spare` names share a
declaration with others, are used by nobody and are not declared to clang: who needs one moves it to `names`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from assumptions import ENTRY, TABLE  # noqa: E402
from kernel_source import KERNELS, PROBES, Source, kernel_files, read  # noqa: E402

FOLDER = KERNELS / "manifest"
GRADES = ("example", "prose", "assumed")
SPACES = ("__gm__", "__ubuf__", "__cbuf__", "__ca__", "__cb__", "__cc__", "__fbuf__", "__ssbuf__")
QUALIFIERS = ("__aicore__", "__global__", "__vector__", "__cube__", "__mix__", "__simd_vf__", "__simd_callee__")


class ManifestError(ValueError):
    """A manifest file says something that cannot be; the message names file and entry."""


@dataclass(frozen=True)
class Entry:
    """One identifier. `members` maps the names of a class or structure to their declarations; `values` are an enum's.

    A `support` type is there because signatures name it.
    """

    name: str
    namespace: str
    declaration: str
    page: str
    url: str
    grade: str
    members: dict[str, str]
    values: tuple[str, ...]
    before: str
    after: str
    support: bool
    file: str

    @property
    def full_name(self) -> str:
        """The name with its namespace below AscendC, such as `Reg::Add`."""
        return "::".join([*self.namespace.split("::")[1:], self.name])


def instructions() -> dict[str, tuple[str, str]]:
    """Grade and page of each of the twin's instructions, by name."""
    return {name: (grade, page) for kind, name, _, grade, page, _ in ENTRY.findall(TABLE.read_text()) if kind == "OP"}


def pages() -> dict[str, str]:
    """URL of each page by the short name that the manifest and instructions.def use."""
    listed = tomllib.loads((FOLDER / "pages.toml").read_text(encoding="utf-8"))
    bases = listed["base"]
    return {name: bases[path.split(":", 1)[0]] + path.split(":", 1)[1] for name, path in listed["page"].items()}


def load() -> list[Entry]:
    """Every entry, in the order of declaration. ManifestError names the entry that is wrong."""
    table, urls, found = instructions(), pages(), []
    for path in sorted(FOLDER.glob("[0-9]*.toml")):
        listed = tomllib.loads(path.read_text(encoding="utf-8"))
        space = listed.get("namespace", "")
        for item in sorted(_items(path), key=lambda one: one[0]):
            found += _entries(item[1], item[2], space, path.name, table, urls)
    names = [(entry.namespace, entry.name) for entry in found]
    for name in {name for name in names if names.count(name) > 1}:
        raise ManifestError(f"{name[1]} of {name[0] or 'the global namespace'} is listed twice")
    return found


def spare() -> dict[str, str]:
    """Full names that have a declaration and no user, with the file that keeps them."""
    found = {}
    for path in sorted(FOLDER.glob("[0-9]*.toml")):
        listed = tomllib.loads(path.read_text(encoding="utf-8"))
        outer = listed.get("namespace", "").split("::")[1:]
        for item in listed.get("function", []):
            found |= {"::".join([*outer, name]): path.name for name in item.get("spare", [])}
    return found


def _items(path: Path) -> list[tuple[int, str, dict]]:
    """The file's functions and types with their places, so that declarations keep the file's order."""
    text = path.read_text(encoding="utf-8")
    listed = tomllib.loads(text)
    places = {kind: [m.start() for m in re.finditer(rf"^\[\[{kind}\]\]", text, re.M)] for kind in ("function", "type")}
    return [(place, kind, item) for kind in places for place, item in zip(places[kind], listed.get(kind, []), strict=True)]


def _entries(kind: str, item: dict, space: str, file: str, table: dict, urls: dict) -> list[Entry]:
    made = []
    for name in item["names"] if kind == "function" else [item["name"]]:
        prefix = "Reg" if space.endswith("::Reg") else ""
        if "page" in item:
            page, grade = item["page"], item.get("grade", "")
        else:
            known = [table[op] for op in item.get("instructions", [prefix + name]) if op in table]
            if not known:
                raise ManifestError(f"{file}: {name} names no page and is no instruction of {TABLE.name}")
            page, grade = known[0][1], max((one[0] for one in known), key=GRADES.index)
        first = page.split(";")[0].strip()
        if first not in urls:
            raise ManifestError(f"{file}: {name}: pages.toml has no address of the page {first!r}")
        if grade not in GRADES:
            raise ManifestError(f"{file}: {name}: grade {grade!r} is none of {', '.join(GRADES)}")
        text = item["declaration"].replace("$name", name).replace("$NAME", name.upper()).strip()
        made.append(Entry(name, space, text, page, urls[first], grade, item.get("members", {}), tuple(item.get("values", ())),
                          item.get("before", "").strip(), item.get("after", ""), item.get("support", False), file))  # fmt: skip
    return made


def header(entries: list[Entry]) -> str:
    """Declarations of every entry as C++. The macros for address spaces and function kinds are `spaces.h`'s."""
    lines = ["#pragma once", '#include "spaces.h"']
    for entry in entries:
        opened, closed = (f"namespace {entry.namespace} {{", "}") if entry.namespace else ("", "")
        body = entry.declaration
        if entry.members:
            body += " {\n public:\n  " + "\n  ".join(entry.members.values()) + "\n};"
        elif entry.values:
            body += " { " + ", ".join(entry.values) + " };"
        elif not body.endswith((";", "}")):
            body += " {};" if body.startswith(("struct", "class")) else ";"
        lines += [part for part in (opened, entry.before, body, entry.after, closed) if part]
    return "\n".join(lines) + "\n"


def uses(source: Source) -> set[str]:
    """What a source names, macros included: `name`, `outer::name` where it is qualified, `.name` for a member."""
    found = set()
    for tokens in (source.tokens, *(macro.body for macro in source.macros)):
        texts = [token.text for token in tokens]
        for index, text in enumerate(texts):
            before = texts[index - 2 : index]
            if before[-1:] == ["template"]:
                before = texts[index - 3 : index - 1]
            if before[-1:] in (["."], ["->"]):
                found.add("." + text)
            elif before[-1:] == ["::"] and len(before) == 2:
                found.add(f"{before[0]}::{text}")
            else:
                found.add(text)
    return found


def _is_method(name: str, owner: str, declaration: str) -> bool:
    return "(" in declaration and name != owner and not name.startswith("operator")


def unused(entries: list[Entry], used: set[str]) -> list[str]:
    """Sentences for entries and methods that nothing uses. Fields and enumerators stand and fall with their type."""
    told, plain = [], {entry.name for entry in entries if not entry.namespace.endswith("::Reg")}
    for entry in entries:
        outer = ("Reg", "MicroAPI") if entry.namespace.endswith("::Reg") else ("AscendC",)
        names = {f"{one}::{entry.name}" for one in outer}
        if outer == ("AscendC",) or entry.name not in plain:
            names.add(entry.name)
        names |= set(entry.values)
        if not entry.support and not names & used:
            told.append(f"manifest/{entry.file}: nothing uses {entry.full_name}; move it to `spare`, or remove it")
        for member, declaration in entry.members.items():
            if _is_method(member, entry.name, declaration) and f".{member}" not in used:
                told.append(f"manifest/{entry.file}: nothing uses {entry.full_name}.{member}; remove the member")
    return told


def unlisted(entries: list[Entry], source: Source) -> list[str]:
    """Sentences for names that a source qualifies as AscendC's and the manifest lacks."""
    told, texts = [], source.tokens
    listed, waiting = {entry.full_name for entry in entries} | {"Reg", "MicroAPI"}, spare()
    for index in range(2, len(texts)):
        outer, name = texts[index - 2].text, texts[index].text
        if texts[index - 1].text != "::" or outer not in ("AscendC", "Reg", "MicroAPI"):
            continue
        full = name if outer == "AscendC" else f"Reg::{name}"
        if full not in listed:
            place = f"{source.path.name}:{texts[index].line}"
            todo = f"move it from `spare` to `names` in manifest/{waiting[full]}" if full in waiting else "add it, with its page"
            told.append(f"{place}: {full} is not in the manifest: {todo}")
    return told


def problems(entries: list[Entry], kernels: list[Source], probes: list[Source]) -> list[str]:
    """Everything wrong between the manifest and its users. A name that is not qualified is clang's to miss."""
    used = set().union(*(uses(source) for source in (*kernels, *probes)))
    return unused(entries, used) + [one for source in kernels for one in unlisted(entries, source)]


def sources() -> tuple[list[Source], list[Source]]:
    """Kernels with the headers that they share, and the twin's probes."""
    probes = sorted([*PROBES.glob("*.asc"), *PROBES.glob("*.h")])
    return [read(path) for path in kernel_files()], [read(path) for path in probes]


def main(arguments: list[str]) -> int:
    entries = load()
    if "--header" in arguments:
        print(header(entries), end="")
        return 0
    if "--check" in arguments:
        told = problems(entries, *sources())
        print("\n".join(told) or f"{len(entries)} identifiers, all of them used")
        return 1 if told else 0
    for entry in entries:
        print(f"{entry.full_name:28} {entry.grade:8} {entry.url}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
