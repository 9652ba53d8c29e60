"""Stages wrapped for data parallelism, and distributed parameters, in a group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from pipeloom.errors import BackwardMethodError
from pipeloom.runtime.backward import choose_method
from tests.runtime.backward.harness import accumulate, assert_same_parameters, run_forward
from tests.runtime.backward.zoo import build, feed

torch.set_num_threads(1)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("method", ["auto", "graph"])
@pytest.mark.parametrize("name", ["mlp", "transformer", "reused"])
def test_ddp_reduces_every_bucket_at_weight(name: str, method: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    module, batches = build(name), [feed(name) for _ in range(3)]
    truth = accumulate(module, batches)
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
    reduced: list[int] = []

    def count(state, bucket):
        reduced.append(len(bucket.gradients()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, count)
    backward = choose_method(wrapped, method=method)
    num_parameters = len(list(module.parameters()))
    for index, inputs in enumerate(batches):
        wrapped.require_backward_grad_sync = index == 2
        saved = run_forward(backward, wrapped, inputs, index)
        backward.input(saved, truth.output_grads[index])
        assert not reduced
        backward.weight(saved)
        assert sum(reduced) == (num_parameters if index == 2 else 0)
    assert backward.choice.method == ("graph" if method == "graph" else "deferred")
    assert_same_parameters(module, truth.module)


@pytest.mark.usefixtures("nothing_compiled_before")
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("name", ["mlp", "transformer", "compiled"])
def test_fsdp_parameters(name: str, reshard: bool, mesh: DeviceMesh) -> None:
    """The pipeline's way with FSDP: no synchronisation until the last backward."""
    torch.manual_seed(0)
    compiled, name = name == "compiled", "transformer" if name == "compiled" else name
    module, batches = build(name), [feed(name) for _ in range(3)]
    truth = accumulate(module, batches)
    for block in module if compiled else ():
        block.compile(backend="pipeloom_eager")
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    module.set_reshard_after_backward(False)
    backward = choose_method(module)
    for index, inputs in enumerate(batches):
        last = index == 2
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        saved = run_forward(backward, module, inputs, index)
        if last:  # reduces what all have accumulated
            backward.full(saved, truth.output_grads[index])
        else:
            backward.input(saved, truth.output_grads[index])
            backward.weight(saved)
    assert backward.choice.method == "deferred"
    module.reshard()
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-10)


def test_distributed_parameters_get_distributed_gradients(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    module = build("mlp")
    x, grad = feed("mlp")[0], torch.randn(2, 6, 16, dtype=torch.float64)
    truth = accumulate(module, [[x], [x]])
    for layer in (module[0], module[2]):
        for name, parameter in list(layer.named_parameters()):
            spread = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            setattr(layer, name, nn.Parameter(spread))
    backward = choose_method(module)
    for index in range(2):
        leaf = distribute_tensor(x.detach(), mesh, [Replicate()]).requires_grad_()
        y = module(leaf)
        saved = backward.save(microbatch=index, inputs=[leaf], outputs=[y])
        given = distribute_tensor(truth.output_grads[index][0], mesh, [Replicate()])
        backward.input(saved, [given])
        backward.weight(saved)
    assert grad.shape == x.shape
    assert set(backward.choice.deferred) == {"0.weight", "0.bias", "2.weight"}
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-10)


class Twice(nn.Module):
    """One weight in a node that is run again and in a product that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(4, 4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.layer(nn.functional.bilinear(x, x, self.weight))
        return mixed + torch.bmm(x.expand(4, 3, 4), self.weight).sum(0)


class Ungiven(nn.Module):
    """A weight for which its Function gives no gradient."""

    class Skip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return 1 * x

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.Skip.apply(x, self.weight))


@pytest.mark.parametrize("method", ["auto", "graph", "whole"])
@pytest.mark.parametrize("kind", [Twice, Ungiven])
def test_ddp_hears_of_every_parameter_exactly_once(
    kind: type[nn.Module], method: str, mesh: DeviceMesh
) -> None:
    torch.manual_seed(0)
    module, batches = kind(), [[torch.randn(3, 4, requires_grad=True)] for _ in range(4)]
    truth = accumulate(module, batches)
    wrapped = DistributedDataParallel(module)
    backward = choose_method(wrapped, method=method)
    for index, inputs in enumerate(batches):  # the reducer refuses to go on if it heard otherwise
        saved = run_forward(backward, wrapped, inputs, index)
        backward.input(saved, truth.output_grads[index])
        backward.weight(saved)
    for mine, theirs in zip(module.parameters(), truth.module.parameters(), strict=True):
        # DDP has a zero where there is no gradient.
        torch.testing.assert_close(
            mine.grad, torch.zeros_like(mine) if theirs.grad is None else theirs.grad
        )


def test_ddp_that_reduces_when_the_backward_ends_is_not_split(mesh: DeviceMesh) -> None:
    wrapped = DistributedDataParallel(nn.Linear(4, 4), static_graph=True)
    with pytest.raises(BackwardMethodError, match="static_graph"):
        choose_method(wrapped, method="deferred")
    backward = choose_method(wrapped)
    assert backward.choice.method == "whole"
    assert "static_graph" in backward.choice.reason


@pytest.mark.usefixtures("nothing_compiled_before")
def test_compiled_blocks_of_ddp(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    module, batches = build("transformer"), [feed("transformer") for _ in range(3)]
    truth = accumulate(module, batches)
    for block in module:
        block.compile(backend="pipeloom_eager")
    wrapped = DistributedDataParallel(module)
    backward = choose_method(wrapped, strict=True)
    for index, inputs in enumerate(batches):
        saved = run_forward(backward, wrapped, inputs, index)
        backward.input(saved, truth.output_grads[index])
        backward.weight(saved)
    assert sum(name.endswith(".weight") for name in backward.choice.deferred) == 8
    assert_same_parameters(module, truth.module)
