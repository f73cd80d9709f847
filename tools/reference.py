"""Write the reference, a page for each public module and class, from signatures and docstrings.

build/python tools/reference.py            # write docs/reference
build/python tools/reference.py --check    # only say which pages differ; exit status 1
"""

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
FIRST = "icl_patch.ContextPatcher"
MODULES = (
    "icl_patch",
    "icl_patch.static",
    "icl_patch.scale",
    "icl_patch.evaluation.embedded",
    "icl_patch.ops",
)
LISTS = {
    "analysis": (
        "Analysis",
        "What a patch and a model show.",
        (
            "analysis.attribution.attribution",
            "analysis.composition.additivity",
            "analysis.controllability.BlockControllability",
            "analysis.dynamics.factorise",
            "analysis.dynamics.Dynamics",
            "analysis.dynamics.Trajectory",
            "analysis.dynamics.Factorisation",
            "analysis.norm_folding.fold",
            "analysis.norm_folding.UncentredLayerNorm",
            "analysis.ov_matrices.value_output",
            "analysis.steering.steering_vectors",
            "analysis.steering.steered",
            "analysis.steering.input_covariances",
            "analysis.steering.in_rome_form",
            "analysis.transfer.on_other_weights",
        ),
    ),
    "inside": (
        "Inside",
        "What [the papers' pages](../papers/statements.md) name beside the above. It may change"
        " with any version.",
        (
            "models.block_spec.BlockSpec",
            "recording.passes.compute_in_two_passes",
            "recording.algorithm_1.algorithm_1",
            "recording.block_math.context_change",
            "recording.block_math.writer_target",
            "recording.block_math.reader_update",
            "recording.block_math.bias_update",
            "recording.block_math.weight_update",
            "recording.block_math.direct_scale",
            "recording.block_math.stable_scale",
            "recording.block_math.expert_update",
            "recording.block_math.close",
        ),
    ),
}
"""Pages of names that no module exports together: title, introduction, names below icl_patch."""
WIDTH = 96
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
ROLE = re.compile(r":\w+:`~?([\w.]+)`")


class Group(NamedTuple):
    """A page of several names: a module's, or one of LISTS."""

    page: str
    title: str
    text: str
    entries: dict[str, Any]

    @property
    def classes(self) -> dict[str, Any]:
        """The entries that have pages of their own, all classes but errors."""
        return {
            name: value
            for name, value in self.entries.items()
            if inspect.isclass(value) and not issubclass(value, Exception)
        }


@cache
def groups() -> list[Group]:
    """The modules, then LISTS."""
    found = []
    for module in MODULES:
        package = importlib.import_module(module)
        entries = {f"{module}.{name}": getattr(package, name) for name in package.__all__}
        entries.pop("icl_patch.__version__", None)
        entries = {name: x for name, x in entries.items() if not isinstance(x, ModuleType)}
        page = f"{last(module)}.md"
        found.append(Group(page, f"`{module}`", inspect.getdoc(package) or "", entries))
    for page, (title, text, names) in LISTS.items():
        entries = {f"icl_patch.{x}": pkgutil.resolve_name(f"icl_patch.{x}") for x in names}
        found.append(Group(f"{page}.md", title, text, entries))
    return found


def last(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]


def members(value: Any) -> dict[str, Any]:
    """The public methods and properties of a class; of anything else none."""
    kinds = (property, classmethod, staticmethod)
    return {
        name: member
        for name, member in (vars(value) if inspect.isclass(value) else {}).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, kinds))
    }


@cache
def places() -> dict[str, str]:
    """Where each name stands, ``PAGE`` or ``PAGE#ANCHOR``, by its public and its full name."""
    found = {module: f"{last(module)}.md" for module in MODULES}
    for group in groups():
        for name, value in group.entries.items():
            own = name in group.classes
            page = f"{last(name)}.md" if own else group.page
            for each in (name, f"{getattr(value, '__module__', '')}.{last(name)}"):
                found.setdefault(each, page if own else f"{page}#{last(name).lower()}")
                for member in members(value):
                    found.setdefault(f"{each}.{member}", f"{page}#{member.lower()}")
    return found


def inline(text: str, home: str) -> str:
    """A docstring's roles and literals as Markdown; ``home``: the dotted name that it describes."""

    def link(match: re.Match[str]) -> str:
        target, scope = match[1], home
        while scope and f"{scope}.{target}" not in places():
            scope = scope.rpartition(".")[0]
        place = places().get(f"{scope}.{target}" if scope else target)
        shown = f"`{target.removeprefix('icl_patch.')}`"
        return f"[{shown}]({place})" if place else shown

    return ROLE.sub(link, text).replace("``", "`")


def section(title: str, lines: list[str], home: str) -> list[str]:
    """A section of a docstring: its entries ``name: text`` as a list, or its text."""
    shown = []
    for line in textwrap.dedent("\n".join(lines)).splitlines():
        found = re.match(r"(\*{0,2}\w[\w., *]*?): (.*)", line)
        if found and title not in ("Returns", "Yields"):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            shown.append(f"- {names}: {inline(found[2], home)}")
        else:
            shown.append("  " * (line[:1] == " ") + inline(line.strip(), home))
    heading = {"Args": "Arguments", "Raises": "Errors"}.get(title, title)
    return [f"**{heading}**", "", *shown, ""]


def described(text: str, home: str) -> list[str]:
    """A docstring as lines of Markdown: code blocks indented, sections as lists."""
    found, rest = [], inspect.cleandoc(text).splitlines()
    while rest:
        line = rest.pop(0)
        heading = SECTION.fullmatch(line)
        if heading:
            inner = []
            while rest and (not rest[0] or rest[0][0] == " "):
                inner.append(rest.pop(0))
            found += section(heading[1], inner, home)
        elif line.endswith("::"):
            found += [inline(line[:-1], home)] if line != "::" else []
        else:
            found.append(line if line[:4] == "    " else inline(line, home))
    return [*found, ""]


def annotation(value: Any) -> str:
    """A type as its source has it, without its modules."""
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text).replace("NoneType", "None")


def signature(name: str, value: Any) -> list[str]:
    """The call as an indented block, an argument a line where it is long."""
    if isinstance(value, property) and value.fget:
        returned = inspect.signature(value.fget).return_annotation
        return [f"    {name}: {annotation(returned)}", ""]
    if inspect.isclass(value) and issubclass(value, Enum | Exception):
        return []
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    found = inspect.signature(function)
    parts: list[str] = []
    for parameter in list(found.parameters.values()):
        if parameter.name in ("self", "cls"):
            continue
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        text = f"{stars}{parameter.name}"
        if parameter.kind is parameter.KEYWORD_ONLY and not {"*"} & {x[:1] for x in parts}:
            parts.append("*")
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default(parameter.default)}"
        parts.append(text)
    empty = inspect.isclass(value) or found.return_annotation is found.empty
    end = ")" if empty else f") -> {annotation(found.return_annotation)}"
    line = f"    {name}({', '.join(parts)}{end}"
    if len(line) <= WIDTH:
        return [line, ""]
    return [f"    {name}(", *(f"        {part}," for part in parts), f"    {end}", ""]


def default(value: Any) -> str:
    """A default as code; ``...`` for an object, whose repr may be of this machine."""
    if isinstance(value, type):
        return value.__name__
    plain = value is None or isinstance(value, bool | int | float | str | slice)
    plain |= isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    return repr(value) if plain else "..."


def entry(name: str, value: Any, home: str) -> list[str]:
    """A heading, the signature and the docstring of a function, method, error or constant."""
    head = [f"## `{name}`", ""]
    if not (callable(value) or isinstance(value, property | classmethod | staticmethod)):
        return [*head, *([] if isinstance(value, Path) else [f"    {name} = {value!r}", ""])]
    return [*head, *signature(name, value), *described(inspect.getdoc(value) or "", home)]


def class_page(name: str, value: Any) -> list[str]:
    """The page of a class: its signature, its docstring and its members."""
    module, _, short = name.rpartition(".")
    lines = [f"# `{short}`", "", f"    from {module} import {short}", ""]
    lines += [*signature(short, value), *described(inspect.getdoc(value) or "", name)]
    if issubclass(value, Enum):
        lines += [", ".join(f"`{member.name}`" for member in value), ""]
    for member, method in members(value).items():
        lines += entry(member, method, name)
    return lines


def group_page(group: Group) -> list[str]:
    """The page of a module or list: what it is, and its functions, errors and constants."""
    lines = [f"# {group.title}", "", *described(group.text, group.title.strip("`"))]
    lines += ["Classes: " + ", ".join(f"[`{last(x)}`]({last(x)}.md)" for x in group.classes), ""]
    for name, value in group.entries.items():
        lines += [] if name in group.classes else entry(last(name), value, name)
    return lines


def listed(name: str, page: str, text: str, home: str) -> str:
    """A line of the index: a name and the first sentence about it."""
    first = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".:")
    return f"- [{name}]({page}): {inline(first, home)}"


def pages() -> dict[str, str]:
    """Every page by its file's name, the index first."""
    made: dict[str, list[str]] = {"README.md": []}
    index = ["# Reference", "", "A page for each public class and module.", ""]
    for group in groups():
        made[group.page] = group_page(group)
        index.append(listed(group.title, group.page, group.text, group.title.strip("`")))
        for name, value in group.classes.items():
            page = f"{last(name)}.md"
            made[page] = class_page(name, value)
            line = listed(f"`{last(name)}`", page, inspect.getdoc(value) or "", name)
            index.insert(4 if name == FIRST else len(index), f"  {line}"[2 * (name == FIRST) :])
    made["README.md"] = index
    return {
        name: re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
        for name, lines in made.items()
    }


def main() -> int:
    """Write or check all pages."""
    check, differs, wanted = sys.argv[1:] == ["--check"], False, pages()
    FOLDER.mkdir(exist_ok=True)
    for path in sorted({*FOLDER.glob("*.md"), *(FOLDER / name for name in wanted)}):
        text = wanted.get(path.name)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        differs = True
        print(f"{path.name}: {'differs from the docstrings' if check else 'written'}")
        if check:
            continue
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
