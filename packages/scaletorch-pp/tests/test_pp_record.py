"""A real step, recorded: the schedule's actions in its order, drawn beside the predicted ones."""

import json
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from scaletorch.dist.errors import StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    Split,
    recording,
    simulate,
    train_step_pipeline_1f1b,
)
from scaletorch.parallel.pipeline_parallel.drawing import to_chrome_trace

PAUSE = 0.02


class Slow(nn.Linear):
    """A layer whose forward takes a while."""

    def forward(self, x):
        time.sleep(PAUSE)
        return super().forward(x)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), Slow(4, 4), Slow(4, 4), nn.Linear(4, 7))


def step(stage):
    ids = torch.arange(6).view(1, 6)
    batches = [{"input_ids": ids, "labels": ids}] * 3
    return train_step_pipeline_1f1b(stage, batches, (1, 6, 4), "cpu", torch.float32)


def recorded():
    setup_process_group_manager(pp_size=2)
    try:
        stage = PipelineParallel(make(), Split(points=("2",)))
        plain = step(stage)
        with recording(stage) as recorder:
            with pytest.raises(StateError, match="no train step has run"):
                recorder.timeline()
            with pytest.raises(StateError, match="recorded already"), recording(stage):
                pass
            same = torch.equal(step(stage), plain)
            step(stage)
            timeline = recorder.timeline()
        assert stage.runtime.timed is None
        return same, timeline
    finally:
        destroy_process_group_manager()


def test_a_step_is_recorded_as_its_schedule_says():
    for same, timeline in run_ranks(recorded, 2):
        assert same
        schedule = timeline.schedule
        for rank, actions in enumerate(schedule.ranks):
            spans = [span for span in timeline.spans if span.rank == rank]
            assert tuple(span.action for span in spans) == actions
            for before, after in pairwise(spans):
                assert 0 <= before.start <= before.end <= after.start
        forwards = [s.end - s.start for s in timeline.spans if s.action.kind == "F"]
        assert min(forwards) >= PAUSE
        # Stage 1 forwards one by one what stage 0 has forwarded.
        assert timeline.makespan >= 4 * PAUSE
        assert 0 <= timeline.bubble < 1
        events = json.loads(to_chrome_trace(simulate(schedule), timeline))["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == 2 * len(timeline.spans)
