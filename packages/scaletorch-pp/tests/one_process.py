"""Plain models beside their stages: the same weights, the same batches, the same gradients."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from scaletorch.dist import all_gather_object, all_reduce
from scaletorch.parallel.pg_manager import ModuleWrapper
from scaletorch.parallel.pipeline_parallel import (
    PipelineParallel,
    pipeline_forward,
    train_step_pipeline,
)


def world():
    return torch.distributed.group.WORLD


def build(kind, *args, **options):
    """Return a model of a class in float64, the same on every rank."""
    torch.manual_seed(0)
    return kind(*args, **options).double()


def split(plain, schedule="1f1b", points=None):
    """Return this rank's stages of a copy of a model."""
    return PipelineParallel(copy.deepcopy(plain), points, group=world(), schedule=schedule)


def pair(kind, *args, schedule="1f1b", points=None, **options):
    """Return a model of a class, and this rank's stages of a copy of it."""
    plain = build(kind, *args, **options)
    return plain, split(plain, schedule, points)


def forward_everywhere(stage, batches):
    """Return the outputs of the last stage on every rank."""
    return max(all_gather_object(pipeline_forward(stage, batches)), key=len)


class Layer(nn.Linear):
    def __init__(self, width=4, bias=True):
        super().__init__(width, width, bias=bias)

    def forward(self, x):
        return x + super().forward(x).tanh()


class Net(nn.Module):
    """An embedding, layers and a head; subclasses have other sizes, and run layers otherwise."""

    layer, num_layers, width, vocabulary = Layer, 8, 4, 4

    def __init__(self, num_layers=None, tied=False):
        super().__init__()
        self.make()
        self.layers = nn.ModuleList(self.layer() for _ in range(num_layers or self.num_layers))
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def make(self):
        """Register what comes before the layers."""
        self.embed = nn.Embedding(self.vocabulary, self.width)

    def forward(self, input_ids):
        return self.head(self.run(self.embed(input_ids)))

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Wrapper(ModuleWrapper):
    """Stands for a data parallel wrapper: sums gradients over a group in a synced backward."""

    def __init__(self, module, group=None):
        super().__init__(module)
        self.require_backward_grad_sync, self.group = True, group
        self.forwards, self.synced = 0, []  # how many there were, and for each backward

    def forward(self, *args, **kwargs):
        self.forwards += 1
        return self.module(*args, **kwargs)

    def backward(self, *args):
        self.synced.append(self.require_backward_grad_sync)
        result = self.module.backward(*args)
        if self.require_backward_grad_sync and self.group is not None:
            for parameter in self.parameters():
                all_reduce(parameter.grad, group=self.group)
        return result


def token_batches(count=4, rows=2, length=3, vocabulary=4):
    """Return micro-batches of random ids and labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (count, 2, rows, length), generator=generator)
    return [{"input_ids": ids, "labels": labels} for ids, labels in tokens]


def sum_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def accumulate(plain, batches, loss_fn=sum_loss):
    """Add the gradients of micro-batches as one process does; return their summed loss."""
    total = 0
    for batch in batches:
        rest = {n: value for n, value in batch.items() if n not in ("input_ids", "labels")}
        loss = loss_fn(plain(batch["input_ids"], **rest), batch)
        loss.backward()
        total = total + loss.detach()
    return total


def serial(plain, batches):
    """Accumulate as the pipeline does without a loss function; return the loss."""
    count = sum((batch["labels"] != -100).sum() for batch in batches)
    return accumulate(plain, batches, lambda output, batch: sum_loss(output, batch) / count)


def require_same(stage, plain, *, exact=False, summed=(), atol=1e-14):
    """Compare a rank's gradients with one process's: if exact by bits, but for those `summed`."""
    references = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in stage.named_parameters():
        expected = references[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if exact and name not in summed and expected is not None:
            assert torch.equal(parameter.grad, expected), name
        elif expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=atol)


def same_steps(plain, stage, batches, **tolerance):
    """Compare two steps: the first one's forwards are examined, the second one's are not."""
    for _ in range(2):
        serial(plain, batches)
        train_step_pipeline(stage, batches)
        require_same(stage, plain, **tolerance)


def trains_on(stage, plain, batches, loss_fn=sum_loss, *, exact=True, atol=1e-14):
    """Train one step more, from no gradients, as one process does."""
    stage.zero_grad()
    plain.zero_grad()
    loss = train_step_pipeline(stage, batches, loss_fn=loss_fn)
    expected = accumulate(plain, batches, loss_fn)
    expected = expected if stage.is_last_stage else torch.zeros_like(loss)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    require_same(stage, plain, exact=exact, atol=atol)
