"""The `Trainer` of transformers, recorded by one more line.

`python with_trainer.py runs/one`, then `torchrun --nproc-per-node=2 with_trainer.py runs/two`:
a step has two micro-batches, and two ranks have half of each one's rows.
"""

from __future__ import annotations

import os
import sys

import torch
from small import batch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from with_transformers import SIZES

from scaletorch import bisect


def train(folder: str, *, own_mean: bool = False) -> None:
    """Train two steps; the first is recorded.

    With `own_mean` a rank's loss is the mean over its own labels, regardless of the other ranks'.
    """
    ids, labels = batch()
    rows = [{"input_ids": i, "labels": own} for i, own in zip(ids, labels, strict=True)]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer",
        use_cpu=True,
        per_device_train_batch_size=2 // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=2,
        max_steps=2,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.model_accepts_loss_kwargs = not own_mean
    trainer.add_callback(bisect.trainer_callback(folder))
    trainer.train()


if __name__ == "__main__":
    train(sys.argv[1], own_mean="--own-mean" in sys.argv)
