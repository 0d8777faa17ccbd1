"""A transformers model with its own tensor parallelism, `tp_plan="auto"`.

`python with_transformers.py runs/one`, then `torchrun --nproc-per-node=2 with_transformers.py
runs/tp`; the first run writes a tiny random model to runs/model, which both load.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small import batch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from scaletorch import bisect

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def save(folder: str | Path) -> None:
    """Write a tiny model with random weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).double().save_pretrained(folder)


def step(folder: str, saved: str | Path) -> nn.Module:
    """Train one step of the global batch, recorded."""
    options = {"dtype": torch.float64}
    if dist.is_initialized():
        options["distributed_config"] = DistributedConfig(tp_plan="auto")
    model: nn.Module = LlamaForCausalLM.from_pretrained(saved, **options)
    ids, labels = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bisect.record(folder, model=model) as tape:
        loss = model(input_ids=ids, labels=labels, shift_labels=labels).loss
        loss.backward()
        tape.put("loss", loss)
        optimizer.step()
    return model


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    model_folder = Path(sys.argv[1]).parent / "model"
    if not dist.is_initialized() and not model_folder.exists():
        save(model_folder)
    step(sys.argv[1], model_folder)
    if dist.is_initialized():
        dist.destroy_process_group()
