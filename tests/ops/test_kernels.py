"""The Triton kernels without a GPU: in Triton's interpreter, compiled ahead of time, and their
configurations.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.op_calls import Operators
from support.processes import TESTS, run_python

pytest.importorskip("triton")

from icl_patch import kernels
from icl_patch.kernels import compilation
from icl_patch.kernels.ops.attention import plan_blocks
from icl_patch.kernels.ops.linear import plan_linear
from icl_patch.kernels.runtime import config, launching
from icl_patch.kernels.runtime.config import DTYPES, Config, config_for, data_files

CHECKS = ("linear_kernel_checks.py", "kernel_checks.py", "interpreter_checks.py")
EVERYTHING = dict(compilation.launches())


# Compiled ahead of time; tools/kernel_resources.py compiles every configuration

COMPILED = [
    "untuned: linear bfloat16 N ≤ 16384, rank 1",
    "untuned: linear bfloat16 N ≤ 4096, Conv1D",
    "untuned: linear bfloat16 N ≤ 1728, recording",
    "untuned: linear bfloat16 N ≤ 16384, three maps",
    "untuned: linear bfloat16 N ≤ 16384, recording a pair",
    "untuned: linear bfloat16, recording",
    "untuned: linear float32, rank 4, 4 rows",
    "coefficients K = 5376",
    "direction K = 5376",
    "add_low_rank N = 5376",
    "add_low_rank N = 5376, with coefficients",
    "norm_pair Gemma, d = 5376",
    "norm_pair Llama, d = 576",
    "norm_pair Llama, d = 4096",
    "rms_norm Llama, d = 5376",
    "rms_norm Llama, d = 576",
    "decode_attention D = 64, bfloat16",
    "decode_attention D = 128, float32",
    "attention_pair, sum of blocks",
    "write_and_attend D = 64, bfloat16",
    "write_and_attend D = 128, float32",
    "write_and_attend, sum of blocks",
    "rotary_embedding D = 128, bfloat16",
    "gated_product gelu_tanh",
    "untuned: linear bfloat16 N ≤ 4096, experts",
    "untuned: linear float32, experts",
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills(name: str, capability: int) -> None:
    found = compilation.resources(EVERYTHING[name], capability)
    assert found.problem(capability) is None
    assert 16 <= found.registers <= 255


ODD = [(1, 1, 1), (3, 7, 0), (40, 1, 3), (5, 2**31 + 1, 2)]


@pytest.mark.parametrize("sizes", ODD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_sizes_compile(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Sizes and strides of 1 are constants to the compiler, and those beyond 32 bits have another
    type; the interpreter knows neither.
    """
    rows, n, k = sizes
    chosen = config_for("", dtype, 8)

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    z, w, bias = empty(rows, k, dtype=dtype), empty(n, k, dtype=dtype), empty(n, dtype=dtype)
    u, v, index = empty(4, 2, n), empty(4, 2, k, dtype=dtype), empty(rows, dtype=torch.int32)
    planned = [
        plan_linear(z, w, dtype, chosen, u, v, bias, index),
        plan_linear(empty(2 * rows, k, dtype=dtype), w, dtype, chosen, record=True),
    ]
    for launch in planned:
        assert compilation.compile_ahead(launch, 90).asm["cubin"]


def test_tiles_that_are_far_too_large_would_be_seen() -> None:
    for tile, dtype, rows, problem in (
        (Config(False, 16, 32, 64, 1, 1), torch.float32, 16, "spills registers"),
        (Config(True, 128, 128, 128, 8, 5), torch.bfloat16, 64, "takes {} bytes of shared memory,"),
    ):
        launch = compilation.linear_launch(tile, dtype, (21504, 5376), 0, rows)
        found = compilation.resources(launch, 90)
        assert found.problem(90).startswith(problem.format(found.shared))
    assert found.problem(90).endswith(f", there are {227 * 1024}")


def code(name: str, capability: int = 90, form: str = "ptx") -> str:
    return compilation.compile_ahead(EVERYTHING[name], capability).asm[form]


@pytest.mark.parametrize("name", ["bfloat16 N ≤ 16384", "bfloat16", "float32"])
def test_the_weight_is_read_in_large_pieces(name: str) -> None:
    """16 bytes at a time, past the registers, in either layout."""
    for variant in ("rank 1", "Conv1D"):
        assert "cp.async.cg.shared.global" in code(f"untuned: linear {name}, {variant}")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", [" N ≤ 1728", " N ≤ 4096", " N ≤ 16384", ""])
def test_one_rows_coefficients_are_copied_ahead(shape: str, capability: int) -> None:
    """A step that waited for z or v would hold up the next copy of the weight, and with few
    programs the memory.
    """
    text = code(f"untuned: linear bfloat16{shape}, rank 1", capability, "ttgir")
    loop = re.search(r"scf\.for .*?scf\.yield", text, re.S)
    assert loop is not None
    # w and z, and for the coefficient z and v
    assert loop[0].count("ttg.async_copy_global_to_local") == 4
    assert "tt.load" not in loop[0]
    assert "convert_layout" not in loop[0]


def test_matrix_units_are_used() -> None:
    name = "untuned: linear bfloat16, rank 1"
    assert "wgmma.mma_async.sync.aligned" in code(name)
    assert "mma.sync.aligned.m16n8k16" in code(name, 80)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("variant", ["rank 1", "recording"])
def test_each_running_sum_is_a_chain_of_its_own(variant: str, capability: int) -> None:
    """16 × 16 outputs and 256 of K are 32 matrix instructions: none is done by both warps, and a
    warp's 16 go to four sums, two of K by two of rows.
    """
    ptx = code(f"untuned: linear bfloat16 N ≤ 1728, {variant}", capability)
    sums = re.findall(r"mma\.sync\.aligned\.m16n8k16\S+ (\{.*?\}),", ptx)
    streams = 2 if variant == "recording" else 1
    assert (len(sums), len(set(sums))) == (16 * streams, 4 * streams)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("heads", "width"), [(9, 64), (33, 128)])
def test_a_mask_and_a_caches_room_change_no_order_of_attention(
    heads: int, width: int, capability: int
) -> None:
    """Nor does a token that is written meanwhile. The numbers that a thread of a matrix instruction
    holds follow the loads before it.
    """

    def layouts(keys: int, mask: torch.Tensor | None, *, writes: bool = False) -> list[str]:
        query, key, own = (
            torch.empty(2, *size, width, dtype=torch.bfloat16, device="meta")
            for size in ((heads,), (heads // 3, keys), (heads // 3,))
        )
        slot = torch.empty(1, dtype=torch.int64, device="meta") if writes else None
        new = (own, own.flatten(1)) if writes else None
        attend, _ = plan_blocks(query, key, key, mask, 0.1, slot, new)
        code = compilation.compile_ahead(attend, capability).asm["ttgir"]
        named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.M))
        sums = re.findall(r"(?:tt\.dot .*:|^ *\}\) :) (.*?)(?: loc.*)?$", code, re.M)
        return [re.sub(r"#\w+", lambda name: named.get(name[0], name[0]), line) for line in sums]

    expected = layouts(1024, None)
    assert len([line for line in expected if "kWidth" in line]) == 3
    for keys in (1024, 1030):
        mask = torch.empty(2, keys, dtype=torch.bool, device="meta")
        for seen in (None, mask, mask[:1].expand(2, -1)):
            assert layouts(keys, seen) == layouts(keys, seen, writes=True) == expected


def test_no_kernel_adds_in_an_order_of_its_own() -> None:
    for name in COMPILED:
        assert not re.findall(r"\b(?:atom|red)\.\S+", code(name))


# Configurations


def test_every_shape_has_a_configuration() -> None:
    """A GPU that was never seen gets the default; an entry serves up to its number of outputs."""
    for file in data_files():
        for dtype, n in itertools.product(DTYPES, (1, 640, 5376, 262144, 10**7)):
            assert config_for(file, dtype, n).block_m == 16
    names = ("NVIDIA Nothing 9000", "")
    unknown, default = (config_for(name, torch.bfloat16, 100) for name in names)
    assert unknown == default
    assert config.slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"
    first, second, *_ = data_files()["untuned"]
    assert (first.max_n, first.dtype, second.dtype) == (1728, "bfloat16", "bfloat16")
    found = [config_for("", torch.bfloat16, n) for n in (1, 1728, 1729)]
    assert found == [first.config, first.config, second.config]


def test_the_default_says_that_it_was_not_measured_and_asks_for_little() -> None:
    """And fits GPUs with less shared memory than those it is compiled for."""
    variants = (", rank 4, 4 rows", ", rank 1, 16 rows", ", recording")
    for name, launch in EVERYTHING.items():
        if name.startswith("untuned") and name.endswith(variants):
            assert compilation.compile_ahead(launch, 90).metadata.shared <= 99 * 1024
    text = (Path(kernels.__file__).parent / "configs" / "untuned.json").read_text(encoding="utf-8")
    assert "Not measured" in text


# The second call of an op goes to its compiled kernel


class Kernel:
    """Stands for a kernel and notes how it is run; what it compiles may only be run on arguments
    that the compiler takes for the same.
    """

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def __getitem__(self, grid: tuple) -> Callable:
        def run(
            *arguments: object, num_warps: int, num_stages: int, enable_fp_fusion: bool
        ) -> Compiled:
            assert not enable_fp_fusion
            self.seen.append("kernel")
            return Compiled(self.seen, (*grid, 1, 1), arguments)

        return run


class Compiled:
    def __init__(self, seen: list[str], grid: tuple, arguments: tuple) -> None:
        self.seen, self.grid, self.known = seen, grid, [seen_by_the_compiler(x) for x in arguments]

    def __getitem__(self, grid: tuple) -> Callable:
        assert grid == self.grid

        def run(*arguments: object) -> None:
            assert [seen_by_the_compiler(x) for x in arguments] == self.known
            self.seen.append("compiled")

        return run


def seen_by_the_compiler(x: object) -> object:
    if isinstance(x, torch.Tensor):
        return x.dtype, x.device, x.data_ptr() % 16 == 0
    return type(x), x


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the kernels are run, every one a stand-in."""
    seen: list[str] = []
    names = {"coefficients": "coefficient", "experts": "expert", "norms": "norm_pair"}
    for module, name in {"linear": "linear", **names}.items():
        module = sys.modules[f"icl_patch.kernels.ops.{module}"]
        monkeypatch.setattr(module, f"_{name}_kernel", Kernel(seen))
    monkeypatch.setattr(launching, "INTERPRETED", True)
    monkeypatch.setattr(launching, "_launches", {})
    return seen


M, N, K, B16 = 4, 24, 40, torch.bfloat16
OTHER_DTYPES = {"coeff": torch.float32, "expert": torch.int64}

# Each op: itself, its tensors' sizes, its options, other options, and how many kernels it runs.
OPS: dict[str, tuple[Callable, dict[str, tuple], dict, list[dict], int]] = {
    "patched_linear": (
        kernels.patched_linear,
        {"z": (M, K), "weight": (N, K), "u": (M, 32, N), "v": (M, 32, K), "bias": (N,)},
        {},
        [{"out_dtype": torch.float32}],
        2,  # the coefficients before
    ),
    "record_linears": (
        lambda z_pair, weight, bias, coeff: kernels.record_linears(
            z_pair, [weight] * 2, [bias] * 2, coeff
        ),
        {"z_pair": (2 * M, K), "weight": (N, K), "bias": (N,), "coeff": (M, 1)},
        {},
        [],
        1,
    ),
    "norm_pair": (
        kernels.norm_pair,
        {"hidden": (2 * M, K), "weight": (K,)},
        {"eps": 1e-6},
        [{"eps": 1e-5}, {"scale_offset": 1.0}, {"cast_first": False}],
        1,
    ),
    "expert_linear": (
        kernels.expert_linear,
        {"x": (M, K), "weight": (3, N, K), "expert": (M, 2), "bias": (3, N)},
        {},
        [{"out_dtype": torch.float32}],
        1,
    ),
}


def tensors_of(
    sizes: dict[str, tuple], dtype: torch.dtype = B16, rows: int = M
) -> dict[str, torch.Tensor]:
    rows_of, made = {M: rows, 2 * M: 2 * rows}, {}
    for name, (first, *rest) in sizes.items():
        dtype_of = OTHER_DTYPES.get(name, dtype)
        made[name] = torch.ones(rows_of.get(first, first), *rest, dtype=dtype_of)
    return made


def in_gaps(x: torch.Tensor) -> torch.Tensor:
    """With other strides."""
    return torch.ones(*x.shape, 2, dtype=x.dtype)[..., 0]


def off_by_one(x: torch.Tensor) -> torch.Tensor:
    """With the same strides, but not at a multiple of 16 bytes."""
    flat = torch.ones(x.numel() + 16, dtype=x.dtype)
    start = -(flat.data_ptr() // x.element_size()) % 16 + 1
    return flat[start : start + x.numel()].view(x.shape)


@pytest.mark.parametrize("name", OPS)
def test_a_second_call_goes_to_the_compiled_kernel(name: str, runs: list[str]) -> None:
    """Unless anything that a check, a plan or the compiler sees of its arguments is another."""
    op, sizes, options, others, count = OPS[name]
    base = tensors_of(sizes)
    different = [(base, options | other) for other in others]
    changed = [tensors_of(sizes, torch.float16), tensors_of(sizes, rows=M - 1)]
    changed += [base | {key: off_by_one(x)} for key, x in base.items()]
    changed += [base | {key: in_gaps(x)} for key, x in base.items() if key != "coeff"]
    different += [(tensors, options) for tensors in changed]
    for tensors, chosen in [(base, options), *different]:
        op(**tensors, **chosen)
        assert len(runs) == count
        assert "kernel" in runs
        runs.clear()
    for tensors, chosen in [*different, (tensors_of(sizes), options)]:
        op(**tensors, **chosen)
        assert runs == ["compiled"] * count
        runs.clear()


@pytest.mark.parametrize("name", OPS)
def test_what_is_wrong_is_refused_after_a_good_call(name: str, runs: list[str]) -> None:
    op, sizes, options, *_ = OPS[name]
    base = tensors_of(sizes)
    op(**base, **options)
    runs.clear()
    for key, x in base.items():
        for wrong in (x.to("meta"), x[None], *([] if x.is_floating_point() else [x + 9])):
            with pytest.raises((TypeError, ValueError), match="expected"):
                op(**base | {key: wrong}, **options)
    assert not runs


def test_a_dispatch_mode_sees_the_op(runs: list[str]) -> None:
    x = torch.ones(4, 8)
    with Operators() as found:
        kernels.norm_pair(x, x[0], 1e-6)
    assert any("norm_pair" in str(function) for function, *_ in found.seen)
    assert runs == ["kernel"]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_launch_is_on_the_device_of_its_inputs(
    monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    current, seen = [1], []

    @contextmanager
    def within(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", within)
    kernel = {(1,): lambda *_, **__: seen.append(current[-1])}
    x: Any = SimpleNamespace(device=torch.device("cuda", index), data_ptr=lambda: 0)
    launching.Launch(kernel, 1, (torch.float32,), (), (), num_warps=1)(x)
    assert seen == [index]


# All of them


@pytest.mark.parametrize("mark", ["not stress", pytest.param("stress", marks=pytest.mark.stress)])
def test_in_the_interpreter(mark: str) -> None:
    """In a process of its own: triton is interpreted or not from its import on, and an access
    outside of a tensor ends it.
    """
    options = "-W ignore -m pytest --noconftest -p no:cacheprovider"
    triton = {"ICL_PATCH_OPS": "triton", "TRITON_INTERPRET": "1"}
    paths = (TESTS / "support" / name for name in CHECKS)
    done = run_python(*options.split(), "-m", mark, *paths, **triton)
    print(done.stdout)
    crashed = done.returncode < 0 and re.search(r" in (\w+_kernel)$", done.stderr, re.M)
    assert not crashed, f"{crashed[1]} reads or writes outside of a tensor: {done.stderr[:2400]}"
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
