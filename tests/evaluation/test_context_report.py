"""The page of ``icl-patch report``: its content against the model, its size, and that hostile text
stays text; in headless Chromium, where there is one, that it fits a phone and its tables sort.
"""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import Run

from icl_patch import ContextPatcher, embedded
from icl_patch.evaluation import context_report as page
from icl_patch.evaluation.context_report import ContextReport, Group, context_report, to_html
from icl_patch.evaluation.verify import VerifiedToken
from icl_patch.models.prompts import make_prompt

CONTEXT, QUESTION = "mode upper\n", "fmrp>"
HOSTILE = (
    "</span></title><script>alert(1)</script><img src=x onerror='alert(2)'> \" & {{ 7 * 7 }}\n"
)


class Page(HTMLParser):
    """Elements with their attributes, and the text in each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        self.texts[self.inside] = self.texts.get(self.inside, "") + data

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.elements)


def measured(context: str, **options: Any) -> ContextReport:
    model, tokenizer = embedded.load()
    prompt = make_prompt(tokenizer, QUESTION, context=context)
    return context_report(model, tokenizer, prompt, **{"max_new_tokens": 5} | options)


@pytest.fixture(scope="module")
def result() -> ContextReport:
    return measured(CONTEXT)


@pytest.fixture(scope="module")
def hostile() -> ContextReport:
    return measured(HOSTILE, update="direct", groups=9, max_new_tokens=30)


def check_self_contained(html: str) -> None:
    """Nothing is loaded, and the policy allows the one script by its hash."""
    found = Page(html)
    loading = {"src", "href", "xlink:href", "srcset", "data", "action", "style", "poster"}
    for tag, attributes in found.elements:
        assert not loading & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert not re.search(r"url\(|@import", found.texts["style"])
    assert (found.count("script"), found.count("link"), found.count("img")) == (1, 0, 0)
    [policy] = [str(x["content"]) for _, x in found.elements if x.get("http-equiv")]
    digest = hashlib.sha256(found.texts["script"].encode()).digest()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_the_page_of_a_command(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    command = ("report", "--context", CONTEXT, "--kept", QUESTION, "--max-new-tokens", 5)
    status, out, _ = run(*command, "--keep-first", 1, "--out", file)
    assert status == 0 and "\nwithout the context, behind <bos>: '" in out
    assert f"{file}: {file.stat().st_size} bytes" in out
    html = file.read_text(encoding="utf-8")
    assert "<h3>Without the context, behind &lt;bos&gt;</h3>" in html
    check_self_contained(html)
    assert "http://" not in html and "https://" not in html
    model, tokenizer = embedded.load()
    found = Page(html)
    for text in (CONTEXT + QUESTION, QUESTION):
        ids = tokenizer(text, return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        answer = tokenizer.decode(new)
        assert html.count(f'<p class="text">{answer}</p>') == (2 if CONTEXT in text else 1)
    blocks, kept = len(model.model.layers), len(QUESTION) + 4
    assert found.count("rect") == blocks * kept + 1  # and the frame
    assert found.count("circle") == 5 and found.count("table") == 3
    assert found.count("tr") == (11 + 1) + (blocks + 1) + (5 + 1)


def test_one_tiny_cell_leaves_the_others_their_shades(result: ContextReport) -> None:
    """Equally many cells have each shade, and a larger one is never lighter."""
    rows = [list(row) for row in result.sizes.of_block]
    rows[0][0], rows[1][0] = 1e-30, 0.0
    heat = page._heat(replace(result.sizes, of_block=rows))
    cells = sorted(zip(chain(*rows), chain(*heat["rows"]), strict=True))
    shades = [shade for _, shade in cells]
    assert shades == sorted(shades) and shades[0] == 0
    counts = [shades.count(shade) for shade in range(1, page.LEVELS + 1)]
    assert sum(counts) == len(cells) - 1 and max(counts) - min(counts) <= 1
    assert (heat["low"], heat["high"]) == (1e-30, cells[-1][0])


def test_the_numbers_are_those_of_the_patch(result: ContextReport) -> None:
    model, tokenizer = embedded.load()
    ids = tokenizer(CONTEXT, return_tensors="pt").input_ids
    with_context = tokenizer(CONTEXT + QUESTION, return_tensors="pt").input_ids
    new = model.generate(with_context, max_new_tokens=5, do_sample=False)[:, -5:]
    kept = torch.cat([with_context[:, ids.shape[1] :], new[:, :-1]], 1)
    with ContextPatcher(model) as patcher:
        patch = patcher.compute(ids, kept)
    for token in range(kept.shape[1]):
        squares = [0.0] * len(patch.blocks)
        for name, change in patch.weight_changes(0, token):
            block = next(n for n, x in enumerate(patch.blocks) if name.startswith(f"{x.path}."))
            squares[block] += float(change.double().square().sum())
        for block, square in enumerate(squares):
            assert result.sizes.of_block[block][token] == pytest.approx(square**0.5, rel=1e-5)
    assert result.sizes.tokens == 1
    assert "".join(group.text for group in result.groups) == f"<bos>{CONTEXT}"
    assert [group.change is None for group in result.groups] == [True] + [False] * len(CONTEXT)
    # the word and the end of its line say what to do; what "mode" begins with says little
    changes = {group.start: group.change or 0 for group in result.groups}
    assert max(changes, key=lambda start: changes[start]) == len(CONTEXT)
    assert result.passed and result.answers["patched"] == result.answers["with_context"]
    assert [step.linf for step in result.verified.steps] == [0.0] * 5


def test_a_broken_patch_is_seen(result: ContextReport) -> None:
    """Other errors, other tokens and another answer are on the page."""
    steps = [VerifiedToken(65, True, True, 0.0, 0.0), VerifiedToken(66, False, False, 0.037, 0.5)]
    broken = replace(
        result,
        answers={**result.answers, "patched": "something else"},
        tokens=["A", "B"],
        verified=replace(result.verified, steps=steps),
    )
    html = to_html(broken)
    assert not broken.passed and "promise kept: no: the patched answer is not" in html
    assert html.count('<circle class="dot"') == html.count('<path class="cross"') == 1
    assert "<title>B: 0.037, another token</title>" in html
    heights = page._chart(broken.verified)
    assert heights["steps"][0] == 0 < heights["noise"] < heights["steps"][1] <= 1
    not_numbers = [replace(steps[0], linf=value) for value in (float("inf"), float("nan"))]
    to_html(replace(broken, verified=replace(result.verified, steps=not_numbers)))


def test_hostile_text_stays_text(hostile: ContextReport) -> None:
    evil = '"><script>alert(3)</script>'
    result = replace(
        hostile,
        answers=dict.fromkeys(hostile.answers, HOSTILE),
        question=HOSTILE,
        verified=replace(hostile.verified, model=evil, family=evil),
        sizes=replace(hostile.sizes, of_parameter={evil: hostile.sizes.of_block}),
    )
    html = to_html(result)
    check_self_contained(html)
    found = Page(html)
    assert found.texts["h1"].strip() == f"What a context changes in {evil}"
    shown = HOSTILE.replace("\n", "↵\n")
    assert found.texts["span"].startswith(f"<bos>{shown}") and "49" not in found.texts["span"]
    assert found.texts["p"].count(HOSTILE) == 4
    assert len([group for group in result.groups if group.change is not None]) == 9


def test_the_largest_page_is_below_a_megabyte(result: ContextReport) -> None:
    """126 blocks, thousands of kept tokens, a context of a million characters that are long in
    HTML.
    """
    norms = {f"mlp.a_module_with_a_long_name_{n}": torch.rand(126, 1, 5000) for n in range(5)}
    fake: Any = SimpleNamespace(norms=lambda: norms, layers=range(126))
    sizes = page._sizes(fake, ["'" * 20] * 5000)
    assert sizes.tokens > 1
    large = replace(
        result,
        question="'" * 100_000,
        answers=dict.fromkeys(result.answers, "'" * 100_000),
        tokens=["'" * 20] * 3000,
        verified=replace(result.verified, steps=result.verified.steps * 600),
        sizes=sizes,
        groups=[Group("'" * 4000, n, n + 9, 0.123456789, 5, 0.1) for n in range(256)],
    )
    html = to_html(large).encode()
    assert 300_000 < len(html) < 1_000_000
    check_self_contained(html.decode())


def test_a_long_context_is_cut_into_groups() -> None:
    tokenizer = embedded.load()[1]
    ids = tokenizer(CONTEXT * 100).input_ids
    special = [token in tokenizer.all_special_ids for token in ids]
    spans, left_out = page._cut(special, 64)
    assert spans[0] == (0, 1) and spans[1:] == left_out  # the beginning's token stays
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert spans[-1][1] == len(ids) and len(spans) <= 65
    assert {stop - start for start, stop in spans[1:-1]} == {18}  # 1100 / 64, rounded up


def test_columns_are_root_mean_squares() -> None:
    size = torch.arange(2 * 201, dtype=torch.float64).reshape(2, 1, 201)
    fake: Any = SimpleNamespace(norms=lambda: {"mlp": size, "norm": size}, layers=range(2))
    sizes = page._sizes(fake, ["a", "b", "c"] * 67)
    assert sizes.tokens == 3 and sizes.columns == ["abc"] * 67
    first = ((0 + 1 + 4) / 3) ** 0.5
    assert sizes.of_parameter["norm"][0][0] == pytest.approx(first)
    assert sizes.of_block[0][0] == pytest.approx(first * 2**0.5)


PROBE = """<!DOCTYPE html><iframe src="report.html" width="390" height="800"></iframe><pre></pre>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument, found = {};
  page.querySelectorAll("details").forEach(details => { details.open = true; });
  const root = page.documentElement, table = page.querySelector("table");
  const column = n => [...table.tBodies[0].rows].map(row => row.cells[n].textContent);
  const [head] = [...table.tHead.rows[0].cells].slice(3);
  found.charts = [...page.querySelectorAll("figure .scroll")].map(
    box => [box.scrollWidth > box.clientWidth, box.classList.contains("wider")]);
  found.overflow = root.scrollWidth - root.clientWidth;
  found.dark = page.defaultView.matchMedia("(prefers-color-scheme: dark)").matches;
  found.colours = ["color", "backgroundColor"].map(
    name => page.defaultView.getComputedStyle(page.body)[name]);
  head.firstChild.focus();
  found.focused = page.activeElement === head.firstChild;
  head.firstChild.click();
  found.down = column(3); found.sorted = head.ariaSort;
  head.firstChild.click();
  found.up = column(3);
  found.alerted = page.defaultView.alerted ?? false;
  document.querySelector("pre").textContent = JSON.stringify(found);
};
</script>"""


def brightness(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / (3 * 255)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser(dark: bool, hostile: ContextReport, tmp_path: Path) -> None:
    """At a phone's width nothing overflows, buttons sort, and colours follow the system's."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    html = to_html(hostile).replace("alert(", "alerted=(")
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    (tmp_path / "probe.html").write_text(PROBE, encoding="utf-8")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--allow-file-access-from-files"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    url = (tmp_path / "probe.html").as_uri()
    shown = subprocess.run([*command, url], capture_output=True, text=True, timeout=120)
    found = json.loads(re.search(r"<pre>(.*)</pre>", shown.stdout)[1])  # type: ignore[index]
    assert found["overflow"] == 0 and found["focused"] and not found["alerted"]
    assert found["charts"] == [[True, True], [True, True]]  # they scroll, and say so
    assert found["dark"] is dark
    ink, paper = map(brightness, found["colours"])
    assert (ink > 0.8 and paper < 0.2) if dark else (ink < 0.2 and paper > 0.8)
    assert found["sorted"] == "descending" and len(found["down"]) == 9
    for order, column in ((True, found["down"]), (False, found["up"])):
        assert column == sorted(column, key=float, reverse=order)
    assert float(found["down"][0]) > float(found["up"][0])
