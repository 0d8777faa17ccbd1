"""`Trainer` of transformers on 4 ranks (tensor parallel 2 x data parallel 2), its loop unchanged.

`pip install "scaletorch[transformers]" "accelerate>=1.1"`, then `python
examples/grid_trainer.py`. It trains a small Llama with plain `Trainer` in one process, and with
`GridTrainer` on four local ranks; losses and gradient norms are the same. `Trainer` keeps its loop,
data, optimizer, schedule, callbacks and log; the methods below replace what differs on a grid.

For your own model use `GridTrainer` as it is, under torchrun, with your arguments and data set

    init_dist()
    manager = setup_process_group_manager(tp_size=4, dp_size=2)
    GridTrainer(model, arguments, manager=manager, train_dataset=data).train()

`per_device_train_batch_size` is the number of rows of a step of the *whole grid*, as in one
process: every rank reads the same batch and takes its shard. Ranks accumulate over `micro_batches`,
which a pipeline needs.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from scaletorch.checkpoint import export_safetensors, import_safetensors, load, save
from scaletorch.compose import (
    clip_grad_norm_,
    eval_step,
    global_grad_norm,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import barrier, launch
from scaletorch.parallel.pg_manager import (
    ProcessGroupManager,
    destroy_process_group_manager,
    setup_process_group_manager,
)

STEPS, ROWS, LENGTH = 6, 8, 32
OTHERWISE = {  # arguments that a grid replaces by other means
    "gradient_accumulation_steps": "pass micro_batches=, of which each step has so many",
    "bf16": "load the model in bfloat16, and see data_parallel={'grad_type': torch.float32}",
    "fp16": "load the model in bfloat16",
    "label_smoothing_factor": "the loss is the cross entropy of tokens",
    "torch_compile": "compile in place, model.compile(), before you pass it",
    "auto_find_batch_size": "every rank must take the same batch",
    "deepspeed": "the grid is the parallelism",
    "fsdp": "the grid is the parallelism",
    "parallelism_config": "the grid is the parallelism",
}


class GridTrainer(Trainer):  # type: ignore[misc]
    """`Trainer` for a plain causal model, which it parallelizes over all axes of a grid, in place.

    Args:
        model: The plain model.
        args: As for `Trainer`; the batch size is that of the whole grid.
        manager: The grid.
        micro_batches: Micro-batches of a data-parallel rank in a step.
        options: Further arguments of `parallelize`.
        others: As for `Trainer`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        manager: ProcessGroupManager,
        micro_batches: int = 1,
        options: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        for name, instead in OTHERWISE.items():
            value = getattr(args, name)
            if value and not (name == "gradient_accumulation_steps" and value == 1):
                raise ValueError(f"GridTrainer takes no {name}={value!r}: {instead}")
        self.manager, self.micro_batches = manager, micro_batches
        super().__init__(model, args, **others)
        self.parallel = parallelize(model, manager, **options or {})

    def create_accelerator_and_postprocess(self) -> None:
        """Let every rank read the global batch; `shard_global_batch` divides it."""
        super().create_accelerator_and_postprocess()
        inner = self.accelerator.dataloader_config
        self.accelerator.prepare_data_loader = lambda loader, **_: prepare_data_loader(
            loader,
            num_processes=1,
            process_index=0,
            dispatch_batches=False,
            use_seedable_sampler=inner.use_seedable_sampler,
            data_seed=inner.data_seed,
        )
        self.accelerator.gather = lambda data: data  # every rank has the global loss

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the rows of a step."""
        return int(self._train_batch_size)

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return self.parallel  # accelerate must not wrap it again

    def _shares(self, inputs: dict[str, Tensor]) -> list[Any]:
        """Return this rank's micro-batches, with labels shifted here as `train_step` expects."""
        batch = dict(self._prepare_inputs(inputs))
        batch["labels"] = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        if "attention_mask" in batch and batch["attention_mask"].all():
            del batch["attention_mask"]  # it masks nothing
        return shard_global_batch(batch, self.micro_batches, self.manager, model=self.parallel)

    def training_step(self, model: Any, inputs: dict[str, Tensor], *_: Any) -> Tensor:
        """Run forward and backward of the global batch; return its loss."""
        model.train()
        return train_step(model, self._shares(inputs), self.manager)

    def prediction_step(self, model: Any, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Any:
        """Return the loss of the global batch, without logits and labels."""
        return eval_step(model, self._shares(inputs), self.manager), None, None

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return clip_grad_norm_(model, self.args.max_grad_norm, self.manager)

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return global_grad_norm(model, self.manager) if grad_norm is None else grad_norm

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save, like `Trainer`, over a folder left by an earlier run that was resumed before it."""
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
        barrier()
        super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for `from_pretrained`."""
        folder = output_dir or self.args.output_dir
        export_safetensors(self.parallel, folder, self.manager)
        if self.args.should_save:
            for part in filter(None, (self.model.config, self.processing_class)):
                part.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, step = Path(output_dir, "ranks"), self.state.global_step
        optimizer, schedule = self.optimizer.optimizer, self.lr_scheduler
        save(folder, self.parallel, optimizer, self.manager, step=step, scheduler=schedule)

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        import_safetensors(self.parallel, checkpoint, self.manager)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder, optimizer = Path(checkpoint, "ranks"), self.optimizer.optimizer
            load(folder, self.parallel, optimizer, self.manager, scheduler=self.lr_scheduler)


class Curve(TrainerCallback):  # type: ignore[misc]
    """Keeps the losses and norms that `Trainer` logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Keep the loss and the norm of a step."""
        if "grad_norm" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])


def make_model() -> LlamaForCausalLM:
    """Return a small Llama, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, Tensor]]:
    """Return rows of text; some have no labels for their last tokens."""
    text = inspect.getsource(argparse).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    found = []
    for index in range(STEPS * ROWS):
        ids = tokens[index * LENGTH :][:LENGTH]
        labels = ids.clone()
        labels[LENGTH - index % 5 :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    """Return the arguments of both runs."""
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    given = {"per_device_train_batch_size": ROWS, "learning_rate": 3e-3, "use_cpu": True}
    return TrainingArguments(str(folder), num_train_epochs=1, **{**quiet, **given, **others})


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Curve, Trainer]:
    """Train in one process with plain `Trainer`."""
    curve, model = Curve(), make_model().to(dtype)
    trainer = Trainer(model, arguments(folder), train_dataset=rows(), callbacks=[curve])
    trainer.train()
    return curve, trainer


def on_grid(folder: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> Curve:
    """Train as one rank of a grid."""
    curve, manager = Curve(), setup_process_group_manager(**sizes)
    both: dict[str, Any] = {"train_dataset": rows(), "callbacks": [curve]}
    model = make_model().to(dtype)
    GridTrainer(model, arguments(folder), manager=manager, micro_batches=2, **both).train()
    destroy_process_group_manager()
    return curve


def main() -> None:
    """Train both ways and compare."""
    with tempfile.TemporaryDirectory() as folder:
        one, _ = plain(Path(folder))
        four = launch(on_grid, 4, Path(folder), tp_size=2, dp_size=2)[0]
    for loss, other in zip(one.losses, four.losses, strict=True):
        print(f"loss {loss:.5f} in one process, {other:.5f} on 4 ranks")
    worst = max(abs(a - b) / a for a, b in zip(one.norms, four.norms, strict=True))
    print(f"gradient norms: within {worst:.1e}")


if __name__ == "__main__":
    main()
