"""Headers of messages between stages: forms come back, and nothing else is made of them."""

import os
import pickle

import pytest
import torch

from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.parallel.pipeline_parallel.runtime.forms import (
    HEADER_BYTES,
    Form,
    from_header,
    to_header,
)
from scaletorch.parallel.pipeline_parallel.stages.extras import Passed, Place

DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_header",)


class Hidden:
    """Names a function within an allowed module."""

    def __reduce__(self):
        return from_header, (torch.zeros(1),)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_form_comes_back(dtype):
    trained = torch.ones(2, 3, requires_grad=True)
    hidden = {"states": (trained, [torch.ones(3, 0, dtype=dtype)]), "rate": 0.5, "name": None}
    places = {Place(1, 2, 3): (0, 1)}
    for value in (trained, hidden, Passed(hidden, [trained], places)):
        assert from_header(to_header(Form(value))) == Form(value)
    assert from_header(to_header(None)) is None


@pytest.mark.parametrize("sent", [Harmful(), Hidden(), torch.nn.Linear(1, 1)], ids=type)
def test_nothing_else_is_made_of_a_header(sent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = bytearray(pickle.dumps(sent).ljust(HEADER_BYTES))
    with pytest.raises(InvalidArgumentError, match=r"a message between stages names .*, which no"):
        from_header(torch.frombuffer(text, dtype=torch.uint8))
    assert not list(tmp_path.iterdir())
