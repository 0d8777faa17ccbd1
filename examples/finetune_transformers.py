"""Fine-tune a model of `transformers` on 4 ranks: tensor parallel 2 x context parallel 2.

`pip install "scaletorch[transformers]"`, then `python
examples/finetune_transformers.py`. Nothing is downloaded: it first makes a small Llama with random
weights and saves it with `save_pretrained`; the data are the bytes of a source file of the
standard library. Four local ranks tune it and save a checkpoint. One process then loads the
checkpoint and computes the same loss.

For your own model, use the folder of any causal model of a family that `parallelize` supports, put
your tokens into `global_batch`, and under torchrun replace `launch` by

    init_dist()
    tune(folder, results, tp=4, cp=2, dp=2)

The model class is unchanged. `import_safetensors` reads only this rank's rows and columns from the
files; each rank has half of every sequence and half of every layer.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from scaletorch.checkpoint import export_safetensors, import_safetensors, load, save
from scaletorch.compose import (
    clip_grad_norm_,
    parallelize,
    shard_global_batch,
    token_loss_sum,
    train_step,
)
from scaletorch.dist import all_reduce, is_main_process, launch
from scaletorch.parallel.data_parallel import DataParallelBucket, global_token_count
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

ROWS, LENGTH, STEPS = 4, 128, 12


def make_pretrained(folder: Path) -> None:
    """Write a model in the format of the hub: config.json and model.safetensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def build(folder: Path, manager: ProcessGroupManager) -> DataParallelBucket:
    """Return this rank's shard of the model, with the weights of the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    part = parallelize(model, manager)
    import_safetensors(part, folder, manager)
    return part


def global_batch(step: int) -> dict[str, Tensor]:
    """Return the same rows of text on every rank, with labels that are already shifted."""
    text = inspect.getsource(argparse).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(tokens) - LENGTH, (ROWS, 1), generator=generator)
    window = tokens[starts + torch.arange(LENGTH + 1)]
    return {"input_ids": window[:, :-1], "labels": window[:, 1:]}


def tune(
    pretrained: Path, results: Path, tp: int = 1, cp: int = 1, dp: int = 1, steps: int = STEPS
) -> list[float]:
    """Train on this rank; return the losses, the last of them on an unseen batch."""
    manager = setup_process_group_manager(tp_size=tp, cp_size=cp, dp_size=dp)
    model = build(pretrained, manager)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    losses = []
    for step in range(steps):
        micro_batches = shard_global_batch(global_batch(step), 2, manager)
        loss = train_step(model, micro_batches)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if is_main_process() and step % 4 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    save(results / "steps", model, optimizer, manager, step=steps, scheduler=scheduler)
    export_safetensors(model, results / "model", manager)  # for transformers
    losses.append(evaluate(model, manager, steps))
    destroy_process_group_manager()
    return losses


@torch.no_grad()
def evaluate(model: DataParallelBucket, manager: ProcessGroupManager, step: int) -> float:
    """Return the loss of a batch, the same on every rank."""
    [batch] = shard_global_batch(global_batch(step), 1, manager)
    logits = model(batch["input_ids"], position_ids=batch.get("position_ids"))
    count = global_token_count(batch["labels"], group=manager.cp_dp_group)
    loss = token_loss_sum(logits, batch["labels"]) / count
    all_reduce(loss, group=manager.cp_dp_group)
    return loss.item()


def resume(pretrained: Path, results: Path) -> tuple[float, int]:
    """Load the ranks' checkpoint in one process; return the unseen batch's loss and the step."""
    manager = setup_process_group_manager()
    model = build(pretrained, manager)
    optimizer = torch.optim.AdamW(model.parameters())
    found = load(results / "steps", model, optimizer, manager)
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {results}")
    loss = evaluate(model, manager, found.step)
    destroy_process_group_manager()
    return loss, found.step


def main() -> None:
    """Make a model, tune it on four ranks, and load their checkpoint in this process."""
    with tempfile.TemporaryDirectory() as folder:
        pretrained, results = Path(folder, "pretrained"), Path(folder, "results")
        make_pretrained(pretrained)
        *_, unseen = launch(tune, 4, pretrained, results, tp=2, cp=2)[0]
        print(f"unseen batch: loss {unseen:.4f} on 4 ranks")
        loss, step = resume(pretrained, results)
        print(f"unseen batch: loss {loss:.4f} in one process, from the checkpoint of step {step}")


if __name__ == "__main__":
    main()
