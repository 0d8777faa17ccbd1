"""The training loop of one rank."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import guard
from ..checkpoint import Saving
from ..compose import (
    check_replicas,
    clip_grad_norm_,
    nonfinite_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from ..dist import get_backend, get_local_rank, is_distributed, is_main_process
from ..dist.devices import current_device, set_device
from ..dist.errors import NonFiniteError
from ..models import LlamaConfig
from ..parallel.data_parallel import DataParallelBucket, shard_optimizer
from ..parallel.data_parallel.building import name_culprits
from ..parallel.pg_manager import (
    ProcessGroupManager,
    describe_rank,
    destroy_process_group_manager,
    setup_process_group_manager,
)
from .config import PretrainConfig, plain_model, sizes_of
from .data import Corpus, check_same_data, load_corpus
from .progress import Reporter
from .resume import Saver, load_last, refuse_mixing, save_step


def train(config: PretrainConfig) -> list[float]:
    """Train on this process's rank of the grid; every rank calls it.

    Args:
        config: Settings, the same on every rank.

    Returns:
        The global loss of each step of this call, the same on every rank.

    Raises:
        NonFiniteError: The loss or the gradient norm is infinite or NaN; raised on every rank. The
            last good checkpoint stays.
    """
    manager = setup_process_group_manager(config.tp, config.cp, config.pp, config.dp, config.ep)
    try:
        with guard.watch(label=describe_rank):
            return train_on(config, manager)
    finally:
        destroy_process_group_manager()


def train_on(config: PretrainConfig, manager: ProcessGroupManager) -> list[float]:
    """Build everything, resume if configured, and train to the last step."""
    refuse_mixing(config)
    if is_distributed():
        set_device(get_local_rank())  # gloo ranks have not set it
    device = current_device()
    corpus = load_corpus(config.data, config.tokenizer, seq_len=config.seq_len)
    check_same_data(corpus)
    sizes = replace(sizes_of(config), vocab_size=corpus.vocab_size)
    model = parallelize(build_model(config, sizes, device), manager, schedule=config.schedule)
    optimizer = build_optimizer(config, model)
    if config.zero:
        shard_optimizer(optimizer, model, stage=config.zero, overlap=True)
    start = 0
    if config.resume == "auto":
        start = load_last(config, model, optimizer, manager, corpus.digest)
    if start >= config.steps:
        return []
    folder, losses = config.out if is_main_process() else None, list[float]()
    reporter = Reporter(folder, start, config.steps)

    def save(step: int) -> Saving:
        return save_step(config, step, model, optimizer, manager, corpus.digest, sizes)

    with Saver(save, config.save_every, config.steps) as saver, reporter:
        if is_distributed():
            reporter.say(f"ranks compute on {device.type} and communicate over {get_backend()}")
        for step in range(start, config.steps):
            values = optimizer_step(config, model, optimizer, corpus, step)
            guard.step(step + 1)
            losses.append(values["loss"])
            reporter.step(step + 1, values, tokens=config.batch_size * config.seq_len)
            saver.after(step + 1)
    return losses


def optimizer_step(
    config: PretrainConfig,
    model: DataParallelBucket,
    optimizer: torch.optim.Optimizer,
    corpus: Corpus,
    step: int,
) -> dict[str, float]:
    """Run 0-based `step`; return its loss, gradient norm and learning rate."""
    device, sizes = current_device(), {"batch_size": config.batch_size, "seq_len": config.seq_len}
    drawn = corpus.global_batch(step, **sizes, seed=config.seed)
    batch = {name: entry.to(device) for name, entry in drawn.items()}
    loss = train_step(model, shard_global_batch(batch, config.micro_batches, model=model))
    try:
        norm = clip_grad_norm_(model, config.clip, error_if_nonfinite=True)
    except NonFiniteError as error:  # raised before any gradient was scaled
        raise NonFiniteError(
            f"step {step + 1}: the loss is {loss.item()}, and not all gradients are finite: "
            f"{name_culprits(nonfinite_gradients(model)) or 'their norm alone'}; weights and "
            "checkpoints are as after the steps before. Go on from the last checkpoint with "
            "--resume auto, with a lower --lr or --clip"
        ) from error
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if config.check_every and step % config.check_every == 0:
        check_replicas(model, optimizer=optimizer, step=step + 1, values=batch)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.item(), "grad_norm": norm.item(), "lr": rate}


def learning_rate(config: PretrainConfig, step: int) -> float:
    """Return the rate of 0-based `step`: linear warm-up, cosine decay to a tenth, then constant."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    end = config.decay_steps or config.steps
    share = min((step - config.warmup_steps) / max(end - config.warmup_steps, 1), 1.0)
    return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def build_model(config: PretrainConfig, sizes: LlamaConfig, device: torch.device) -> nn.Module:
    """Return the full plain model, with the same weights on every rank and for every layout."""
    torch.manual_seed(config.seed)
    model = plain_model(sizes).to(device)
    if config.dtype == "bfloat16":  # wrap only forward: backward must not run under autocast
        cast = torch.autocast(device.type, torch.bfloat16)(type(model).forward)
        model.__dict__["forward"] = MethodType(cast, model)
    return model.to(torch.float64 if config.dtype == "float64" else torch.float32)


def build_optimizer(config: PretrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
