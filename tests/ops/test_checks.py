"""What ops refuse, in words that name the argument, what was expected and what came: with gradients
on, where the arguments are checked first, and off, where the native op is tried before.
"""

import pytest
import torch
from support.numeric import FLOATING, check_refused

from icl_patch import ops

ONES = torch.ones
LINEAR = {"z": ONES(3, 5), "weight": ONES(4, 5), "u": ONES(3, 4), "v": ONES(3, 5), "bias": ONES(4)}
POOL = {"u": ONES(2, 1, 4), "v": ONES(2, 1, 5)}
LOW_RANK = {"y": ONES(3, 4), "z": ONES(3, 5), "u": ONES(3, 4), "v": ONES(3, 5)}
EXPERTS = {"x": ONES(3, 5), "weight": ONES(4, 7, 5), "expert": torch.zeros(3, 2).long()}
ATTENTION = {"query": ONES(2, 4, 3), "key": ONES(2, 2, 5, 3), "value": ONES(2, 2, 5, 3)}
WRITTEN = {
    "query": ONES(2, 4, 1, 3),
    "keys": ONES(2, 2, 5, 3),
    "values": ONES(2, 2, 5, 4),
    "key": 2 * ONES(2, 2, 1, 3),
    "value": 2 * ONES(2, 8),
    "slot": torch.tensor([4]),
}
KEYS = ONES(1, 2, 1, 3)
NORM = {"x": ONES(3, 5), "scale": ONES(5), "eps": 1e-5}
PAIR = {"hidden": ONES(4, 5), "weight": ONES(5), "eps": 1e-5}
ROTARY = dict.fromkeys(("query", "key"), ONES(2, 3, 1, 6)) | dict.fromkeys(
    ("cos", "sin"), ONES(2, 1, 6)
)
GATED = {"gate": ONES(3, 5), "up": ONES(3, 5), "activation": "silu"}
INVERT = {"target": ONES(3, 5), "scale": ONES(5), "rms": ONES(3)}
META, INTS = ONES(4, 5, device="meta"), ONES(3, 5).int()


def rows(*numbers: int) -> dict:
    return POOL | {"index": torch.tensor(numbers)}


KNOWN = "M = 3, K = 5, N = 4"
ERRORS = {
    ops.patched_linear: (
        LINEAR,
        [
            ({"z": ONES(5)}, ValueError, "expected z (M, K), got (5,)"),
            ({"weight": ONES(4, 6)}, ValueError, "weight (N, K), M = 3, K = 5, got (4, 6)"),
            ({"weight": ONES(4, 5).bfloat16()}, TypeError, "weight in z's dtype, got torch.bfl"),
            ({"weight": META}, ValueError, "expected weight on cpu, got meta"),
            ({"bias": ONES(5)}, ValueError, f"expected bias (N), {KNOWN}, got (5,)"),
            ({"bias": ONES(1, 4)}, ValueError, f"expected bias (N), {KNOWN}, got (1, 4)"),
            ({"bias": ONES(4).half()}, TypeError, "expected bias in z's dtype, got torch.float16"),
            ({"u": ONES(3, 5)}, ValueError, f"u (M, N) or (P, R, N), {KNOWN}, got (3, 5)"),
            ({"u": None}, ValueError, "expected both u and v, or neither of them and no index"),
            ({"u": ONES(3, 1, 4)}, ValueError, "u and v of 2 dimensions or more, got 3, 2"),
            (POOL, ValueError, "expected u and v of one row or 3, got 2"),
            ({"u": ONES(3, 2, 4), "v": ONES(3, 1, 5)}, ValueError, "P = 3, R = 2, got (3, 1, 5)"),
            ({"index": torch.zeros(3).long()}, ValueError, "of 3 dimensions or more, got 2, 2"),
            (rows(0, 0), ValueError, "expected index (M), "),
            (rows(0, 0, 0) | {"index": ONES(3)}, TypeError, "index in integers, got torch.float32"),
            (rows(0, 2, -1), ValueError, "expected index from -1 to 1, got -1 to 2"),
            *[
                (POOL | {"index": torch.tensor([0, 2, 1]).to(x)}, ValueError, "-1 to 1, got 0 to 2")
                for x in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
            ],
            (rows(0, 1, -2), ValueError, "expected index from -1 to 1, got -2 to 1"),
            (
                POOL | {"index": torch.zeros(3, dtype=torch.int64, device="meta")},
                ValueError,
                "expected index on cpu, got meta",
            ),
            ({"out_dtype": torch.int8}, TypeError, "expected a floating out_dtype"),
            ({"path": "row"}, ValueError, "expected path 'gemv' or 'gemm', got 'row'"),
        ],
    ),
    ops.record_linear: (
        {"z_pair": ONES(4, 5), "weight": ONES(4, 5)},
        [
            ({"z_pair": ONES(3, 5)}, ValueError, "expected the rows of two streams, got 3"),
            ({"z_pair": ONES(())}, ValueError, "expected z_pair (2M, K), got ()"),
            ({"z_pair": ONES(4)}, ValueError, "expected z_pair (2M, K), got (4,)"),
        ],
    ),
    ops.add_low_rank: (
        LOW_RANK,
        [
            ({"y": ONES(4)}, ValueError, "expected y (M, N), got (4,)"),
            ({"y": ONES(3, 4).long()}, TypeError, FLOATING.format("y", "int64")),
            ({"y": ONES(2, 4)}, ValueError, "expected z (M, K), M = 2, N = 4, got (3, 5)"),
            ({"y": ONES(3, 5)}, ValueError, "N = 5, K = 5, got (3, 4)"),
        ],
    ),
    ops.expert_linear: (
        EXPERTS,
        [
            ({"expert": ONES(3, 2)}, TypeError, "expected expert in integers, got torch.float32"),
            ({"expert": torch.zeros(3).long()}, ValueError, "expected expert (M, k), "),
            ({"x": ONES(2, 5)}, ValueError, "expected expert (M, k), M = 2, "),
            ({"x": ONES(3, 2, 6)}, ValueError, "expected weight (E, N, K), M = 3, k = 2, K = 6, "),
            ({"weight": ONES(4, 7, 5).half()}, TypeError, "expected weight in x's dtype"),
            ({"bias": ONES(7)}, ValueError, "expected bias (E, N), "),
            ({"expert": torch.full((3, 2), 4)}, ValueError, "expert from 0 to 3, got 4 to 4"),
            ({"expert": torch.full((3, 2), -1)}, ValueError, "expert from 0 to 3, got -1 to -1"),
        ],
    ),
    ops.rms_norm: (
        NORM,
        [
            ({"x": ONES(3, 0), "scale": ONES(0)}, ValueError, "expected d ≥ 1, got 0"),
            ({"scale": ONES(2, 5)}, ValueError, "scale (M, d) or (d), M = 3, d = 5, got (2, 5)"),
            ({"scale": INTS}, TypeError, FLOATING.format("scale", "int32")),
            ({"eps": -1.0}, ValueError, "expected a finite eps ≥ 0, got -1.0"),
        ],
    ),
    ops.norm_pair: (
        PAIR,
        [
            ({"hidden": ONES(3, 5)}, ValueError, "expected the rows of two streams, got 3"),
            ({"weight": ONES(2, 5)}, ValueError, "weight (d), 2M = 4, d = 5, got (2, 5)"),
        ],
    ),
    ops.gated_product: (
        GATED,
        [
            ({"activation": "relu"}, ValueError, "activation 'gelu_tanh' or 'silu', got 'relu'"),
            ({"up": ONES(2, 5)}, ValueError, "expected up (M, N), M = 3, N = 5, got (2, 5)"),
            ({"up": ONES(3, 5).half()}, TypeError, "up in gate's dtype, got torch.float16"),
        ],
    ),
    ops.decode_attention: (
        ATTENTION,
        [
            ({"query": ONES(4, 3)}, ValueError, "expected query (B, H, D), got (4, 3)"),
            ({"query": ONES(2, 3, 3)}, ValueError, "keys' heads that divides 3, got 2"),
            ({"value": ONES(2, 2, 4, 3)}, ValueError, "expected value (B, G, S, E), "),
            ({"key": ONES(2, 2, 5, 3).half()}, TypeError, "key in query's dtype, got"),
            ({"mask": ONES(2, 5)}, TypeError, "expected mask in bools, got torch.float32"),
        ],
    ),
    ops.attention_pair: (
        ATTENTION | {"slot": torch.tensor([4])},
        [
            ({"slot": torch.tensor([5])}, ValueError, "expected slot from 0 to 4, got 5 to 5"),
            ({"slot": torch.tensor([1, 2])}, ValueError, "expected slot of one column, got 2"),
            ({"slot": torch.ones(1)}, TypeError, "expected slot in integers, got torch.float32"),
            ({"query": ONES(2, 3, 3)}, ValueError, "keys' heads that divides 3, got 2"),
        ],
    ),
    ops.write_and_attend: (
        WRITTEN,
        [
            ({"query": ONES(2, 4, 3)}, ValueError, "expected query (B, H, 1, D), got (2, 4, 3)"),
            ({"query": ONES(2, 4, 2, 3)}, ValueError, "(B, H, 1, D), got (2, 4, 2, 3)"),
            ({"query": ONES(2, 0, 1, 3)}, ValueError, "expected 2 heads of queries or more, got 0"),
            ({"key": ONES(2, 2, 3)}, ValueError, "expected key (B, G, 1, D), "),
            ({"value": ONES(2, 7)}, ValueError, "expected value (R, G·E), "),
            ({"value": ONES(2, 2, 4)}, ValueError, "expected value (R, G·E), "),
            ({"value": ONES(3, 8)}, ValueError, "expected value of 2 or 4 rows, got 3"),
            ({"key": ONES(2, 2, 1, 3).half()}, TypeError, "expected key in query's dtype, got"),
            ({"keys": ONES(2, 2, 5, 3).half()}, TypeError, "expected keys in query's dtype, got"),
            ({"slot": torch.tensor([5])}, ValueError, "expected slot from 0 to 4, got 5 to 5"),
            ({"slot": torch.ones(1)}, TypeError, "expected slot in integers, got torch.float32"),
            ({"keys": KEYS.expand(2, -1, 5, -1)}, ValueError, "expanded tensor, strides (0, 3, 0"),
            ({"values": ONES(1).expand(2, 2, 5, 4)}, ValueError, "expected values of which each"),
            ({"mask": torch.ones(1, 5).bool()}, ValueError, "expected mask (B, S), "),
        ],
    ),
    ops.rotary_embedding: (
        ROTARY,
        [
            ({"query": ONES(2, 4, 6)}, ValueError, "expected query (B, H, T, D), got (2, 4, 6)"),
            ({"key": ONES(2, 3, 1, 4)}, ValueError, "expected key (B, G, T, D), "),
            ({"key": ONES(2, 3, 1, 6).half()}, TypeError, "key in query's dtype, got"),
            ({"sin": ONES(1, 1, 6)}, ValueError, "expected sin (R, T, D), "),
            (
                {"cos": ONES(3, 1, 6), "sin": ONES(3, 1, 6)},
                ValueError,
                "cos and sin of 1 or 2 rows, got D = 6 and 3 rows",
            ),
            (
                dict.fromkeys(("query", "key"), ONES(2, 3, 1, 5))
                | dict.fromkeys(("cos", "sin"), ONES(2, 1, 5)),
                ValueError,
                "expected an even D, and cos and sin of 1 or 2 rows, got D = 5",
            ),
        ],
    ),
    ops.invert_rmsnorm: (
        INVERT,
        [
            ({"target": ONES(5)}, ValueError, "expected target (M, d), got (5,)"),
            ({"target": ONES(3, 0), "scale": ONES(0)}, ValueError, "expected d ≥ 1, got 0"),
            ({"target": INTS}, TypeError, FLOATING.format("target", "int32")),
            ({"scale": ONES(5, device="meta")}, ValueError, "expected scale on cpu, got meta"),
            ({"rms": ONES(3, 1)}, ValueError, "expected rms (M), M = 3, d = 5, got (3, 1)"),
            ({"fallback": ONES(5)}, ValueError, "expected fallback (M, d), "),
            ({"eps": float("nan")}, ValueError, "expected a finite eps ≥ 0, got nan"),
        ],
    ),
    ops.stable_scale: (
        {"delta": ONES(3, 5), "scale": ONES(5), "hidden_down": ONES(3, 5)},
        [
            ({"hidden_down": ONES(2, 5)}, ValueError, "expected hidden_down (M, d), "),
            ({"delta": INTS}, TypeError, FLOATING.format("delta", "int32")),
            ({"eps": float("inf")}, ValueError, "expected a finite eps ≥ 0, got inf"),
        ],
    ),
    ops.record_norm: (
        {
            "y_pair": ONES(4, 5),
            "h": ONES(2, 3),
            "delta": ONES(2, 5),
            "weight": ONES(5),
            "eps": 1e-6,
        },
        [
            ({"y_pair": ONES(5, 5)}, ValueError, "expected the rows of two streams, got 5"),
            ({"h": ONES(3, 3)}, ValueError, "expected delta (M, d), 2M = 4, d = 5, M = 3"),
            ({"delta": ONES(2, 6)}, ValueError, "expected delta (M, d), 2M = 4, d = 5, M = 2"),
            ({"weight": ONES(2, 5)}, ValueError, "expected weight (d), "),
            ({"h": INTS}, TypeError, FLOATING.format("h", "int32")),
            ({"eps": -1.0}, ValueError, "expected a finite eps ≥ 0, got -1.0"),
        ],
    ),
    ops.read_direction: (
        {"z": ONES(2, 3)},
        [
            ({"z": INTS}, TypeError, FLOATING.format("z", "int32")),
            ({"z": ONES(())}, ValueError, "expected z (..., K), got a tensor without dimensions"),
            ({"dtype": torch.float16}, TypeError, "expected dtype torch.float32 or torch.float64"),
        ],
    ),
}


@pytest.mark.parametrize("op", ERRORS)
def test_what_does_not_fit_is_refused(op: object) -> None:
    """A call that is refused has written nothing."""
    good, mistakes = ERRORS[op]
    caches = {"keys", "values"} & good.keys()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            op(**good | {name: good[name].clone() for name in caches})
            for changes, error, message in mistakes:
                check_refused(error, message, lambda wrong=good | changes: op(**wrong))
    assert all((good[name] == 1).all() for name in caches)
