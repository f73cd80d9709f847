"""Check the symbols of the native library: ``python tools/lint_native.py [LIBRARY]``.

They belong to torch's stable ABI, none to Python, and the oldest torch that pyproject.toml allows
has them.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from torch_abi_audit import inspect_extension
from torch_abi_audit.torch_versions import parse_version

package = find_spec("icl_patch")
assert package and package.origin
built = Path(package.origin).parent / "ops" / "_native.so"
library = Path(sys.argv[1]) if sys.argv[1:] else built
if not library.exists():
    print("no native library was built here")
    sys.exit()
[oldest] = re.findall(r'"torch>=([\d.]+)"', Path("pyproject.toml").read_text(encoding="utf-8"))
report = inspect_extension(library)
torch, python = report.torch, report.cpython
findings = [f"refers to {symbol}, which is not stable" for symbol in torch.unstable_symbols]
findings += [f"refers to {symbol}, of no known torch" for symbol in torch.unknown_shim_symbols]
if parse_version(torch.min_torch_version or "0.0.0") > parse_version(f"{oldest}.0"):
    symbols = ", ".join(torch.version_defining_symbols)
    findings.append(f"needs torch {torch.min_torch_version}, not {oldest}: {symbols}")
if python.compliant or python.violations:
    findings.append("refers to Python")
if not torch.uses_torch:
    findings.append(report.error or "refers to nothing of torch")
count, least = torch.stable_shim_count, torch.min_torch_version
print(f"{library.name}: {count} symbols of torch, from {least} on")
sys.exit("\n".join(f"{library.name} {finding}" for finding in findings) or 0)
