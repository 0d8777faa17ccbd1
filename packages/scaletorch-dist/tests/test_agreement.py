"""One comparison at construction, with the difference shown on every rank."""

import pytest
import torch.distributed as c10d

from scaletorch.dist import MismatchError
from scaletorch.dist.agreement import agree
from scaletorch.dist.testing import run_ranks


def disagree(lines, errors):
    rank = c10d.get_rank()
    try:
        agree("the plan", lines[rank], error=errors.get(rank))
    except (MismatchError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_a_difference_is_shown_on_every_rank():
    assert run_ranks(disagree, 3, [["a", "b"]] * 3, {}) == [None] * 3
    message, _ = run_ranks(disagree, 2, [[], [str(i) for i in range(60)]], {})
    assert message.endswith("  … and 48 lines more")
    lines = [["a", "b"], ["a", "c"], ["a", "b"]]
    for rank, message in enumerate(run_ranks(disagree, 3, lines, {})):
        assert message == (
            "MismatchError: the ranks disagree on the plan: rank 1 differs from ranks 0, 2; every "
            f"rank must be given the same (this is rank {rank})\n"
            "rank 1 (+), ranks 0, 2 (-):\n  - b\n  + c"
        )


def test_a_mistake_of_one_rank_reaches_all():
    messages = run_ranks(disagree, 2, [["a"]] * 2, {1: OSError("disk on fire")})
    assert messages == [
        "MismatchError: rank 1 cannot take part in the plan: OSError: disk on fire",
        "OSError: disk on fire",
    ]


def test_one_process_raises_its_own_error():
    agree("the plan", ["a"])
    with pytest.raises(OSError, match="disk"):
        agree("the plan", ["a"], error=OSError("disk"))
