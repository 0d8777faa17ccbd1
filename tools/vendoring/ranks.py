"""Three copies of the library at work in one program: two vendored ones beside an installed one.

``check.py`` runs this in a folder with the projects acme and zenith, which have all
packages, and lone, which has tp alone. It prints rows as JSON: what, detail, whether it is so.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import logging
import os
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

INSTALLED = "scaletorch"
VENDORED = ("acme._vendor.scaletorch", "zenith._vendor.scaletorch")
LONE = "lone._vendor.scaletorch"
COPIES = (*VENDORED, INSTALLED)
STEPS = 2
Row = tuple[str, str, bool]


def of(copy: str, module: str) -> Any:
    """Return a module of a copy."""
    return importlib.import_module(f"{copy}.{module}")


def traces() -> dict[str, Any]:
    """Return what a library could leave its marks on in this process."""
    loggers = [name for name in logging.root.manager.loggerDict if "scaletorch" in name]
    return {
        "environment": dict(os.environ),
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "modules": [n for n in sys.modules if n.partition(".")[0] == INSTALLED],
        "loggers": [name for name in loggers if not name.startswith((*VENDORED, LONE))],
        "atexit": atexit._ncallbacks(),
        "exception hooks": (sys.excepthook, threading.excepthook),
        "threads": threading.active_count(),
        "warnings": list(warnings.filters),
        "operators": set(torch._C._dispatch_get_all_op_names()),
        "backends": list(torch.distributed.Backend.backend_list),
        "tree nodes": set(torch.utils._pytree.SUPPORTED_NODES),
        "safe globals": list(torch.serialization.get_safe_globals()),
        "torch.distributed": set(vars(torch.distributed.distributed_c10d)),
    }


def modules(copy: str) -> Iterator[str]:
    """Yield the modules of a vendored copy that need torch alone, below its root."""
    for file in json.loads(Path(*copy.split("."), "VENDORED.json").read_text())["files"]:
        apart = file.startswith("pretrain") or file.endswith(("__main__.py", "/plugin.py"))
        if file.endswith(".py") and not apart:
            yield file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_quietly() -> Row:
    """Import every module of a copy, and of a second one: nothing but these is new.

    The first brings parts of torch that import late, which leave marks of their own.
    """
    first, second = VENDORED
    for name in modules(first):
        of(first, name)
    before = traces()
    count = sum(of(second, name) is not None for name in modules(second))
    changed = [name for name, value in traces().items() if value != before[name]]
    detail = f"changed: {', '.join(changed)}" if changed else f"{count} modules"
    return "importing leaves nothing outside", detail, not changed and not before["modules"]


def share_group() -> Row:
    """Let one copy make the group; the others use it, also on opposite ends of a call."""
    for copy in COPIES:
        of(copy, "dist").init_dist("pytorch", backend="gloo")
    rank = torch.distributed.get_rank()
    sums = []
    for copy in (*COPIES, COPIES[rank]):
        data = torch.tensor(rank + 1.0)
        of(copy, "dist").all_reduce(data)
        sums.append(data.item())
    objects = of(COPIES[rank], "dist").all_gather_object({"rank": rank})
    right = sums == [3.0] * 4 and objects == [{"rank": 0}, {"rank": 1}]
    return "one calls init_dist, three work on its group", f"sums {sums}", right


def train_side_by_side() -> Row:
    """Train a model with each copy, a step of each in turn; and a plain one."""
    managers = {
        copy: of(copy, "parallel.pg_manager").setup_process_group_manager(tp_size=2)
        for copy in COPIES
    }
    models = {c: of(c, "compose").parallelize(llama(c), managers[c]) for c in COPIES}
    plain, ids = llama(INSTALLED), torch.arange(64).view(4, 16) * 7 % 256
    losses, alike = [], True
    for _ in range(STEPS):
        for copy, model in models.items():
            batch = {"input_ids": ids, "labels": ids}
            parts = of(copy, "compose").shard_global_batch(batch, 2, managers[copy])
            losses.append(of(copy, "compose").train_step(model, parts, managers[copy]).item())
            descend(model)
        nn.functional.cross_entropy(plain(ids).flatten(0, 1), ids.flatten()).backward()
        descend(plain)
    finals = [of(c, "compose").full_state_dict(m, managers[c]) for c, m in models.items()]
    error = distance(finals[0], plain.state_dict())
    alike = losses[::3] == losses[1::3] == losses[2::3]
    alike = alike and all(distance(final, finals[0]) == 0 for final in finals)
    detail = f"losses {losses[-3]:.9f} thrice; weights of one process within {error:.0e}"
    return f"{STEPS} steps of each on tp=2 give the same bits", detail, alike and error < 1e-12


def llama(copy: str) -> nn.Module:
    """Return a small model of a copy."""
    torch.manual_seed(0)
    found = of(copy, "models")
    model: nn.Module = found.Llama(found.LlamaConfig(num_layers=1)).double()
    return model


def descend(model: nn.Module) -> None:
    """Make a step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference of two models' weights."""
    testing = of(INSTALLED, "dist.testing")
    if one.keys() != other.keys():
        return float("inf")
    errors = (testing.relative_error(value, other[name]) for name, value in one.items())
    worst: float = testing.worst(errors)
    return worst


def use_part() -> Row:
    """Use a copy of tp alone: it works on the same group, and the others are not there."""
    layers, group = of(LONE, "parallel.tensor_parallel"), torch.distributed.group.WORLD
    torch.manual_seed(0)
    plain, data = nn.Linear(4, 6), torch.randn(2, 4)
    sharded = layers.ColumnParallelLinear.from_plain(plain, group=group, gather_output=True)
    right = torch.allclose(sharded(data), plain(data))
    absent = find_spec(f"{LONE}.parallel.context_parallel") is None
    return "a copy of tp alone works", "and has no context_parallel", right and absent


def run_commands() -> Row:
    """Run commands of a vendored copy: they name themselves by their own path."""
    said = {}
    for command in ("guard", "verify"):
        module = f"{VENDORED[0]}.{command}"
        with (
            mock.patch.object(sys, "argv", [command, "--help"]),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.suppress(SystemExit),
        ):
            runpy.run_module(module, run_name="__main__")
        said[module] = out.getvalue()
    right = all(f"python -m {module}" in " ".join(text.split()) for module, text in said.items())
    return "commands run by their vendored names", f"python -m {next(iter(said))}", right


def end_clean(before: dict[str, Any]) -> Row:
    """Let the copies end, the one that made the group last; compare with the beginning."""
    alive = []
    for copy in reversed(COPIES):
        of(copy, "parallel.pg_manager").destroy_process_group_manager()
        of(copy, "dist").cleanup_dist()
        alive.append(torch.distributed.is_initialized())
    after = traces()
    changed = [n for n in ("environment", "signals") if after[n] != before[n]]
    detail = f"changed: {', '.join(changed)}" if changed else "environment and signals as before"
    return "who made the group ends it", detail, alive == [True, True, False] and not changed


def work() -> list[Row]:
    """Do all of it on one rank."""
    before = traces()
    rows = [import_quietly(), share_group(), train_side_by_side(), use_part(), run_commands()]
    return [*rows, end_clean(before)]


def main() -> None:
    """Start two ranks by a vendored copy's launch."""
    first, second = of(VENDORED[0], "dist").launch(work, 2, init=False, timeout=100)
    rows = [(w, d, ok and other[2]) for (w, d, ok), other in zip(first, second, strict=True)]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
