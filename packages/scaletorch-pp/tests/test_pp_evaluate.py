"""Forwards without labels give what one process gives."""

import pytest
import torch
from torch import nn

from scaletorch.dist.errors import MismatchError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    pipeline_forward,
    train_step_pipeline_1f1b,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(5))
        self.head = nn.Linear(4, 7)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Model()


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(7, (2, 6), generator=generator)} for _ in range(count)]


def forwards(size, everywhere):
    manager = setup_process_group_manager(pp_size=size)
    try:
        plain = build().eval()
        expected = [plain(batch["input_ids"]) for batch in batches()]
        stage = PipelineParallel(build()).eval()
        outputs = pipeline_forward(
            stage, batches(), (2, 6, 4), "cpu", torch.float32, everywhere=everywhere
        )
        assert not any(output.requires_grad for output in outputs)
        assert not any(p.grad is not None for p in stage.parameters())
        labelled = [batch | {"labels": batch["input_ids"]} for batch in batches()]
        train_step_pipeline_1f1b(stage, labelled, (2, 6, 4), "cpu", torch.float32)
        assert all(p.grad is not None for p in stage.parameters())
        same = [torch.equal(a, b) for a, b in zip(outputs, expected, strict=False)]
        return manager.pp_rank, same
    finally:
        destroy_process_group_manager()


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_outputs_are_those_of_one_process(size, everywhere):
    for rank, same in run_ranks(forwards, size, size, everywhere):
        assert same == ([True] * 4 if everywhere or rank == size - 1 else [])


def differing():
    manager = setup_process_group_manager(pp_size=2)
    try:
        stage = PipelineParallel(build())
        with pytest.raises(MismatchError, match=r"(?s)these forwards.*4 micro.*3 micro"):
            pipeline_forward(stage, batches(4 - manager.pp_rank), (2, 6, 4), "cpu", torch.float32)
    finally:
        destroy_process_group_manager()


def test_stages_that_differ_are_told():
    run_ranks(differing, 2)
