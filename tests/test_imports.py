"""Names that users' code already uses stay importable exactly so."""

import importlib
import pkgutil
import subprocess
import sys

import pytest
from sweeps import today

NAMES = {
    "scaletorch.dist": "init_dist all_reduce all_gather get_rank launch collect_results",
    "scaletorch.dist.dist": "all_reduce all_gather gather broadcast scatter reduce all_to_all",
    "scaletorch.parallel.pg_manager": (
        "Grid ProcessGroupManager setup_process_group_manager get_process_group_manager"
    ),
    "scaletorch.parallel.tensor_parallel.tensor_parallel": (
        "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding apply_tensor_parallel"
    ),
    "scaletorch.parallel.tensor_parallel.tp_comms": (
        "CopyToModelParallelRegion ReduceFromModelParallelRegion GatherFromModelParallelRegion "
        "linear_with_all_reduce linear_with_async_all_reduce"
    ),
    "scaletorch.parallel.context_parallel.context_parallel": (
        "ring_attention apply_context_parallel update_out_and_lse update_rope_for_context_parallel"
    ),
    "scaletorch.parallel.context_parallel.cp_comms": "ContextCommunicate",
    "scaletorch.parallel.pipeline_parallel.pipeline_parallel": (
        "PipelineParallel train_step_pipeline_afab train_step_pipeline_1f1b"
    ),
    "scaletorch.parallel.pipeline_parallel.pp_comms": (
        "pipeline_communicate bidirectional_pipeline_communicate"
    ),
    "scaletorch.parallel.data_parallel.data_parallel": "DataParallelNaive DataParallelBucket",
    "scaletorch.parallel.data_parallel.bucket": "Bucket BucketManager",
    "scaletorch.parallel.expert_parallel.expert_parallel": "apply_expert_parallel",
}


@pytest.mark.parametrize("module", NAMES)
def test_documented_names(module):
    loaded = importlib.import_module(module)
    for name in NAMES[module].split():
        assert callable(getattr(loaded, name))
    package = importlib.import_module(module.rpartition(".")[0])
    assert all(hasattr(package, name) for name in getattr(package, "__all__", ()))


@pytest.mark.parametrize("module", ["scaletorch", "scaletorch.parallel"])
def test_a_namespace_has_no_init_file(module):
    assert importlib.import_module(module).__file__ is None


DEFERRED = [
    "scaletorch.dist",
    "scaletorch.parallel.pg_manager",
    "scaletorch.parallel.pipeline_parallel",
    "scaletorch.parallel.pipeline_parallel.building",
    "scaletorch.plan",
]


def test_no_submodule_is_called_like_a_name():
    """Python would put it over the name, whenever it is imported."""
    for package in map(importlib.import_module, DEFERRED):
        submodules = {found.name for found in pkgutil.iter_modules(package.__path__)}
        assert "public" in submodules
        assert not submodules & {*package.__all__}


FIRST = """
import importlib, os, sys, traceback
import torch.distributed

def alone(word):
    package, name = word.split(":")
    child = os.fork()
    if child == 0:
        try:
            getattr(importlib.import_module(package), name)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0

wrong = [word for word in sys.argv[1:] if not alone(word)]
assert "scaletorch.dist" not in sys.modules
assert not wrong, wrong
"""


def test_any_name_may_be_the_first_that_is_asked_for():
    names = [f"{p}:{name}" for p in DEFERRED for name in importlib.import_module(p).__all__]
    command = [sys.executable, "-c", FIRST, *today(names, 10)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_importing_all_of_it_leaves_the_compiler_out():
    """It takes seconds, of every program that never compiles."""
    names = ", ".join(sorted(name for name in NAMES if name.count(".") < 3))
    code = f"import sys, {names}, scaletorch.compose, scaletorch.verify, scaletorch.pretrain"
    code += "\nassert 'torch._dynamo' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
