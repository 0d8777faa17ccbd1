"""Model FLOPs utilisation: what the model needs over what the hardware could do."""

from __future__ import annotations

import os
import time

import torch

from ..models import LlamaConfig, MixtureConfig


def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Return forward + backward FLOPs of one token: 6 per weight used, plus causal attention.

    Source: PaLM, https://arxiv.org/abs/2204.02311, appendix B, halved for the causal mask.
    """
    head_dim = config.hidden_size // config.num_heads
    attention = config.hidden_size * head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    if isinstance(config, MixtureConfig):  # of the experts that it goes to, and the router
        mlp = config.top_k * mlp + config.num_experts * config.hidden_size
    weights = config.num_layers * (attention + mlp) + config.hidden_size * config.vocab_size
    return 6.0 * weights + 6.0 * config.num_layers * config.hidden_size * seq_len


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a square matmul on one rank's share of the device, best of several."""
    size = 512 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)  # draws nothing: resuming is bitwise
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        (a @ a).sum().item()  # .item() waits for the device
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def job_peak(device: torch.device, dtype: torch.dtype, world_size: int) -> float:
    """Return the FLOP/s that `world_size` ranks could reach; CPU ranks share one node's cores."""
    ranks = world_size if device.type != "cpu" else min(world_size, os.cpu_count() or 1)
    return measured_peak(device, dtype) * ranks
