"""Every example runs as its README says, and computes what one process does."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from document_programs import run_python
from sweeps import today

from scaletorch.dist.errors import ScaletorchError
from scaletorch.dist.testing import preload, run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
COMMANDS = dict(
    re.findall(r"`python (examples/\S+\.py)(.*?)`", (EXAMPLES / "README.md").read_text())
)
LLAMA = ("torch._dynamo", "transformers.models.llama.modeling_llama")
TRAINER = (*LLAMA, "transformers.trainer")
LAUNCHERS = {"mpi.sh", "slurm.sbatch", "slurm_torchrun.sbatch", "train.py", "ray_train.py"}


def load(name):
    """Return an example as a module; ranks do so too, since they cannot import it by name."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def run(program, folder, *modules):
    """Run a program as `python PROGRAM` does; return the numbers of each line that it prints."""
    preload(*modules)
    return numbers(run_python([str(ROOT / program)], folder))


def numbers(printed):
    found = (re.findall(r"-?\d+\.\d+(?:e-?\d+)?", line) for line in printed.splitlines())
    return [[float(number) for number in line] for line in found]


def test_the_readme_names_every_program():
    programs = {str(p.relative_to(ROOT)) for p in EXAMPLES.glob("*.py")}
    assert COMMANDS.keys() == programs
    assert {p.name for p in (EXAMPLES / "launchers").iterdir() if p.is_file()} == LAUNCHERS


def test_buckets_only(tmp_path):
    one, two, difference = run("examples/buckets_only.py", tmp_path)
    assert one == pytest.approx(two, abs=1.1e-5)
    assert one[-1] < 0.7 * one[0]
    assert difference[-1] < 1e-5


def test_own_attention(tmp_path):
    (one, four), (worst,) = run("examples/own_attention.py", tmp_path)
    assert one == pytest.approx(four, rel=1e-6)
    assert worst < 1e-5


@pytest.mark.parametrize(
    "name", today(["vision_transformer", "diffusion_transformer", "recurrent"], 3)
)
def test_models_that_read_no_tokens(name, tmp_path):
    one, *layouts = [line[-8:] for line in run(f"examples/{name}.py", tmp_path)]
    assert len(one) == 8  # steps
    assert len(layouts) == 2
    assert all(losses == pytest.approx(one, abs=1.1e-8) for losses in layouts)
    assert one[-1] < one[0]


OF_FOUR = [
    {"tp_size": 4}, {"tp_size": 2, "dp_size": 2}, {"tp_size": 2, "pp_size": 2},
    {"tp_size": 2, "cp_size": 2},
]  # fmt: skip
WRONG_PLANS = {  # what is changed in the right one -> what its user is told
    "parts of a weight": ({"blocks.*.mix.into": "column"}, "packs several projections Fused"),
    "numbers of heads": (
        {"blocks.*.mix": "sharded"},
        r"let the plan divide the attribute \(Div",
    ),
    "the tied table": ({"words": "replicate"}, "are one tied parameter, but the plan replicates"),
}


def with_own_plans(wanted):
    """Train by the example's plan, and by wrong ones, on every layout of 4 ranks."""
    example = load("own_plan")

    def trained(sizes, **changes):
        try:
            return example.train(sizes, example.PLAN | changes)
        finally:
            destroy_process_group_manager()

    for sizes in OF_FOUR:
        assert trained(sizes) == pytest.approx(wanted, rel=1e-11), sizes
        for changes, text in WRONG_PLANS.values():
            with pytest.raises(ScaletorchError, match=text):
                trained(sizes, **changes)


def test_own_plan(tmp_path):
    one, *layouts = [line[:6] for line in run("examples/own_plan.py", tmp_path)]
    assert len(layouts) == 3
    assert all(losses == pytest.approx(one, abs=1.1e-8) for losses in layouts)


def test_own_plan_and_wrong_ones_on_every_layout():
    wanted = load("own_plan").train({})
    destroy_process_group_manager()
    run_ranks(with_own_plans, 4, wanted, timeout=200)


def test_finetune_transformers(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    *steps, (ranks,), (process,) = run("examples/finetune_transformers.py", tmp_path, *LLAMA)
    assert ranks == pytest.approx(process, abs=1.1e-4)
    assert ranks < 0.8 * steps[0][0]


def test_grid_trainer(tmp_path):
    pytest.importorskip("accelerate")
    printed = run("examples/grid_trainer.py", tmp_path, *TRAINER)
    *steps, (bound,) = printed[-7:]  # behind what Trainer itself prints
    for one, four in steps:
        assert four == pytest.approx(one, abs=2.1e-5)
    assert steps[-1][0] < 0.9 * steps[0][0]
    assert bound < 1e-5


def on_grids(folder):
    """Train on two grids, and on a third evaluate, save and resume; return what each has found."""
    example = load("grid_trainer")
    curves = [
        example.on_grid(folder, torch.float64, **{axis: 2}) for axis in ("pp_size", "cp_size")
    ]
    manager = setup_process_group_manager(tp_size=2)
    saving = example.arguments(folder, save_strategy="steps", save_steps=4)

    def trainer(seed):
        model, curve = example.make_model().double(), example.Curve()
        for parameter in model.parameters():
            parameter.data.add_(seed)
        both = {"train_dataset": example.rows(), "callbacks": [curve]}
        found = example.GridTrainer(model, saving, manager=manager, micro_batches=2, **both)
        return found, curve

    first, _ = trainer(0)
    first.train()
    loss = first.evaluate(example.rows()[:12])["eval_loss"]  # the last batch has half of the rows
    second, rest = trainer(1)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    again = second.evaluate(example.rows()[:12])["eval_loss"]
    with pytest.raises(ValueError, match="no bf16=True: load the model in bfloat16"):
        example.GridTrainer(None, example.arguments(folder, bf16=True), manager=None)
    return [(curve.losses, curve.norms) for curve in curves], (loss, rest.losses, again)


@pytest.mark.timeout(300)
def test_grid_trainer_on_other_grids(tmp_path):
    pytest.importorskip("accelerate")
    preload(*TRAINER)
    example = load("grid_trainer")
    one, trainer = example.plain(tmp_path, torch.float64)
    expected = trainer.evaluate(example.rows()[:12])["eval_loss"]
    curves, (loss, rest, again) = run_ranks(on_grids, 2, tmp_path, timeout=200)[0]
    for losses, norms in curves:
        assert losses == pytest.approx(one.losses, rel=1e-6)  # Trainer keeps float32 of them
        assert norms == pytest.approx(one.norms, rel=1e-5)
    assert [loss, again] == pytest.approx([expected] * 2, rel=1e-6)
    assert rest == pytest.approx(one.losses[4:], rel=1e-6)
    saved = example.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    for name, weight in trainer.model.state_dict().items():
        # Adam makes steps of what rounding leaves of a gradient that is nearly zero; they are 3e-3.
        torch.testing.assert_close(saved.state_dict()[name], weight, rtol=0, atol=1e-5)


def fsdp2(**sizes):
    try:
        return load("fsdp2").work(dtype=torch.float64, **sizes)
    finally:
        destroy_process_group_manager()


@pytest.mark.parametrize("layout", today(["dp2 tp2", "dp2 cp2", "dp2 cp2 tp2"], 3))
def test_fsdp2_in_float64(layout):
    preload("torch._dynamo")  # which FSDP2 imports
    losses, weights = fsdp2()
    sizes = {axis[:2]: int(axis[2:]) for axis in layout.split()}
    for found, whole in run_ranks(partial(fsdp2, **sizes), 2 ** len(sizes), timeout=200):
        assert found == pytest.approx(losses, rel=1e-12)
        assert whole.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(whole[name], weight, rtol=1e-11, atol=1e-13)


@pytest.mark.timeout(300)
def test_fsdp2(tmp_path):
    one, *others = run("examples/fsdp2.py", tmp_path, "torch._dynamo")
    assert len(one) == 3
    assert others == [pytest.approx(one, rel=1e-5)] * 2


@pytest.mark.timeout(300)  # each rank imports deepspeed
def test_deepspeed_grid():
    folder = ROOT / ".launchers" / "deepspeed"
    packages = next(folder.glob("lib/python3*/site-packages"), None)
    if packages is None:
        pytest.skip("not installed: hatch env create deepspeed")
    path = ":".join([*filter(None, [os.environ.get("PYTHONPATH")]), str(packages)])
    done = subprocess.run(
        [sys.executable, "examples/deepspeed_grid.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, *others = numbers(done.stdout)
    assert len(one) == 10
    assert others == [pytest.approx(one, abs=2.1e-4)] * 2
