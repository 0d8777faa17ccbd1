"""FSDP2 for data parallelism, with scaletorch's tensor and context parallelism.

`python examples/fsdp2.py` trains in one process, then on 4 local ranks as dp 2 x tp 2 and as
dp 2 x cp 2, and prints the same losses three times. Details:

- Loss: a rank's loss is the sum of token losses divided by the tokens of the *global* batch, so
  gradients have to be summed. FSDP2 averages them; `shard_data_parallel` makes it sum.
- Context parallelism: cp ranks have different positions of the same rows and the same weights, so
  their gradients are summed too. Shard over cp x dp as one axis: one reduce-scatter does both.
- Checkpoints: FSDP2 treats a tensor-parallel shard as a full weight. Its DTensors contain only the
  dp axis, so tp ranks have different DTensors with the same name, and torch.distributed.checkpoint
  would silently keep one of them. If tp > 1, gather full tensors first, as `whole_state` does.
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from scaletorch.compose import shard_global_batch, token_loss_sum
from scaletorch.dist import all_reduce, get_comm_device, launch
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.context_parallel import apply_context_parallel
from scaletorch.parallel.data_parallel import global_token_count
from scaletorch.parallel.pg_manager import ProcessGroupManager, setup_process_group_manager
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, gather_tensors


def build(manager: ProcessGroupManager, dtype: torch.dtype) -> Llama:
    """Return this rank's shard of a model: first tp, then cp, and FSDP2 around both."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(hidden_size=64, intermediate_size=96, num_layers=2)).to(dtype)
    if manager.tp_size > 1:
        apply_tensor_parallel(model, group=manager.tp_group)
    apply_context_parallel(model, manager.cp_group, layout="zigzag")
    if manager.cp_dp_size > 1:
        shard_data_parallel(model, manager)
    return model


def shard_data_parallel(model: Llama, manager: ProcessGroupManager) -> None:
    """Shard parameters, gradients and optimizer state over dp, or over cp x dp."""
    mesh = manager.device_mesh["dp"]
    if manager.cp_size > 1 and manager.cp_dp_group is not None:
        mesh = DeviceMesh.from_group(manager.cp_dp_group, get_comm_device().type)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sum instead of average ...
            module.set_force_sum_reduction_for_comms(True)  # ... by an operation that gloo supports


def train_step(model: Llama, manager: ProcessGroupManager, step: int) -> Tensor:
    """Run forward and backward of 4 rows of 32 bytes of text; return the global loss."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8)
    starts = torch.randint(len(text) - 33, (4, 1), generator=torch.Generator().manual_seed(step))
    tokens = text.long()[starts + torch.arange(33)]
    labels = tokens[:, 1:].masked_fill(torch.arange(32) < torch.arange(4)[:, None] * 7, -100)
    [batch] = shard_global_batch({"input_ids": tokens[:, :-1], "labels": labels}, 1, manager)
    count = global_token_count(batch["labels"], group=manager.cp_dp_group)
    logits = model(batch["input_ids"], batch.get("position_ids"))
    loss = token_loss_sum(logits, batch["labels"]) / count
    loss.backward()
    total = loss.detach()
    all_reduce(total, group=manager.cp_dp_group)  # only for the log
    return total


def whole_state(model: nn.Module, manager: ProcessGroupManager) -> dict[str, Tensor]:
    """Return the plain model's parameters on every rank, gathered over dp and then over tp."""
    named = model.named_parameters(remove_duplicate=False)
    parts = {n: p.full_tensor() if isinstance(p, DTensor) else p.data for n, p in named}
    return gather_tensors(model, parts, manager.tp_group)


def work(
    tp: int = 1, cp: int = 1, dp: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on one rank of a grid; return the losses and the full model's weights."""
    manager = setup_process_group_manager(tp_size=tp, cp_size=cp, dp_size=dp)
    model = build(manager, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(3):
        losses.append(train_step(model, manager, step).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole_state(model, manager)


if __name__ == "__main__":
    print("one process", work()[0])
    print("dp 2 x tp 2", launch(work, 4, tp=2, dp=2)[0][0])
    print("dp 2 x cp 2", launch(work, 4, cp=2, dp=2)[0][0])
