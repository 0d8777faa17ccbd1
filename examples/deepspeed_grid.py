"""DeepSpeed's process group with scaletorch's grid and tensor parallel layers.

`pip install deepspeed scaletorch`, then `python examples/deepspeed_grid.py`: a small Llama
learns a source file of the standard library, in one process with plain PyTorch, and on 4 local
ranks as tp 2 x dp 2 and as cp 2 x dp 2 in DeepSpeed's engine, with ZeRO-1 and clipping. All three
runs have the same losses and gradient norms. Under torchrun call `train` directly.
Details:

- `init_dist` adopts the default group that DeepSpeed created. The grid creates the other groups,
  and `make_mpu` passes them to `deepspeed.initialize` under Megatron's names.
- DeepSpeed averages gradients over data-parallel ranks (and sums them over sequence-parallel
  ones). So a loss divided by the tokens of the *global* batch has to be multiplied by dp.
- Its gradient norm counts a parameter on the first tp rank only, unless `mark_shards` marks it as
  sharded. Without the marks the norm is too small, silently.
- Use no pipeline stages (pp 1): DeepSpeed's engine runs only its own pipelines.
"""

from __future__ import annotations

import argparse
import inspect
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from scaletorch.compose import shard_global_batch, token_loss_sum
from scaletorch.dist import all_reduce, cleanup_dist, init_dist, launch
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.context_parallel import apply_context_parallel
from scaletorch.parallel.data_parallel import global_token_count
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, shard_dims

ROWS, LENGTH, STEPS, CLIP = 4, 64, 5, 0.5
LAYOUTS = {"tp 2 x dp 2": {"tp": 2, "dp": 2}, "cp 2 x dp 2": {"cp": 2, "dp": 2}}

Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def make_model() -> Llama:
    """Return the same plain model on every rank."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(hidden_size=64, intermediate_size=96, num_layers=2))


def rank_batch(step: int, manager: ProcessGroupManager) -> dict[str, Tensor]:
    """Return this rank's rows (dp) and columns (cp) of a batch of text."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=generator)
    window = text.long()[starts + torch.arange(LENGTH + 1)]
    labels = window[:, 1:].masked_fill(window[:, 1:] == ord(" "), -100)
    [batch] = shard_global_batch({"input_ids": window[:, :-1], "labels": labels}, 1, manager)
    return dict(batch)


def mark_shards(model: nn.Module) -> None:
    """Mark parameters that are sharded over tp, as Megatron does."""
    for name, dim in shard_dims(model).items():
        if dim is not None:
            vars(model.get_parameter(name))["tensor_model_parallel"] = True


def make_mpu(manager: ProcessGroupManager) -> SimpleNamespace:
    """Return the "model parallel unit" that `deepspeed.initialize` takes.

    It has Megatron's functions, such as `get_data_parallel_group()`.
    """
    axes = {"tensor_model": "tp", "model": "tp", "sequence": "cp", "pipeline_model": "pp"}
    axes |= {"data": "dp", "sequence_data": "cp_dp"}
    axes |= {"expert_model": "ep", "expert_tensor": "etp", "expert_data": "edp"}
    attributes = {"group": "group", "world_size": "size", "rank": "rank"}
    attributes |= {"src_rank": "first_rank", "group_ranks": "group_ids"}
    mpu = SimpleNamespace()
    for name, axis in axes.items():
        for asked, attribute in attributes.items():
            answer = partial(getattr, manager, f"{axis}_{attribute}")
            setattr(mpu, f"get_{name}_parallel_{asked}", answer)
    return mpu


def start_engine(model: nn.Module, manager: ProcessGroupManager) -> Any:
    """Return DeepSpeed's engine around this rank's shard of the model."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS // manager.dp_size,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 1},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mpu = make_mpu(manager)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)
    return engine


def train(tp: int = 1, cp: int = 1, dp: int = 1) -> Curve:
    """Train on this rank, on DeepSpeed's default process group."""
    start_deepspeed()
    init_dist()  # adopts the group
    manager = setup_process_group_manager(tp_size=tp, cp_size=cp, dp_size=dp)
    model = apply_tensor_parallel(make_model(), group=manager.tp_group)
    apply_context_parallel(model, manager.cp_group, layout="zigzag")
    mark_shards(model)
    engine = start_engine(model, manager)
    curve = []
    for step in range(STEPS):
        batch = rank_batch(step, manager)
        count = global_token_count(batch["labels"], group=manager.cp_dp_group)
        logits = engine(batch["input_ids"], batch.get("position_ids"))
        loss = token_loss_sum(logits, batch["labels"]) / count
        engine.backward(loss * manager.dp_size)  # the engine divides by this
        engine.step()
        total = loss.detach()
        all_reduce(total, group=manager.cp_dp_group)  # only for the log
        curve.append((total.item(), float(engine.get_global_grad_norm())))
    destroy_process_group_manager()
    cleanup_dist()  # leaves DeepSpeed's group to DeepSpeed
    return curve


def start_deepspeed() -> None:
    """Let DeepSpeed make the default group, unless it exists."""
    import deepspeed

    # On CPUs it would first compile an operator for inference, which takes about a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def train_alone() -> Curve:
    """Train in one process with plain PyTorch."""
    manager, model = setup_process_group_manager(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for step in range(STEPS):
        batch = rank_batch(step, manager)
        count = int((batch["labels"] != -100).sum())
        loss = token_loss_sum(model(batch["input_ids"]), batch["labels"]) / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    destroy_process_group_manager()
    return curve


def train_every_layout() -> dict[str, Curve]:
    """Train on this rank once for each layout."""
    return {name: train(**sizes) for name, sizes in LAYOUTS.items()}


def main() -> None:
    """Train three times, and print losses and gradient norms."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    curves = {"one process": train_alone(), **launch(train_every_layout, 4, init=False)[0]}
    for name, curve in curves.items():
        print(f"{name:12}", *(f"{loss:.4f}/{norm:.4f}" for loss, norm in curve))


if __name__ == "__main__":
    main()
