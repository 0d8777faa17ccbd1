"""Files to mutate, files to leave out, and tests that are not asked: data with reasons."""

from __future__ import annotations

_DIST = "packages/scaletorch-dist/src/scaletorch/dist"
_UMBRELLA = "packages/scaletorch/src/scaletorch"

# Files and folders that compute, move or store numbers.
SOURCES = (
    f"{_DIST}/collectives",
    f"{_DIST}/params.py",
    f"{_DIST}/functional.py",
    f"{_DIST}/transport",
    f"{_DIST}/wire",
    "packages/scaletorch-pg/src/scaletorch/parallel/placement",
    "packages/scaletorch-tp/src",
    "packages/scaletorch-cp/src",
    "packages/scaletorch-pp/src",
    "packages/scaletorch-dp/src",
    "packages/scaletorch-ep/src",
    f"{_UMBRELLA}/compose",
    f"{_UMBRELLA}/checkpoint",
)

# Patterns of files among them that are not mutated.
FILES_LEFT_OUT = {
    "*/__init__.py": "names what is public and defines nothing",
    "*/public.py": "the same",
    "*/__main__.py": "a command, not numbers",
    "*/_version.py": "a version",
    "*/drawing.py": "pictures",
}

# Functions that are not mutated: they make text for people.
FUNCTIONS_LEFT_OUT = ("__repr__", "__str__")

# Never mutated anywhere: strings, f-strings and expressions in them, docstrings, the operand of
# `raise` (the condition above it is mutated), annotations, decorators, imports.

# Patterns of tests that are not run. A mutant that only they notice counts as a survivor.
TESTS_LEFT_OUT = {
    "*/real_launchers/*": "start what other tests start too, by foreign launchers",
    "*/test_collectives_gpu.py": "needs a GPU",
    "*/test_dist_bench.py": "of measuring, not of numbers",
    "*/test_dist_devices.py": "of devices",
    "*/test_dist_import.py": "of imports",
    "*/test_dist_init.py": "of starting",
    "*/test_dist_launchers.py": "of starting",
    "*/test_dist_ranks.py": "of starting",
    "*/test_dist_testing.py": "of starting",
    "*/test_guard*.py": "of the guard",
    "*/test_mutants.py": "plants faults by name, and so judges the proof rather than the sources",
    "*/test_pretrain.py": "whole programs: slow, and of the same parts",
    "*/test_roll_call.py": "of starting",
    "*/test_tp_compile.py": "compilers: minutes, and of the same numbers",
    "*/test_vendor_devices.py": "of devices",
    "*/test_verify_vendors.py": "of devices",
    "packages/scaletorch-pg/tests/test_grid.py": "of numbers of ranks, which are not mutated",
    "packages/scaletorch-pg/tests/test_loss.py": "the same",
    "packages/scaletorch-pg/tests/test_pg_*": "of process groups",
}

# Modules that import slowly: a process that has them is forked for each mutant.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.nn.attention",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.utils.checkpoint",
    "pytest",
    "_pytest.assertion.rewrite",
    "pytest_timeout",
    "numpy",
    "hypothesis",
    "hypothesis.strategies",
    "safetensors.torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.gemma2.modeling_gemma2",
)
