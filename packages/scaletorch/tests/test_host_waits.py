"""A step keeps an accelerator's queue full: the host waits for it at most once, on any layout."""

from dataclasses import replace

import pytest
import torch
from host_waits import host_waits
from sweeps import today
from training import grid

import scaletorch.dist as dist
from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import devices
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, Mixture, MixtureConfig
from scaletorch.parallel.context_parallel import ShardedSequences

SMALL = MixtureConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=4, num_heads=4, num_kv_heads=4,
    num_experts=4,
)  # fmt: skip
# dp, pp, cp, tp
LAYOUTS = [
    (4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (2, 2, 1, 1),
    (2, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2),
]  # fmt: skip

pytestmark = pytest.mark.timeout(500)  # the first test may build the stand-in


def small_model(mixture=False, **sizes):
    """A model of a few thousand parameters; a mixture has experts."""
    return (Mixture if mixture else Llama)(replace(SMALL, **sizes))


def waits_of(layout):
    """The waits of a warm step, and of one whose backward has a read in it."""
    dp, pp, cp, tp = layout
    with grid(dp_size=dp, pp_size=pp, cp_size=cp, tp_size=tp) as manager:
        device = devices.current_device()
        torch.manual_seed(0)
        model = small_model(tie_embeddings=pp > 1)  # whose gradients two stages exchange
        model = parallelize(model.to(device), manager, rehearse=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.randint(32, (8, 8)).to(device)
        batch = {"input_ids": ids, "labels": ids}
        documents = ShardedSequences(8, cu_seqlens=(0, 3, 8), group=manager.cp_group)

        def step():
            optimizer.zero_grad()
            with host_waits() as waits:
                documents.shard(batch)
                loss = train_step(model, shard_global_batch(batch, 2, model=model))
            assert loss.item() > 0
            optimizer.step()
            return waits.found

        step()  # in which ranks compare what will not change
        sound = step()
        next(model.parameters()).register_hook(reads)
        planted = step()
    return sound, planted


def reads(gradient):
    gradient.sum().item()


def waits_of_all(layouts):
    dist.init_dist("pytorch", backend="hccl", timeout=200)
    return [waits_of(layout) for layout in layouts]


def test_the_host_waits_at_most_once_in_a_warm_step(plugins, monkeypatch):
    monkeypatch.syspath_prepend(plugins)
    layouts = today(LAYOUTS, len(LAYOUTS))
    answers = run_ranks(waits_of_all, 4, layouts, init=False, timeout=300)
    for rank, found in enumerate(answers):
        for layout, (sound, planted) in zip(layouts, found, strict=True):
            lines = "\n".join(sound)
            assert len(sound) <= 1, f"{layout}, rank {rank} waits {len(sound)} times:\n{lines}"
            assert len(planted) > len(sound), f"{layout}, rank {rank}: a read was not seen"
