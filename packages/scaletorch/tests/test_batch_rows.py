"""Rows of a global batch: any entries and any number, cut, passed whole, or asked about."""

import functools

import pytest
import torch
from sweeps import today
from test_loss_reads import PLAN, WIDTH, Layer
from torch import nn
from training import FOUR, adamw, cross_entropy, grid, in_one_process, llama, train_and_compare

from scaletorch.compose import eval_step, parallelize, rows_of_step, shard_global_batch
from scaletorch.compose.batches import rows_of_ranks
from scaletorch.dist.testing import run_ranks
from scaletorch.verify import assert_trains_alike

ROWS, LENGTH = 4, 8
NAMED = {"table": None, "columns": 1}


class Net(nn.Module):
    """Takes numbers of rows, a table of all rows, rows that are dim 1, positions of three axes."""

    def __init__(self):
        super().__init__()
        self.embed, self.axes = nn.Embedding(16, WIDTH), nn.Embedding(3 * LENGTH, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, input_ids, position_ids, timesteps, table, columns, scale):
        rows = self.time(timesteps[:, None]) + columns.T
        x = self.embed(input_ids) + rows[:, None] + self.axes(position_ids).sum(0) + table.sum(0)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * scale


def net(attends=True):
    torch.manual_seed(0)
    model = Net().double()
    for layer in model.layers:
        layer.attends = attends  # sequences that tp divides would want a plan for it
    return model


def batch(step=0):
    generator = torch.Generator().manual_seed(1 + step)
    tokens = torch.randint(16, (ROWS, LENGTH + 1), generator=generator)
    draw = lambda *shape: torch.rand(shape, generator=generator).double()  # noqa: E731
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.randint(3 * LENGTH, (3, ROWS, LENGTH), generator=generator),
        "timesteps": draw(ROWS),
        "table": draw(3, WIDTH),
        "columns": draw(WIDTH, ROWS),
        "scale": draw(),
    }


LAYOUTS = [  # sizes, options of parallelize, micro-batches
    ({"dp_size": 2}, {}, 2),
    ({"cp_size": 2}, {}, 4),
    ({"pp_size": 2}, {"schedule": "zb_v"}, 4),
    ({"pp_size": 2}, {"schedule": "dualpipe_v"}, 4),
    ({"tp_size": 2}, {}, 2),
    ({"tp_size": 2}, {"sequence_parallel": True}, 2),
    ({"dp_size": 4}, {}, 1),
    ({"dp_size": 2, "cp_size": 2}, {}, 2),
    ({"pp_size": 2, "dp_size": 2}, {"schedule": "zb_h1", "recompute": True}, 2),
    ({"tp_size": 2, "cp_size": 2}, {}, 2),
]


@functools.cache
def expected(attends):
    return in_one_process(net(attends), [batch()])


@pytest.mark.parametrize(("sizes", "options", "micro_batches"), LAYOUTS)
def test_rows_of_all_shapes_train_as_one_process(sizes, options, micro_batches):
    attends = "sequence_parallel" not in options
    options = {"plan": PLAN, **options} if "tp_size" in sizes else options
    how = {"options": options, "micro_batches": micro_batches, "cut": {"row_dims": NAMED}}
    build = functools.partial(net, attends)
    train_and_compare(expected(attends), build, sizes, [batch()], bounds={"losses": 1e-12}, **how)


def test_the_proof_is_told_too():
    assert assert_trains_alike(net, batch, "dp2", row_dims=NAMED).passed


def table(*shape):
    return torch.zeros(shape)


IDS_3, IDS_4, IDS_8 = ({"input_ids": torch.zeros(n, 8, dtype=torch.int64)} for n in (3, 4, 8))
# Entries beside input_ids, row_dims, and what is said of them.
REFUSED = [
    (IDS_4, {"bias": table(8, 8)}, None, r"bias has shape \[8, 8\].* 4 rows.*row_dims={'bias': No"),
    (IDS_4, {"pixels": table(3, 4)}, None, r"row_dims={'pixels': 1} or row_dims={'pixels': None}"),
    (IDS_4, {"images": table(8, 3)}, None, "images has .* None leaves it whole"),
    (IDS_4, {"names": ["a"] * 4}, None, "names is a list, and it is not clear .* 4 rows of the"),
    (IDS_8, {"bias": table(8, 8)}, None, "not clear .* 8 rows.*: 0} or .*'bias': None}"),
    (IDS_8, {"weights": table(8)}, None, "weights has shape .* not clear whether"),
    (IDS_8, {"attention_mask": table(8, 8)}, None, "attention_mask .* not clear whether"),
    (IDS_3, {"position_ids": table(3, 3, 8)}, None, "not clear .*'position_ids': 1} or"),
    (IDS_4, {"position_ids": table(8)}, None, r"position_ids has shape \[8\]: .* \[axes, 4, 8\]"),
    (IDS_4, {"labels": table(4)}, None, r"labels have shape \[4\].*loss_labels.*count_fn counts"),
    (IDS_4, {"loss_table": table(3)}, None, r"the 4 rows.*row_dims={'loss_table': None}"),
    (IDS_4, {"table": table(3)}, {"tabel": None}, "row_dims names tabel, and the batch has only"),
    (IDS_4, {"table": table(3)}, {"table": 0}, r"{'table': 0} does not fit: table has shape \[3\]"),
    (IDS_4, {"table": table(3)}, {"table": 1}, "does not fit"),
    (IDS_4, {"table": table(3)}, {"table": "0"}, "does not fit"),
    (IDS_4, {}, {"input_ids": None}, "the batch has 4 rows, which are dim 0 of input_ids"),
    (IDS_4, {}, ["input_ids"], "row_dims is a mapping from names"),
]
TAKEN = [  # entries, row_dims, and their shape in one of two micro-batches
    (IDS_4, {"bias": table(8, 8)}, {"bias": None}, [8, 8]),
    (IDS_4, {"pixels": table(3, 4)}, {"pixels": -1}, [3, 2]),
    (IDS_4, {"mask": table(1, 1, 8, 8)}, None, [1, 1, 8, 8]),
    (IDS_4, {"mask": table(4, 1, 8, 8)}, None, [2, 1, 8, 8]),
    (IDS_4, {"weights": table(4)}, None, [2]),
    (IDS_4, {"position_ids": table(1, 8)}, None, [1, 8]),
    (IDS_4, {"position_ids": table(3, 1, 8)}, None, [3, 1, 8]),
    (IDS_4, {"position_ids": table(4, 4, 8)}, {"position_ids": 1}, [4, 2, 8]),
    (IDS_4, {"loss_table": table(3)}, {"loss_table": None}, [3]),
    (IDS_4, {"cu_seq_lens_q": [0, 3, 8]}, None, 3),
    (IDS_8, {"token_type_ids": table(8, 8)}, None, [4, 8]),
    (IDS_8, {"images": table(8, 3, 5, 5)}, None, [4, 3, 5, 5]),
    (IDS_8, {"bias": table(8, 8)}, {"bias": 0}, [4, 8]),
]


@pytest.mark.parametrize(("ids", "entries", "row_dims", "words"), REFUSED)
def test_what_can_be_read_otherwise_is_asked_about(alone, ids, entries, row_dims, words):
    with pytest.raises(ValueError, match=words):
        shard_global_batch(ids | entries, 1, row_dims=row_dims, manager=alone)


@pytest.mark.parametrize(("ids", "entries", "row_dims", "shape"), TAKEN)
def test_what_is_told_or_known_is_cut(alone, ids, entries, row_dims, shape):
    parts = shard_global_batch(ids | entries, 2, row_dims=row_dims, manager=alone)
    (name,) = entries
    found = [list(p[name].shape) if isinstance(shape, list) else len(p[name]) for p in parts]
    assert found == [shape, shape]


STEPS = (7, 5, 2, 1)  # rows of the steps, one after another
# The loss of one's own takes a mean over positions and words, which cp and tp divide.
OWN = [("dp 4", True), ("dp 2 x pp 2", True), ("pp 4", True)]


@pytest.mark.parametrize(("rows", "ranks", "micro_batches"), [(7, 2, 2), (5, 2, 4), (1, 3, 2)])
def test_shares_differ_by_at_most_one_row(rows, ranks, micro_batches):
    shares = rows_of_ranks(rows, ranks, micro_batches)
    assert [row for own in shares for share in own for row in share] == [*range(rows)]
    for sizes in ([sum(map(len, own)) for own in shares], *([*map(len, own)] for own in shares)):
        assert max(sizes) - min(sizes) <= 1


def of_squares(output, micro_batch):
    """A loss that is not zero for labels of -100, and counts rows."""
    logits = getattr(output, "logits", output)
    found = (logits.float() ** 2).mean((1, 2)).double() * micro_batch["loss_weight"]
    return found.sum(), len(found)


def rows_of(micro_batch):
    return len(micro_batch["input_ids"])


def decoder():
    return llama(vocab_size=64, num_layers=4).double()


def steps(numbers_of_rows=STEPS):
    found = []
    for step, rows in enumerate(numbers_of_rows):
        drawn = torch.randint(64, (rows, 17), generator=torch.Generator().manual_seed(step))
        labels = drawn[:, 1:].clone()
        labels[:, : step + 1] = -100
        weight = torch.arange(1.0, rows + 1, dtype=torch.float64)
        found.append({"input_ids": drawn[:, :-1], "labels": labels, "loss_weight": weight})
    return found


@functools.cache
def uneven_steps(own):
    loss_fn = of_squares if own else cross_entropy
    return in_one_process(decoder(), steps(), adamw, loss_fn=loss_fn, clip=1.0)


@pytest.mark.parametrize(("layout", "own"), today([*((name, False) for name in FOUR), *OWN], 13))
def test_any_number_of_rows_trains_as_one_process(layout, own):
    told = {"loss_fn": of_squares, "count_fn": rows_of} if own else {}
    how = {"micro_batches": 3, "clip": 1.0, "rehearse": True, "bounds": {"weights": 1e-9}, **told}
    train_and_compare(uneven_steps(own), decoder, FOUR[layout], steps(), adamw, **how)


def own_rows():
    """Return losses of batches whose rows each rank reads alone, and rows that it would read."""
    losses = []
    with grid({"dp_size": 2}) as manager:
        parallel = parallelize(decoder(), manager)
        for batch, rows in zip(steps(), STEPS, strict=True):
            (share,) = rows_of_ranks(rows, 2, 1)[manager.dp_rank]
            own = {name: entry[share.start : share.stop] for name, entry in batch.items()}
            cut = shard_global_batch(own, 3, manager, own_rows=True)
            losses.append(eval_step(parallel, cut).item())
        return losses, [rows_of_step(s, rows=9, batch_size=7, manager=manager) for s in range(3)]


def test_ranks_may_read_their_rows_alone():
    plain, whole = decoder(), []
    for batch in steps():
        total, count = cross_entropy(plain(batch["input_ids"]), batch)
        whole.append((total / count).item())
    found = run_ranks(own_rows, 2)
    for losses, _ in found:
        assert losses == pytest.approx(whole, rel=1e-11)
    first, second = (rows for _, rows in found)
    assert [(len(a), len(b)) for a, b in zip(first, second, strict=True)] == [(4, 3)] * 3
    every = [row for a, b in zip(first, second, strict=True) for row in (*a, *b)]
    assert sorted(every[:9]) == sorted(every[9:18]) == [*range(9)]
