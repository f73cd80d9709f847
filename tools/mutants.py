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
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from lint import link

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
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


# Their text, hints and names are for readers, or stop the program at once.
UNSEEN = (ast.Raise, ast.Import, ast.ImportFrom, ast.AnnAssign, ast.Pass)


def code_lines(path: str, text: str) -> set[int]:
    """The lines that hold statements which a test can notice."""
    if not path.endswith(".py"):
        return set(range(1, text.count("\n") + 2))
    seen, unseen = set[int](), set[int]()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        into = unseen if is_text or isinstance(node, UNSEEN) else seen
        into.update(range(node.lineno, last + 1))
    return seen - unseen


def meaning(path: str, text: str) -> str | None:
    """A file's code without layout and comments; None if it is none, for a brace has no other."""
    if not path.endswith(".py"):
        code = re.sub(r"\s+", " ", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S))
        return code if code.count("{") == code.count("}") else None
    try:
        compile(text, path, "exec", dont_inherit=True)
        return ast.dump(ast.parse(text))
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
    name is gone, no word is cut in two, no ``break`` stands outside a loop. And whether it changes
    more than arguments for readers, or for mistakes in this code.
    """
    seen, now = (re.sub(r"\b(help|metavar|strict)=.*", "", text) for text in (old, new))
    words = set(re.findall(r"[^\W\d]\w*", new)) - set(re.findall(r"[^\W\d]\w*", old))
    return (
        seen != now
        and words <= {"and", "or", "not", "if", "True", "False", "None", "pass"}
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
        offset, lines = 0, code_lines(path, text)
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if number in lines:
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
        made = ("build", "dist", ".*", "__pycache__", "*.egg-info", "_native.so")
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*made))
        (folder / "build").mkdir()
        for name in ("peft", "torchao"):  # the tests look for them there
            (folder / "build" / name).symlink_to(ROOT / "build" / name)
        link(folder, self.site / "icl_patch")
        self.library = folder / "icl_patch" / "ops" / "_native.so"
        package = Path(find_spec("icl_patch").origin).parent
        self.built = package / "ops" / "_native.so"
        for metadata in package.parent.glob("icl_patch-*"):  # entry points of commands
            shutil.copytree(metadata, self.site / metadata.name)
        self._restore_library()

    def _restore_library(self) -> None:
        shutil.copy2(self.built, self.library)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[bool]:
        """With a fault; gives whether it compiles."""
        target, native = self.folder / fault.path, fault.path.startswith("csrc/")
        text = target.read_text()
        target.write_text(fault.planted(text))
        try:
            yield not native or fault.path.endswith(".cu") or self._compile()
        finally:
            target.write_text(text)
            if native:
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
    """Print the survivors and the counts; returns the exit status."""
    reasons = {
        (entry["path"], entry["old"].strip(), entry["new"].strip()): entry["why"]
        for entry in run.settings["explained"]
    }
    counts, unexplained = Counter[str](), 0
    for fault in faults:
        outcome = run.results.get(fault.key, {"outcome": "not run yet"})["outcome"]
        counts[outcome] += 1
        if outcome == "survived":
            old, new = fault.old.strip(), fault.new.strip()
            why = reasons.get((fault.path, old, new))
            unexplained += why is None
            print(f"{fault.path}:{fault.line} survived: {why}\n  - {old}\n  + {new}")
    print(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return int(unexplained > 0 or FALSE_KILL in counts)


def main() -> int:
    """Run the faults that have no result yet; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="start no fault after so many")
    parser.add_argument("--fresh", action="store_true", help="forget the results so far")
    options = parser.parse_args()
    settings = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text())
    faults = list(named_faults(settings["named"]))
    for language, count in settings["sample"].items():
        faults += sampled_faults(language, count, settings["seed"])
    WORK.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        (WORK / "results.jsonl").unlink(missing_ok=True)
    run = Run(settings, options.minutes)
    run(faults)
    return report(faults, run)


if __name__ == "__main__":
    sys.exit(main())
