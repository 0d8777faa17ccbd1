"""Count the library files that a warm call enters, and those that get the model, on real ranks."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from scaletorch.compose import parallelize, shard_global_batch, train_step
from scaletorch.dist import RankPool, all_reduce
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.context_parallel import attention
from scaletorch.parallel.pg_manager import setup_process_group_manager
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel

LIBRARY = "/scaletorch/"  # in paths of sources and of installed wheels
WARM = 3  # calls before the one that is traced


def entered(call: Callable[[], object]) -> set[str]:
    """Return the library files whose functions a warm call runs.

    It covers this thread and threads that start Python during the call, such as autograd's.
    """
    for _ in range(WARM):
        call()
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = (code.co_filename.rpartition(LIBRARY) for code in codes)
    return {path for _, library, path in files if library}


def journey(call: Callable[[nn.Module], object], model: nn.Module) -> list[str]:
    """Return the library files whose functions get the model or a module of it, in order.

    A function counts at its first call; files that follow themselves are listed once.
    """
    modules = {id(module) for module in model.modules()}
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if event == "call" and any(id(frame.f_locals.get(name)) in modules for name in names):
            codes.setdefault(code)

    sys.setprofile(note)
    try:
        call(model)
    finally:
        sys.setprofile(None)
    files = (code.co_filename.rpartition(LIBRARY) for code in codes)
    return [file for file, _ in groupby(path for _, library, path in files if library)]


def small_all_reduce() -> set[str]:
    """Sum 32 bytes over the ranks."""
    data = torch.ones(8)
    return entered(lambda: all_reduce(data))


def ring_attention() -> set[str]:
    """Attend causally over two ranks, forward and backward."""
    setup_process_group_manager(tp_size=1, cp_size=2, pp_size=1, dp_size=1)
    query = torch.randn(1, 2, 16, 8, requires_grad=True)

    def call() -> None:
        out = attention(query, query, query, causal=True, layout="zigzag", method="ring")
        out.sum().backward()

    return entered(call)


def step_4d() -> set[str]:
    """Train a step of the built-in Llama with tensor, context and pipeline parallelism."""
    manager = setup_process_group_manager(tp_size=2, cp_size=2, pp_size=2, dp_size=1)
    torch.manual_seed(0)
    config = LlamaConfig(64, 16, 32, 4, 4, 2)
    model = parallelize(Llama(config), manager)
    tokens = torch.randint(64, (4, 17))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}

    def call() -> None:
        model.zero_grad()
        train_step(model, shard_global_batch(batch, 2, manager))

    return entered(call)


def _llamas(count: int) -> list[Llama]:
    """Return built-in Llamas on a grid of two tensor-parallel ranks."""
    setup_process_group_manager(tp_size=2, cp_size=1, pp_size=1, dp_size=1)
    return [Llama(LlamaConfig(64, 16, 32, 4, 4, 2)) for _ in range(count)]


def shard_model() -> set[str]:
    """Shard the built-in Llama over two ranks, with sequence parallelism."""
    models = _llamas(WARM + 1)
    return entered(lambda: apply_tensor_parallel(models.pop(), sequence_parallel=True))


def way_of_sharded_model() -> list[str]:
    """Return the journey of a model through `apply_tensor_parallel`."""
    first, model = _llamas(2)
    apply_tensor_parallel(first, sequence_parallel=True)
    return journey(lambda model: apply_tensor_parallel(model, sequence_parallel=True), model)


# Name -> function, number of ranks, most files that it may enter.
WALKS: dict[str, tuple[Callable[[], set[str]], int, int]] = {
    "all_reduce": (small_all_reduce, 2, 5),
    "attention": (ring_attention, 2, 25),
    "apply_tensor_parallel": (shard_model, 2, 30),
    "train_step": (step_4d, 8, 60),
}


def walk(name: str) -> set[str]:
    """Return the files that a call enters on any rank."""
    body, ranks, _ = WALKS[name]
    with RankPool(ranks, timeout=300) as pool:
        return set().union(*pool.run(body))


def rooms(files: set[str]) -> Counter[str]:
    """Return the number of files in each package's folder."""
    return Counter("/".join(file.split("/")[:2]) for file in files)
