"""Plant faults one at a time and run the tests that should notice each.

    make mutants                  # goes on where it stopped, for at most 30 minutes
    make mutants MUTANTS=--fresh  # from the beginning

The faults are those that ``tools/mutants.toml`` names, and a random sample of changes of one line
(Python, C++, Triton), which ``universalmutator`` makes: another operator, a condition negated, a
statement left out. A change of C++ that does not compile is no fault. The same file holds the seed
of the sample, the tests for each part of the code, and the reason for every fault that is known to
survive. Changes of comments, docstrings, type hints and the text of errors are not sampled.

Each fault is planted in a copy of the repository, in ``build/mutants``, as many copies as there are
processors. Results are written as they come, to ``build/mutants/results.jsonl``. A test that
notices a fault is run once more without it. The exit status is 1 if a fault survives without a
reason, or if such a test fails without the fault.
"""

import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import queue
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
PLACES = {
    "icl_patch": "icl_patch",
    "triton_kernels": "icl_patch/kernels",
    "bench": "icl_patch/bench",
}
LANGUAGES = {
    "python": ("icl_patch/**/*.py", ["universal.rules", "python.rules"]),
    "triton": ("triton_kernels/**/*.py", ["universal.rules", "python.rules"]),
    "c++": ("csrc/**/*", ["universal.rules", "c_like.rules", "cpp.rules"]),
}
FALSE_KILL = "its test fails without it"
CPU_SECONDS = 400  # of one process of tests: a fault may make a loop endless


@dataclass(frozen=True)
class Fault:
    """A change of one place in a file: ``old`` becomes ``new`` at this offset."""

    path: str
    line: int
    offset: int
    old: str
    new: str
    named: bool = False

    @property
    def key(self) -> str:
        """The same as long as the line and the fault are."""
        content = f"{self.path}|{self.old.strip()}|{self.new.strip()}"
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def planted(self, text: str) -> str:
        """The file's text with the fault."""
        end = self.offset + len(self.old)
        assert text[self.offset : end] == self.old
        return text[: self.offset] + self.new + text[end:]


def _is_idle(part: ast.stmt, owner: ast.AST) -> bool:
    is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
    is_hint = isinstance(part, ast.AnnAssign) and part.value is None
    has_fields = isinstance(owner, ast.ClassDef) and (owner.decorator_list or owner.bases)
    return is_text or isinstance(part, ast.Pass) or (is_hint and not has_fields)


class _Meaning(ast.NodeTransformer):
    """Leaves out the parts that no test should depend on: docstrings, type hints, the text of
    errors.
    """

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Without strings that stand alone, ``pass``, and the type hints of ``node``."""
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not _is_idle(part, node)]  # type: ignore[attr-defined]
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """With keywords in one order, without those for readers and for mistakes in this code."""
        unseen = ("help", "metavar", "strict")
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in unseen]
        node.keywords.sort(key=lambda keyword: keyword.arg or "")
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.Raise:
        """Without the strings in it."""
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                part.value = ""
            elif isinstance(part, ast.JoinedStr):
                part.values = []
        return node


def meaning(path: str, text: str) -> str | None:
    """A file's code without layout and comments; None if it is none, for a brace has no other."""
    if not path.endswith(".py"):
        code = re.sub(r"\s+", " ", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S))
        return code if code.count("{") == code.count("}") else None
    try:
        compile(text, path, "exec", dont_inherit=True)
        return ast.dump(_Meaning().visit(ast.parse(text)))
    except (SyntaxError, ValueError):
        return None


def named_faults(entries: list[dict[str, str]]) -> Iterator[Fault]:
    """The faults of ``[[named]]``; each ``old`` must occur once in its file."""
    for entry in entries:
        text = (ROOT / entry["path"]).read_text()
        if text.count(entry["old"]) != 1:
            raise SystemExit(
                f"expected {entry['old']!r} once in {entry['path']}, found it"
                f" {text.count(entry['old'])} times: mend tools/mutants.toml"
            )
        offset = text.index(entry["old"])
        line = text.count("\n", 0, offset) + 1
        yield Fault(entry["path"], line, offset, entry["old"], entry["new"], named=True)


def plausible(old: str, new: str) -> bool:
    """Whether a changed line is more than a way to stop the program at once: no imported or defined
    name is gone, no word is cut in two, no ``break`` stands outside a loop.
    """
    words = set(re.findall(r"[^\W\d]\w*", new)) - set(re.findall(r"[^\W\d]\w*", old))
    return (
        words <= {"and", "or", "not", "if", "True", "False", "None", "pass"}
        and "\n" not in new.rstrip("\n")
        and not re.match(r"\s*(from|import|def|class|@|#|struct|namespace|template)", old)
    )


def sampled_faults(language: str, count: int, seed: int) -> Iterator[Fault]:
    """Random lines, each with a random change of the code's meaning."""
    from universalmutator.mutator import mutants_regexp

    pattern, rules = LANGUAGES[language]
    files = [path for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    places = []
    for path, text in texts.items():
        offset = 0
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            places.append((f"{seed} {path} {line}", path, number, offset, line))
            offset += len(line)
    # by a hash of the line itself: changes elsewhere leave the sample as it is
    places.sort(key=lambda place: hashlib.sha256(place[0].encode()).digest())
    for name, path, number, offset, line in places:
        with contextlib.redirect_stdout(io.StringIO()):
            made = mutants_regexp([line], rules, ignorePatterns=[])
        random.Random(name).shuffle(made)
        before = meaning(path, texts[path])
        for new in [new for _, new, *_ in made if plausible(line, new)][:20]:
            fault = Fault(path, number, offset, line, new)
            if meaning(path, fault.planted(texts[path])) not in (None, before):
                yield fault
                count -= 1
                break
        if count == 0:
            return


class Copy:
    """A copy of the repository in which faults are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site = folder, folder / "site"
        shutil.rmtree(folder, ignore_errors=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "build").mkdir()
        for name in ("peft", "torchao"):  # the tests look for them there
            (folder / "build" / name).symlink_to(ROOT / "build" / name)
        for source, place in PLACES.items():
            shutil.copytree(folder / source, self.site / place)
        self.library = self.site / "icl_patch" / "ops" / "_native.so"
        built = subprocess.run(
            [
                sys.executable,
                "-P",
                "-c",
                "from icl_patch.ops import native; print(native.__file__)",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        self.built = Path(built).with_name("_native.so")
        for metadata in self.built.parents[2].glob("icl_patch-*"):  # entry points of commands
            shutil.copytree(metadata, self.site / metadata.name)
        self._restore_library()

    def _restore_library(self) -> None:
        shutil.copy2(self.built, self.library)

    @contextlib.contextmanager
    def planted(self, fault: Fault | None) -> Iterator[bool]:
        """With a fault in both places that a file has here; gives whether it compiles."""
        if fault is None:
            yield True
            return
        top, _, rest = fault.path.partition("/")
        targets = [self.folder / fault.path]
        targets += [self.site / PLACES[top] / rest] if top in PLACES else []
        text = targets[0].read_text()
        for target in targets:
            target.write_text(fault.planted(text))
        try:
            yield top != "csrc" or fault.path.endswith(".cu") or self._compile()
        finally:
            for target in targets:
                target.write_text(text)
            if top == "csrc":
                self._restore_library()

    def _compile(self) -> bool:
        command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(self.site)]
        environment = os.environ | {"ICL_PATCH_NATIVE": "cpu"}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True)
        return done.returncode == 0

    def run(self, tests: list[str]) -> tuple[int, str]:
        """pytest's exit status, and the first test that failed."""
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"}
        limit = (resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        done = subprocess.run(
            [*command, *tests],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(*limit),
        )
        if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise SystemExit(
                f"expected tests in {tests}, pytest found none: mend tools/mutants.toml"
            )
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
        return done.returncode, failed[1] if failed else f"exit status {done.returncode}"


def tests_of(path: str, table: dict[str, list[str]]) -> list[str]:
    """The tests of the longest name in the table that the path begins with."""
    return table[max((name for name in table if path.startswith(name)), key=len)]


class Run:
    """Runs the faults without a result, in one copy for each processor."""

    def __init__(self, settings: dict[str, Any], minutes: float) -> None:
        self.settings, self.end = settings, time.monotonic() + 60 * minutes
        self.file = WORK / "results.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.results = {entry["key"]: entry for entry in map(json.loads, lines)}
        self.copies: queue.Queue[Copy] = queue.Queue()

    def __call__(self, faults: list[Fault]) -> None:
        """Each fault that has no result yet."""
        left = [fault for fault in faults if fault.key not in self.results]
        workers = min(os.cpu_count() or 1, len(left))
        for number in range(workers):
            self.copies.put(Copy(WORK / f"copy-{number}"))
        with ThreadPoolExecutor(max(workers, 1)) as pool:
            for _ in pool.map(self._one, left):
                pass

    def _one(self, fault: Fault) -> None:
        if time.monotonic() > self.end:
            return
        tests = tests_of(fault.path, self.settings["tests"])
        copy, start = self.copies.get(), time.monotonic()
        try:
            with copy.planted(fault) as compiles:
                status, by = copy.run(tests) if compiles else (0, "")
            outcome = ("killed" if status else "survived") if compiles else "does not compile"
            # a test that fails without the fault too has not noticed it
            if "::" in by and status and copy.run([by])[0]:
                outcome = FALSE_KILL
        finally:
            self.copies.put(copy)
        result = asdict(fault) | {"key": fault.key, "outcome": outcome, "by": by if status else ""}
        result |= {"seconds": round(time.monotonic() - start), "tests": tests}
        self.results[fault.key] = result
        with self.file.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{outcome:10} {fault.path}:{fault.line}  {result['by']}", flush=True)


def report(faults: list[Fault], run: Run) -> int:
    """Print the table of survivors and the counts; returns the exit status."""
    reasons = {
        (entry["path"], entry["old"].strip(), entry["new"].strip()): entry["why"]
        for entry in run.settings.get("explained", [])
    }
    table = Table("fault", "was", "is", "why it may survive", title="Survivors")
    counts: dict[str, int] = {}
    unexplained = 0
    for fault in faults:
        outcome = run.results.get(fault.key, {"outcome": "not run yet"})["outcome"]
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome == "survived":
            why = reasons.get((fault.path, fault.old.strip(), fault.new.strip()), "")
            unexplained += not why
            table.add_row(f"{fault.path}:{fault.line}", fault.old.strip(), fault.new.strip(), why)
    console = Console(width=160)
    if table.row_count:
        console.print(table)
    console.print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return int(unexplained > 0 or FALSE_KILL in counts)


def main() -> int:
    """Run the faults that have no result yet; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="start no fault after so many")
    parser.add_argument("--named", action="store_true", help="the named faults alone")
    parser.add_argument("--fresh", action="store_true", help="forget the results so far")
    parser.add_argument("--list", action="store_true", help="print the faults and run none")
    options = parser.parse_args()
    settings = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())
    faults = list(named_faults(settings["named"]))
    if not options.named:
        for language, count in settings["sample"].items():
            faults += sampled_faults(language, count, settings["seed"])
    if options.list:
        for fault in faults:
            print(f"{fault.path}:{fault.line}\n  - {fault.old.strip()}\n  + {fault.new.strip()}")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        (WORK / "results.jsonl").unlink(missing_ok=True)
    run = Run(settings, options.minutes)
    run(faults)
    return report(faults, run)


if __name__ == "__main__":
    sys.exit(main())
