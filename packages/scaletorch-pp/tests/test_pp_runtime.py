"""The runtime drops activations and gradients as soon as they have been used."""

import weakref

import pytest
import torch

from scaletorch.parallel.pipeline_parallel import SCHEDULES, Action, derive
from scaletorch.parallel.pipeline_parallel.runtime import execute


class Neighbours:
    """A wire that delivers tensors of its own and notes which gradients outlive their backward."""

    def __init__(self):
        self.gradients = []

    def swap(self, tensor, to_stage, from_stage):
        assert all(gradient() is None for gradient in self.gradients)
        assert (tensor is None) <= (to_stage is None)
        if from_stage is None:
            return None
        arrived = torch.ones(2)
        if from_stage == 2:
            self.gradients.append(weakref.ref(arrived))
        return arrived


class Work:
    """Notes each action and how many outputs are alive when it begins."""

    def __init__(self):
        self.outputs = []
        self.seen = []

    def forward(self, micro_batch, hidden):
        assert hidden is None or hidden.requires_grad
        self.note(Action("F", micro_batch))
        output = torch.ones(2)
        self.outputs.append(weakref.ref(output))
        return output

    def backward(self, micro_batch, hidden, output, gradient):
        self.note(Action("B", micro_batch))
        assert output is self.outputs[micro_batch]()
        return None if hidden is None else torch.zeros(2)

    def note(self, action):
        self.seen.append((action, sum(output() is not None for output in self.outputs)))


@pytest.mark.parametrize("name", ["afab", "1f1b"])
@pytest.mark.parametrize(("stage", "num_stages"), [(0, 1), (1, 3)])
def test_outputs_live_from_their_forward_to_their_backward(name, stage, num_stages):
    actions = SCHEDULES[name](num_stages, 3).ranks[stage]
    work, wire = Work(), Neighbours()
    execute(derive(actions, stage, num_stages), wire, work.forward, work.backward)
    live, expected = 0, []
    for action in actions:
        expected.append((action, live))
        live += 1 if action.kind == "F" else -1
    assert work.seen == expected
    assert len(wire.gradients) == (3 if num_stages > 1 else 0)
