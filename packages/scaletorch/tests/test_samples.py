"""Ranks that part later are found by default, within few steps, and right ones are left alone."""

import copy
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as c10d
from sweeps import today
from torch import nn
from training import tokens

from scaletorch.compose import (
    clip_grad_norm_,
    eval_step,
    parallelize,
    samples,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import MismatchError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.models import Llama, LlamaConfig, Mixture, MixtureConfig
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

SIZES = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_heads=4,
    num_kv_heads=2, tie_embeddings=True,
)  # fmt: skip
NORM, SHARD = "layers.1.input_layernorm.weight", "layers.1.mlp.down_proj.weight"
EXPERT = "layers.1.mlp.experts.down_proj"
TP, PP = {"tp_size": 2, "dp_size": 2}, {"pp_size": 2, "dp_size": 2}
EP = {"dp_size": 4, "ep_size": 2}
SHARED = {"sequence_parallel": True}
V = {"schedule": "zb_v"}
LAYOUTS = [  # sizes, ZeRO, options
    (TP, 0, {}), (TP, 1, SHARED), (TP, 2, SHARED), ({"cp_size": 2, "dp_size": 2}, 0, {}),
    (PP, 1, V), ({"tp_size": 2, "pp_size": 2}, 0, {**SHARED, "recompute": True}),
    (EP, 0, {"mixture": True}),
    ({"tp_size": 2, "dp_size": 2, "ep_size": 2}, 1, {"mixture": True, **SHARED}),
]  # fmt: skip


class Job:
    """A small training on a layout, with another learning rate on some ranks if asked for."""

    def __init__(
        self, sizes, zero=0, *, mixture=False, lr=0.01, prepare=None, dtype=None, **options
    ):
        self.manager = setup_process_group_manager(**sizes)
        torch.manual_seed(0)
        layers = options.pop("layers", 4 if "schedule" in options else 2)  # one for each stage
        if mixture:
            plain = Mixture(MixtureConfig(**SIZES, num_layers=layers, num_experts=4))
        else:
            plain = Llama(LlamaConfig(**SIZES, num_layers=layers))
        plain.to(dtype)
        if prepare is not None:
            prepare(plain)
        self.model = parallelize(plain, self.manager, **options, rehearse=False)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=lr)
        if zero:
            shard_optimizer(self.optimizer, self.model, stage=zero, overlap=zero == 2)
        self.steps = 0

    def batch(self):
        return tokens(self.steps, rows=8)

    def backward(self):
        train_step(self.model, shard_global_batch(self.batch(), 2, self.manager))
        self.steps += 1

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps):
        for _ in range(steps):
            self.step()

    def parameter(self, name):
        return dict(self.model.named_parameters()).get(name)

    def steps_until_told(self, most, step=None):
        """Return how many further steps it takes until ranks are told, and what they are told."""
        for count in range(1, most + 1):
            try:
                (step or self.step)()
            except MismatchError as error:
                return count, str(error)
        raise AssertionError(f"{most} steps, and nothing was said")


def on_every_layout(check, layouts):
    """Check layouts one after another, with samples in every second step."""
    for sizes, zero, options in layouts:
        try:
            leaving_nothing(check, sizes, zero, dict(options), period=2)
        except Exception as error:
            error.add_note(f"{sizes}, ZeRO {zero}, {options}")
            raise


def leaving_nothing(check, *args, period=samples.PERIOD):
    """Run a check, so that the next one may have the same ranks."""
    usual = samples.PERIOD
    samples.PERIOD = period
    check(*args)
    samples.PERIOD = usual
    destroy_process_group_manager()


def from_all_sides(sizes, zero, options):
    """Train well; then part ranks by a tensor, an element and a rate, each put right after it."""
    job = Job(sizes, zero, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.train(5)
    for change in (partial(by_hand, where=slice(None)), partial(by_hand, where=slice(3, 4)), rate):
        kept = {name: value.clone() for name, value in job.model.state_dict().items()}
        if change(job, zero):
            job.model.load_state_dict(kept)
            job.optimizer.state.clear()
            job.train(2)


def by_hand(job, zero, where):
    """Change a norm by hand on ranks of tp; without it on one of dp, if ZeRO does not fetch it."""
    tp = job.manager.tp_size > 1
    if zero and not tp:
        return False
    parameter = job.parameter(NORM)
    if parameter is not None and (job.manager.tp_rank if tp else job.manager.dp_rank == 1):
        job.model.wait_for_parameters()
        with torch.no_grad():
            parameter[where] += 0.5
    _, text = job.steps_until_told(samples.PERIOD + 1)
    first = text.splitlines()[1]
    assert re.match(rf"  parameter {NORM}: on rank \d \(dp\d .* not as on ", first), text
    assert re.search(r"\(up to \d\.\de-\d+ of the largest value apart\)", first), text
    assert "or values were changed or loaded on some ranks alone" in text
    return True


def rate(job, zero):
    """Let one rank have another learning rate."""
    if zero and job.manager.tp_size == 1:  # each rank updates what it alone does
        return False
    for group in job.optimizer.param_groups:
        group["lr"] *= 1 + (c10d.get_rank() == 3)
    count, text = job.steps_until_told(samples.PERIOD + 2)
    assert count in (2, 3) or zero, text  # by the rates that ranks tell, or by a sample
    assert "optimizer" in text or zero, text
    for group in job.optimizer.param_groups:
        group["lr"] = 0.01
    return True


def frozen(model):
    model.layers[0].requires_grad_(False)


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def changing(sizes, zero, options):
    """Go through what a training may do to its parameters, on all ranks alike."""
    job = Job(sizes, zero, **options)
    job.train(2)
    kept = {name: value.clone() for name, value in job.model.state_dict().items()}
    job.train(2)
    job.model.load_state_dict(kept)
    eval_step(job.model, shard_global_batch(job.batch(), 1, job.manager))
    average = None if job.manager.pp_size > 1 else copy.deepcopy(job.model)
    job.train(1)
    if average is not None and c10d.get_rank() == 1:  # trains no more, is compared with nothing
        average.module.get_parameter(f"module.{NORM}").data.zero_()
    for parameter in job.model.parameters():
        parameter.data = parameter.data.clone()
    job.train(3)


BF16 = {"dtype": torch.bfloat16, "data_parallel": {"grad_type": torch.float32}}
OTHERS = [
    (TP, 0, {"prepare": frozen}),
    (TP, 0, {"prepare": untied, **BF16}),
    (TP, 0, {"dtype": torch.float64}),
    (PP, 0, {"prepare": untied, "schedule": "dualpipe_v"}),
    (PP, 0, {**V, **BF16}),
    ({"cp_size": 2, "tp_size": 2}, 0, SHARED),
]


@distributed_test(2)
def test_one_bit_is_found_within_a_period():
    """The usual one, of one bit that rounding does not take away again."""
    for name in (NORM, SHARD):
        job = Job({"dp_size": 2})
        job.step()
        if job.manager.dp_rank:
            job.parameter(name).data.view(torch.int32).view(-1)[7] ^= 1 << 20
        _, text = job.steps_until_told(17)
        assert f"parameter {name}: on rank 1 " in text
        destroy_process_group_manager()


def in_shards(sizes, zero, options):
    """Let one rank change its shard over tp, or its expert, of which one other has the same."""
    job = Job(sizes, zero, **options)
    job.step()
    name = EXPERT if options.get("mixture") else SHARD
    parameter = job.parameter(name)
    if job.manager.global_rank == 3 and parameter is not None:
        with torch.no_grad():
            parameter.view(-1)[-1] += 0.5
    _, text = job.steps_until_told(samples.PERIOD + 1)
    assert f"parameter {name}: on rank 3 (" in text, text
    assert "not as on rank 1 (" in text


def clip(job):
    nn.utils.clip_grad_norm_(job.model.parameters(), 0.01)


def clip_by_hand(job):
    norms = [each.grad.norm() for each in job.model.parameters()]
    for each in job.model.parameters():
        each.grad.data.mul_(0.01 / torch.stack(norms).norm())  # which no version tells


def clip_shards(job):
    for group in job.optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 0.01)


def scaled_before(job, change):
    """Train a step whose gradients are changed before the optimizer's."""
    job.backward()
    change(job)
    job.optimizer.step()
    job.optimizer.zero_grad()


def clipped(sizes, zero, options):
    """Clip by the norm of a rank's own gradients from the second step on."""
    for change in (clip_shards,) if zero else (clip, clip_by_hand):
        job = Job(sizes, zero, prepare=untied, **options)
        job.step()
        count, text = job.steps_until_told(3, partial(scaled_before, job, change))
        assert count == 2, text
        found = re.search(r"step: by (\S+) on rank \d \(.*\), by (\S+) on rank \d \(", text)
        assert float(found[1]) < float(found[2]) < 1, text
        assert "use scaletorch.compose.clip_grad_norm_(model, max_norm)" in text
        destroy_process_group_manager()


OF_FOUR = [
    (TP, 0, SHARED), ({"tp_size": 4}, 0, {}), ({"tp_size": 2, "pp_size": 2}, 0, V),
    ({"tp_size": 2, "cp_size": 2}, 0, {}), (PP, 0, {}), ({"pp_size": 2, "cp_size": 2}, 0, {}),
    ({"pp_size": 4}, 0, {"layers": 4}), (EP, 0, {"mixture": True}), (PP, 1, V),
    ({"dp_size": 4}, 1, {}), (TP, 2, {}),
]  # fmt: skip


def on_all(kind, change):
    """Return what changes the gradients or weights of a job one after another, by name."""

    @torch.no_grad()
    def changed(job):
        for name, each in job.model.named_parameters():
            change(name, each.grad if kind == "gradient" else each)

    return changed


WRONG = [  # by statistics of shards
    ("gradient", lambda _, x: x.div_(x.norm())),
    ("gradient", lambda _, x: x.sub_(x.mean())),
    ("weight", lambda _, x: x.div_(x.norm())),
    ("weight", lambda _, x: x.data.sub_(x.data.mean())),
]


def of_shards(sizes, zero, options):
    """Change gradients and weights by statistics of shards, from the third step on."""
    for kind, change in WRONG:
        job, changed = Job(sizes, zero, prepare=untied, **options), on_all(kind, change)
        job.train(2)
        if kind == "gradient":
            count, text = job.steps_until_told(4, partial(scaled_before, job, changed))
        else:
            changed(job)
            count, text = job.steps_until_told(2)
        assert count == (2 if kind == "gradient" else 1), text
        said = (
            rf"the {kind} \S+ was changed differently on tp ranks, .*: times \S+ plus \S+ on rank"
        )
        assert re.search(said, text), text
        assert "sum it over manager.tp_group" in text
        destroy_process_group_manager()


def whole_rows(name):
    return "q_proj" in name or "gate_proj" in name  # of which each rank has whole rows


RIGHT = [
    ("gradient", lambda _, x: x.mul_(0.37)),
    ("gradient", lambda _, x: x.clamp_(-1e-4, 1e-4)),
    ("gradient", lambda name, x: x.mul_(0.5 if "mlp." in name else 0.9)),
    ("gradient", lambda name, x: whole_rows(name) and x.sub_(x.mean(1, keepdim=True))),
    ("weight", lambda _, x: x.mul_(0.9).add_(0.01).clamp_(-0.05, 0.05)),
    ("weight", lambda name, x: whole_rows(name) and x.div_(x.norm(dim=1, keepdim=True))),
    ("weight", lambda _, x: x.mul_(0.9).add_(0.01)),
]


def changed_rightly(sizes, zero, options):
    """Let gradients and weights be changed as is right on every rank."""
    job = Job(sizes, zero, prepare=untied, **options)
    whole = [("gradient", lambda _, x: x.div_(x.norm() + 1e-12))] * (job.manager.tp_size == 1)
    for kind, change in () if zero else (*RIGHT, *whole):
        if kind == "gradient":
            scaled_before(job, on_all(kind, change))
        else:
            on_all(kind, change)(job)
        job.step()
    scaled_before(job, lambda job: clip_grad_norm_(job.model, 0.01))
    job.step()
    if not zero:
        scaled_before(job, lambda job: job.optimizer.zero_grad())
        job.step()


PLACES = [(TP, 0, {}), (TP, 0, SHARED), (EP, 0, {"mixture": True})]
WITH_TP = [each for each in OF_FOUR if "tp_size" in each[0] and not each[1]]
CHECKS = {  # on layouts of which each day tries some
    "ranks that part are told, and others are left alone": (from_all_sides, LAYOUTS, 8),
    "what all ranks change alike is right": (changing, OTHERS, 6),
    "shards and experts are compared with those of the same place": (in_shards, PLACES, 3),
    "clipping by the norm of a rank is refused in the next step": (clipped, OF_FOUR, 5),
    "statistics of shards are refused": (of_shards, WITH_TP, 4),
    "changes of gradients that are right are left alone": (changed_rightly, OF_FOUR, 5),
}


@pytest.mark.parametrize("claim", CHECKS)
def test_on_every_layout(claim):
    check, layouts, days = CHECKS[claim]
    run_ranks(on_every_layout, 4, check, today(layouts, days), timeout=200)


def one_of_four():
    """The minority is named, and the cause is the optimizer."""
    job = Job({"dp_size": 4}, lr=0.02 if c10d.get_rank() == 2 else 0.01)
    _, text = job.steps_until_told(samples.PERIOD + 2)
    said = r"\n  parameter .*: on rank 2 \(dp2 pp0 cp0 tp0\) .* not as on the other 3 of 4\n"
    assert re.search(said, text), text
    assert "Optimizers have other settings" in text


def test_the_rank_of_another_learning_rate_is_named():
    run_ranks(leaving_nothing, 4, one_of_four)


def local_updates():
    """Ranks that keep gradients to themselves part as they should; averaged, they are compared."""
    job = Job({"dp_size": 2})
    for _ in range(2):
        for _ in range(3):
            with job.model.no_sync():
                job.step()
        for parameter in job.model.parameters():
            c10d.all_reduce(parameter.data)
            parameter.data.div_(2)
        job.optimizer.state.clear()
        for _ in range(2):
            job.step()
    with job.model.no_sync():
        job.step()
    _, text = job.steps_until_told(3)
    assert "parameter" in text


def test_ranks_may_part_as_long_as_gradients_stay_on_them():
    run_ranks(leaving_nothing, 2, local_updates, period=4)


def come_later():
    """They are compared from the next period on, or it is said that they are not."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    job = Job({"dp_size": 2})
    job.step()
    base = job.model.module.module
    base.extra = nn.Parameter(torch.zeros(3), requires_grad=False)
    mesh = job.manager.device_mesh["dp"]
    base.other = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]), False)
    with pytest.warns(UserWarning, match="cannot compare other between ranks"):
        job.train(samples.PERIOD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.train(2)
        base.extra[job.manager.dp_rank] = 1.0
        _, text = job.steps_until_told(samples.PERIOD + 1)
    assert "parameter extra: on rank 1" in text


def test_parameters_that_come_later():
    run_ranks(leaving_nothing, 2, come_later, period=4)


def rounded():
    """What kernels of an accelerator part by is warned of once, over tp alone."""
    exact, samples.EXACT = samples.EXACT, ()
    job = Job({"tp_size": 2})
    job.step()
    job.parameter(NORM).data.mul_(1 + 1e-6 * job.manager.tp_rank)
    with pytest.warns(UserWarning, match=rf"{NORM}.* differ between tp ranks") as said:
        job.train(2 * samples.PERIOD)
    ours = [each for each in said if "differ between tp ranks" in str(each.message)]
    assert 1 <= len(ours) <= samples.PERIOD
    destroy_process_group_manager()
    job = Job({"dp_size": 2})
    job.step()
    job.parameter(NORM).data.mul_(1 + 1e-6 * job.manager.dp_rank)
    _, text = job.steps_until_told(samples.PERIOD + 1)
    assert f"parameter {NORM}" in text
    samples.EXACT = exact


def test_rounding_of_accelerators_is_no_mistake_over_tp():
    run_ranks(leaving_nothing, 2, rounded, period=4)
