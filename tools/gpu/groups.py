"""The groups in the order in which they run: the table to change."""

from __future__ import annotations

from typing import Any, NamedTuple

from scaletorch.parallel.context_parallel import kernels


class Group(NamedTuple):
    """One group of checks, which has its own process.

    Attributes:
        name: Name; `--only` takes all groups whose names begin with a word.
        function: `file.function` of this folder, called with `Checks` and the arguments.
        limit: Seconds after which the group counts as hung.
        arguments: Further arguments of the function.
        shares: Whether its ranks share a GPU under the group's own CUDA MPS daemon, which makes
            messages a hundred times faster, but lets one rank's fault end all.
    """

    name: str
    function: str
    limit: float
    arguments: tuple[Any, ...] = ()
    shares: bool = True


# Possible reasons why four stages with a tied head hang: each setting changes one thing.
MATRIX: dict[str, dict[str, str]] = {
    "as it is": {},
    "all pairs first": {},
    "eager modules": {"CUDA_MODULE_LOADING": "EAGER"},
    "cumem": {"NCCL_CUMEM_ENABLE": "1"},
    "no mps": {},
    "one cta": {"NCCL_MAX_CTAS": "1", "NCCL_MAX_NCHANNELS": "1"},
    "torch alone": {},
}
ALL = ("float64", "float32", "bfloat16")
SCHEDULES = (
    "1f1b", "afab", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v",
)  # fmt: skip
METHODS = ("ring", "all_gather", "ulysses", "hybrid")
# Name -> ranks or layouts, dtypes, values of the proof's options, sizes of expert parallelism.
PROOFS: dict[str, tuple[Any, ...]] = {
    "2 ranks": (2, ALL, {}, None),
    "4 ranks": (4, ALL, {}, None),
    "schedules": (("1x2x1x1", "1x4x1x1"), ALL[:1], {"schedule": SCHEDULES}, None),
    "methods": (("1x1x2x1", "1x1x4x1"), ALL[1:2], {"cp_method": METHODS}, None),
    "sequences": (
        ("1x1x1x2", "1x1x2x2"), ALL[1:],
        {"sequence_parallel": ("on",), "loss_parallel": ("off", "on")}, None,
    ),
    "zero": (("2x1x1x1", "2x1x1x2"), ALL, {"data_parallel": ("zero1", "zero2")}, None),
    "recompute": (("1x1x1x2", "1x2x1x1"), ALL[1:2], {"recompute": ("layers", "selective")}, None),
    "experts": (2, ALL[:2], {}, (2,)),
}  # fmt: skip
KERNELS = dict.fromkeys(kernel.name for kernel in (*kernels.KERNELS["cuda"], kernels.TILE))

_PROOFS = [
    Group(f"proof: {name}", "suites.proof", 60 if name == "4 ranks" else 35, what)
    for name, what in PROOFS.items()
]

GROUPS = (
    *(
        Group(f"matrix: {name}", "matrix.cell", 45, (name, env), name != "no mps")
        for name, env in MATRIX.items()
    ),
    Group("tests marked gpu", "suites.marked", 60, shares=False),
    Group("bodies of every backend", "suites.bodies", 40),
    *(
        Group(f"kernel {name}", "kernels.blocks", 90 if name == "flex" else 40, (name,), False)
        for name in KERNELS
    ),
    Group("attention", "kernels.calls", 60, (), False),
    Group("rehearsal", "training.rehearsals", 40),
    Group("messages", "training.messages", 40),
    *_PROOFS[:2],
    Group("checkpoints", "faults.checkpoints", 40),
    Group("guard", "faults.guarded", 60, (), False),
    Group("step, eager", "figures.speed", 40, (False,), False),
    Group("step, compiled", "figures.speed", 90, (True,), False),
    Group("shape of Llama 3 8B", "figures.large", 60, (), False),
    Group("kernels beside torch", "figures.attention", 40, (), False),
    Group("axes", "figures.axes", 60),
    *_PROOFS[2:],  # as far as time allows
)
