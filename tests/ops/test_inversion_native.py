"""The native ops as torch ops: built, the same on every instruction set, traced, compiled, and
replaced where they are missing.
"""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from support.inversion import mixed_rows, needs_native, same_rows
from support.numeric import by_columns
from support.processes import run_python
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from icl_patch import ops
from icl_patch.ops import native

# Instruction sets

DIGEST = """
import hashlib, itertools, sys, torch
sys.path.append("tests/ops"); import test_attention, test_native_linear
from support.inversion import mixed_rows
from support.numeric import FLOATS, normal, seeded
from icl_patch import ops; from icl_patch.ops import native
digest = hashlib.sha256()
# less than a vector, one without its last lane, whole vectors, and chunks of 256 and 512 and 1 more
for dtype, n in itertools.product(FLOATS.values(), (3, 15, 64, 257, 2049)):
    m, g = mixed_rows(n, 2, dtype)
    g[0, -1], m[1, 0] = torch.nan, torch.inf
    h = normal(seeded(n), *g.shape, dtype=dtype)
    rms = torch.rand(len(g), generator=seeded(0)).to(dtype)
    for scale in (m, m[2]):
        results = [
            *(
                ops.invert_rmsnorm(g, scale, rms, eps, fallback)
                for eps, fallback in ((0.0, None), (0.1, h))
            ),
            ops.stable_scale(g, scale, h, 1e-6),
            ops.stable_scale(g * (h > 1), scale, h, 1.0),
        ]
        for result in results:
            for part in vars(result).values():
                digest.update(part.numpy().tobytes())
    if dtype == torch.float64:
        continue
    compiled = torch.ops.icl_patch
    parts = [*compiled.norm_pair(g, m[3], 1e-5, 1.0, dtype == torch.float16)]
    parts += [compiled.rms_norm(g, m, 0.0), *compiled.read_direction(m)]
    for x, act in itertools.product((m, 1e3 * g, h / 9), ("gelu_tanh", "silu")):
        parts.append(compiled.gated_product(x, h, act))
    for part in parts:
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
test_native_linear.check_products()
for dtype, shape in itertools.product((torch.float32, torch.float16), test_attention.SHAPES[1:6:2]):
    test_attention.test_decode_attention(dtype, shape)
for dtype, shape in itertools.product((torch.float32, torch.bfloat16), test_attention.ROTATED):
    test_attention.test_rotary_embedding(dtype, shape)
print(native.cpu_instructions, digest.hexdigest())
"""
INSTRUCTIONS, UNKNOWN = ("portable", "avx2", "avx512", "avx512_bf16", "amx"), "sse9"
# The package chooses its instruction set once: each has a process. Importing transformers takes
# longer than all that is computed there, so they share it.
ON_EACH = f"""
import os, sys, torch, transformers.modeling_utils
for instructions in {(*INSTRUCTIONS, UNKNOWN)}:
    child = os.fork()
    if child == 0:
        os.environ["ICL_PATCH_CPU"] = instructions
        try:
            exec({DIGEST!r})
        except ValueError as error:
            if "expected ICL_PATCH_CPU=" not in str(error):
                raise
            print(instructions, error)
        sys.stdout.flush()
        os._exit(0)  # freeing all modules takes as long as all that is computed
    if os.waitpid(child, 0)[1]:
        sys.exit(instructions)
"""


@pytest.fixture(scope="module")
def said_on() -> dict[str, str]:
    """The digest of each instruction set, or why it was refused."""
    done = run_python("-c", ON_EACH)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert tuple(said) == (*INSTRUCTIONS, UNKNOWN)
    return said


@needs_native
def test_instruction_sets_agree_bit_for_bit(said_on: dict[str, str]) -> None:
    digests = {name: said for name, said in said_on.items() if "expected" not in said}
    assert {"portable", native.cpu_instructions} <= set(digests)
    if len(digests) == 1:
        pytest.skip("this processor has one")
    assert len(set(digests.values())) == 1, digests


@needs_native
def test_an_unknown_instruction_set_is_refused(said_on: dict[str, str]) -> None:
    message = said_on[UNKNOWN]
    assert "expected ICL_PATCH_CPU=amx, avx512_bf16, avx512, avx2 or portable" in message
    assert f"got {UNKNOWN!r}" in message


# As torch ops


def calls() -> Iterator[tuple[Callable[..., tuple[Tensor, ...]], tuple]]:
    """Of both ops: dtypes, strides, a shared scale and one per row, a fallback and none, no
    rows.
    """
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        m, g = mixed_rows(5, 1, dtype)
        h, rms = m.flip(0), torch.ones(len(m), dtype=dtype)
        native_ops = torch.ops.icl_patch
        invert, update = native_ops.invert_rmsnorm.default, native_ops.stable_scale.default
        yield invert, (g, m, rms)
        yield invert, (g, m[0], rms, 0.5, h)
        yield invert, (by_columns(g), m[:, :1].expand(m.shape), rms, 0.5, h[0].expand(m.shape))
        yield invert, (g[:0], m[0], rms[:0])
        yield update, (g, m, h)
        yield update, (g[1:], m[0].double(), h[:-1], 0.5)
        yield update, (g[:0], m[:0], h[:0], 0.1)


@needs_native
@pytest.mark.parametrize("index", range(0, 28, 4))  # each of seven calls in one of four dtypes
def test_opcheck(index: int) -> None:
    op, arguments = list(calls())[index]
    torch.library.opcheck(op, arguments)


def inverted(g: Tensor, m: Tensor, rms: Tensor) -> ops.RMSNormInverse:
    return ops.invert_rmsnorm(2 * g, m, rms, 1e-6, g)


def updated(g: Tensor, m: Tensor, h: Tensor) -> ops.StableScale:
    return ops.stable_scale(2 * g, m, h, 1e-6)


@needs_native
def test_compiled_gives_the_same_bits() -> None:
    torch._dynamo.reset()
    m, g = mixed_rows(24, 3)  # of one op alone inductor needs no compiler
    compiled = torch.compile(ops.stable_scale, fullgraph=True, backend="inductor")
    for scale in (m, m[1]):
        assert same_rows(compiled(g, scale, m.flip(0)), ops.stable_scale(g, scale, m.flip(0)))


@needs_native
@pytest.mark.parametrize("per_row", [False, True], ids=["shared", "per-row"])
@pytest.mark.parametrize("function", [inverted, updated])
def test_a_new_batch_size_does_not_recompile(function: Callable, per_row: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    m, g = mixed_rows(24, 3)
    for rows in (7, 8, 2, 33, 42):
        third = torch.ones(rows) if function is inverted else m[:rows].flip(0)
        arguments = [g[:rows], m[:rows] if per_row else m[0], third]
        for x in arguments if per_row else (arguments[0], arguments[2]):
            torch._dynamo.mark_dynamic(x, 0)
        assert same_rows(compiled(*arguments), function(*arguments))
    assert counter.frame_count == 1


# Where there is no library for CUDA; without any: test_packaging.py


@needs_native
def test_a_cpu_build_warns_for_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cuda_architectures", ())
    native._warn.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert native.serves("cpu")
        message = "for cuda tensors; the native library: it was built where there was no nvcc"
        with pytest.warns(UserWarning, match=message):
            assert not native.serves("cuda")
    finally:
        native._warn.cache_clear()
    assert "no CUDA" in native.describe()
