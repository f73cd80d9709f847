"""What a pretended CUDA device must do to be of use: run by test_pretended_cuda.py."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_devices_do_not_mix():
    x = torch.ones(3, device="cuda")
    assert (
        x.is_cuda
        and x.device == torch.device("cuda", 0)
        and (x[1:] + torch.tensor(1.0)).is_cuda
        and x.cpu().is_cpu
    )
    assert torch.zeros(2).is_cpu and torch.tensor([1]).is_cpu and torch.zeros_like(x).is_cuda
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda and torch.tensor([1]).is_cuda
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: torch.stack([x, torch.ones(3)]),
        lambda: x.copy_(x.cpu()) @ torch.ones(3),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_a_graph_runs_on_what_lies_in_its_places_by_then():
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = 2 * x
        total += twice
    assert not total.any()
    x.fill_(2)
    graph.replay()
    graph.replay()
    assert (twice.tolist(), total.tolist()) == ([4.0] * 3, [8.0] * 3)


def test_a_capture_waits_for_nothing():
    x = torch.ones(3, device="cuda")
    for wrong in (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: x[x > 1],
        lambda: torch.ones(3).cuda(),
        lambda: x.copy_(torch.ones(3)),
        lambda: bool(x.any()),
        lambda: torch.equal(x, x),
        torch.cuda.synchronize,
    ):
        with (
            pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            wrong()
