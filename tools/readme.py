"""Write the benchmarks' table in the README again, from the results files."""

import re
from pathlib import Path

from icl_patch.bench.summary import summary_markdown

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- benchmarks: .*? -->\n\n).*?(\n\n<!-- end of benchmarks -->)", re.S)

readme = ROOT / "README.md"
text, count = MARKED.subn(
    lambda found: found[1] + summary_markdown(ROOT / "bench" / "results") + found[2],
    readme.read_text(encoding="utf-8"),
)
if count != 1:
    raise SystemExit(
        f"expected the marks of the benchmarks once in {readme}, found them {count} times"
    )
readme.write_text(text, encoding="utf-8")
