"""Positions that a model counts itself, and those that it was given in their place."""

import pytest
import torch
from torch import nn

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.context_parallel.models.counted_positions import (
    _in_place_of,
    _rows_of,
    find_counted,
)

GIVEN = torch.tensor([[0, 1, 6, 7], [0, 1, 6, 7]])
COUNTED = torch.arange(4)


def test_positions_come_in_the_form_of_those_that_were_counted():
    assert torch.equal(_in_place_of(COUNTED, GIVEN, "Table"), GIVEN[0])
    assert _in_place_of(COUNTED.expand(2, 4), GIVEN, "Table") is GIVEN


@pytest.mark.parametrize(
    ("counted", "given", "words"),
    [
        (COUNTED, None, "called without position_ids"),
        (None, GIVEN, "Table was called with other positions"),
        (torch.arange(8), GIVEN, "Table was called with other positions"),
        (COUNTED, torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]]), "position_ids differ"),
    ],
)
def test_others_are_refused(counted, given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        _in_place_of(counted, given, "Table")


def test_models_that_are_not_of_transformers_have_none():
    assert find_counted(nn.ModuleDict({"embed_positions": nn.Embedding(4, 2)})) == []


def test_rows_are_those_of_the_positions_that_are_given():
    table = torch.randn(16, 3)
    rows = _rows_of(GIVEN, lambda start: table[start : start + 4], "Table")
    assert torch.equal(rows, table[GIVEN[0]])


def test_rows_of_no_table_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"Table returns positions \[2, 4, 3\]"):
        _rows_of(GIVEN, lambda start: torch.zeros(2, 4, 3), "Table")
