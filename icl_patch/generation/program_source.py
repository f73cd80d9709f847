"""The Python source of a decode step's operators."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from icl_patch.generation.operator_recorder import Call, View, key_of, tensors_in
from icl_patch.recording.memory import memory_of

_aten = torch.ops.aten
SIGNS = {_aten.add.Tensor: "+", _aten.sub.Tensor: "-", _aten.mul.Tensor: "*"}
_WIDTH = 100


class Source:
    """The source of a program, and the tensors and operators that its names stand for."""

    def __init__(
        self, whole: Sequence[View], names: Mapping[str, Tensor], sections: tuple[str, ...]
    ) -> None:
        self._whole = whole
        self._paths = {memory_of(x): path for path, x in reversed([*names.items()])}
        self._sections = sections
        self._section = ""
        self._lines: list[str] = []
        self._variables: dict[View, str] = {}
        self._globals: dict[str, Any] = {}
        self._names: dict[Any, str] = {}  # of tensors and operators
        self._taken: set[str] = set()

    def function(self, calls: Iterable[Call], returned: Iterable[int]) -> str:
        """The source of a function that makes the calls and returns these values."""
        for call in calls:
            self._write(call)
        result = ", ".join(self._variable(self._whole[number]) for number in returned)
        lines = textwrap.wrap(f"return ({result},)", _WIDTH - 8, break_long_words=False)
        self._lines += [lines[0], *(f"    {line}" for line in lines[1:])]
        return "\n".join(["def step():", *(f"    {line}" for line in self._lines), ""])

    def compiled(self, source: str) -> Callable[[], tuple[Tensor, ...]]:
        """The function of that source."""
        exec(compile(source, "<icl_patch decode step>", "exec"), self._globals)
        function: Callable[[], tuple[Tensor, ...]] = self._globals["step"]
        return function

    def _write(self, call: Call) -> None:
        self._head(call)
        args = [self._text(x) for x in call.args]
        sign = SIGNS.get(call.target)
        if sign and len(args) == 2 and not call.kwargs:
            right = f"{args[0]} {sign} {args[1]}"
        else:
            args += [f"{name}={self._text(x)}" for name, x in call.kwargs.items()]
            right = f"{self._operator(call.target)}({', '.join(args)})"
        made = [self._made(call, number) for number in call.made]
        if all(name == "_" for name in made):
            self._lines.append(right)
        elif call.several:
            self._lines.append(f"{', '.join(made)}{',' * (len(made) == 1)} = {right}")
        else:
            self._lines.append(f"{made[0]} = {right}")

    def _head(self, call: Call) -> None:
        """A heading where a module's part begins: with the first of its parameters."""
        for x in tensors_in((call.args, call.kwargs)):
            path = self._paths.get(memory_of(x), "") if isinstance(x, Tensor) else ""
            for section in self._sections:
                if path.startswith(f"{section}.") and section != self._section:
                    self._section = section
                    self._lines += ["", f"# {section}"]
                    return

    def _made(self, call: Call, number: int | None) -> str:
        if number is None:
            return "_"
        name = self._new_name(f"{_name_of(call.target)}_{number}")
        self._variables[self._whole[number]] = name
        return name

    def _variable(self, view: View) -> str:
        """The name of a view, which is made where it is first needed."""
        if name := self._variables.get(view):
            return name
        whole = self._whole[view.value]
        base = self._variables[whole]
        name = f"{base}_{'x'.join(map(str, view.shape))}"
        if view.is_contiguous and whole.is_contiguous and view.elements == whole.elements:
            right = f"{base}.view({view.shape})"
        else:
            right = f"{base}.as_strided({view.shape}, {view.stride}, {view.offset})"
        name = self._variables[view] = self._new_name(name)
        self._lines.append(f"{name} = {right}")
        return name

    def _text(self, x: Any) -> str:
        """An argument in the source."""
        if isinstance(x, View):
            return self._variable(x)
        if isinstance(x, list):
            return f"[{', '.join(map(self._text, x))}]"
        if isinstance(x, tuple):
            return f"({''.join(f'{self._text(y)}, ' for y in x)})"
        if x is None or isinstance(x, (bool, int, str)) or (isinstance(x, float) and x - x == 0):
            return repr(x)
        if isinstance(x, Tensor):
            path = self._paths.get(memory_of(x), "constant").removeprefix("model.")
            return self._global(key_of(x), path, x)
        return self._global((type(x), x), str(x).rpartition(".")[2], x)

    def _operator(self, target: OpOverload) -> str:
        # what it calls, without the method in Python that calls it
        return self._global(target, _name_of(target), target._op)

    def _global(self, key: Any, name: str, value: Any) -> str:
        """The name of something that is the same in every step."""
        if key not in self._names:
            name = self._new_name("".join(x if x.isalnum() else "_" for x in name))
            self._names[key], self._globals[name] = name, value
        return self._names[key]

    def _new_name(self, name: str) -> str:
        """A name like this one that stands for nothing yet."""
        new = next(x for x in _numbered(name) if x not in self._taken)
        self._taken.add(new)
        return new


def _name_of(operator: OpOverload) -> str:
    return str(operator._schema.name).rpartition("::")[2].strip("_")


def _numbered(name: str) -> Iterator[str]:
    """A name, and others like it."""
    if not name.isidentifier() or iskeyword(name) or name in ("step", "float", "bool"):
        name = f"x_{name}"
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1
