"""Every entry of a global batch is cut as rows, passed whole by name, or asked about."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import in_one_process, on_a_layout, require_alike

from scaletorch.compose import shard_global_batch
from scaletorch.dist import RankPool
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)
from scaletorch.verify import assert_trains_alike

ROWS, LENGTH, WIDTH = 4, 8, 8
PLAN = {"layers.*.up": "column", "layers.*.down": "row", "head": "column_gather"}
NAMED = {"table": None, "columns": 1}


class Layer(nn.Module):
    attends = True

    def __init__(self):
        super().__init__()
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        if self.attends:
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + self.down(torch.tanh(self.up(x)))


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


LAYOUTS = {  # sizes, options of parallelize, micro-batches
    2: [
        ({"dp_size": 2}, {}, 2),
        ({"cp_size": 2}, {}, 4),
        ({"pp_size": 2}, {"schedule": "zb_v"}, 4),
        ({"pp_size": 2}, {"schedule": "dualpipe_v"}, 4),
        ({"tp_size": 2}, {}, 2),
        ({"tp_size": 2}, {"sequence_parallel": True}, 2),
    ],
    4: [
        ({"dp_size": 4}, {}, 1),
        ({"dp_size": 2, "cp_size": 2}, {}, 2),
        ({"pp_size": 2, "dp_size": 2}, {"schedule": "zb_h1", "recompute": True}, 2),
        ({"tp_size": 2, "cp_size": 2}, {}, 2),
    ],
}


@pytest.fixture(scope="module")
def expected():
    return {attends: in_one_process(net(attends), [batch()]) for attends in (False, True)}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_rows_of_all_shapes_train_as_one_process(ranks, expected):
    with RankPool(ranks, timeout=200) as pool:
        for sizes, options, micro_batches in LAYOUTS[ranks]:
            attends = "sequence_parallel" not in options
            options = {"plan": PLAN, **options} if "tp_size" in sizes else options
            given = partial(net, attends), sizes, [batch()]
            how = {"options": options, "micro_batches": micro_batches, "cut": {"row_dims": NAMED}}
            for found in pool.run(on_a_layout, *given, **how):
                require_alike(found, expected[attends], losses=1e-12, where=(sizes, options))


def test_the_proof_is_told_too():
    report = assert_trains_alike(net, batch, "dp2", row_dims=NAMED)
    assert report.passed


def table(*shape):
    return torch.zeros(shape)


SQUARE = {"input_ids": torch.zeros(8, 8, dtype=torch.int64)}
THREE = {"input_ids": torch.zeros(3, 8, dtype=torch.int64)}
FOUR = {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}
# Entries beside input_ids, row_dims, and what is said of them.
REFUSED = [
    (FOUR, {"bias": table(8, 8)}, None, r"bias has shape \[8, 8\].* 4 rows.*row_dims={'bias': No"),
    (FOUR, {"pixels": table(3, 4)}, None, r"row_dims={'pixels': 1} or row_dims={'pixels': None}"),
    (
        FOUR,
        {"images": table(8, 3)},
        None,
        "images has shape .* None passes it whole to every micro-batch",
    ),
    (
        FOUR,
        {"names": ["a"] * 4},
        None,
        "names is a list, and it is not clear .* 4 rows of the batch",
    ),
    (SQUARE, {"bias": table(8, 8)}, None, "not clear .* 8 rows.*: 0} or .*'bias': None}"),
    (SQUARE, {"weights": table(8)}, None, "weights has shape .* not clear whether"),
    (SQUARE, {"attention_mask": table(8, 8)}, None, "attention_mask .* not clear whether"),
    (THREE, {"position_ids": table(3, 3, 8)}, None, "not clear .*'position_ids': 1} or"),
    (FOUR, {"position_ids": table(8)}, None, r"position_ids has shape \[8\]: .* \[axes, 4, 8\]"),
    (FOUR, {"labels": table(4)}, None, r"labels have shape \[4\].*loss_labels.*count_fn counts"),
    (FOUR, {"loss_table": table(3)}, None, r"the 4 rows.*row_dims={'loss_table': None}"),
    (FOUR, {"table": table(3)}, {"tabel": None}, "row_dims names tabel, and the batch has only"),
    (FOUR, {"table": table(3)}, {"table": 0}, r"{'table': 0} does not fit: table has shape \[3\]"),
    (FOUR, {"table": table(3)}, {"table": 1}, "does not fit"),
    (FOUR, {"table": table(3)}, {"table": "0"}, "does not fit"),
    (FOUR, {}, {"input_ids": None}, "the batch has 4 rows, which are dim 0 of input_ids"),
    (FOUR, {}, ["input_ids"], "row_dims is a mapping from names"),
]
TAKEN = [  # entries, row_dims, and their shape in one of two micro-batches
    (FOUR, {"bias": table(8, 8)}, {"bias": None}, [8, 8]),
    (FOUR, {"pixels": table(3, 4)}, {"pixels": -1}, [3, 2]),
    (FOUR, {"mask": table(1, 1, 8, 8)}, None, [1, 1, 8, 8]),
    (FOUR, {"mask": table(4, 1, 8, 8)}, None, [2, 1, 8, 8]),
    (FOUR, {"weights": table(4)}, None, [2]),
    (FOUR, {"position_ids": table(1, 8)}, None, [1, 8]),
    (FOUR, {"position_ids": table(3, 1, 8)}, None, [3, 1, 8]),
    (FOUR, {"position_ids": table(4, 4, 8)}, {"position_ids": 1}, [4, 2, 8]),
    (FOUR, {"loss_table": table(3)}, {"loss_table": None}, [3]),
    (FOUR, {"cu_seq_lens_q": [0, 3, 8]}, None, 3),
    (SQUARE, {"token_type_ids": table(8, 8)}, None, [4, 8]),
    (SQUARE, {"images": table(8, 3, 5, 5)}, None, [4, 3, 5, 5]),
    (SQUARE, {"bias": table(8, 8)}, {"bias": 0}, [4, 8]),
]


@pytest.fixture
def manager():
    yield setup_process_group_manager()
    destroy_process_group_manager()


@pytest.mark.parametrize(("ids", "entries", "row_dims", "words"), REFUSED)
def test_what_can_be_read_otherwise_is_asked_about(ids, entries, row_dims, words, manager):
    with pytest.raises(ValueError, match=words):
        shard_global_batch(ids | entries, 1, row_dims=row_dims, manager=manager)


@pytest.mark.parametrize(("ids", "entries", "row_dims", "shape"), TAKEN)
def test_what_is_told_or_known_is_cut(ids, entries, row_dims, shape, manager):
    parts = shard_global_batch(ids | entries, 2, row_dims=row_dims, manager=manager)
    (name,) = entries
    found = [list(p[name].shape) if isinstance(shape, list) else len(p[name]) for p in parts]
    assert found == [shape, shape]
