"""Slurm's short forms, against lists that were shortened here."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.dist import StateError
from scaletorch.dist.launchers.environment import expand_tasks_per_node
from scaletorch.dist.startup.rendezvous import first_host


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2", [2]), ("2,1", [2, 1]), ("2(x3)", [2, 2, 2]), ("4(x2),1,3(x1)", [4, 4, 1, 3]), ("", [])],
)
def test_tasks_per_node_are_expanded(text, sizes):
    assert expand_tasks_per_node(text) == sizes


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 9)), min_size=1))
def test_tasks_per_node_survive_the_short_form(runs):
    text = ",".join(f"{size}(x{times})" if times > 1 else str(size) for size, times in runs)
    expected = [size for size, times in runs for _ in range(times)]
    assert expand_tasks_per_node(text) == expected


HOSTS = [
    ("node1", "node1"),
    ("node1,node2", "node1"),
    ("node[01-03,07]", "node01"),
    ("a1,b[2-3]x", "a1"),
    ("b[2-3]x,a1", "b2x"),
    ("gpu[7,9],login", "gpu7"),
    ("rack[2-3]n[004-005]", "rack2n004"),
    ("n[098-101]", "n098"),
    ("n[8-11]", "n8"),
    ("a.b.c,d-e", "a.b.c"),
    ("d-e,a.b.c", "d-e"),
    ("10.0.0.[1-2], 10.0.0.9", "10.0.0.1"),
]


@pytest.mark.parametrize(("nodes", "host"), HOSTS)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", " ", ",", "a,", "a[1", "a1]", "a[]", "a[1,]", "]["])
def test_a_broken_host_list_is_shown(nodes):
    with pytest.raises(StateError, match=re.escape(f"cannot read the node list {nodes!r}")):
        first_host(nodes)


@settings(deadline=None)
@given(st.text("ab[]-,0129 x", max_size=20))
def test_any_text_is_read_or_refused(text):
    try:
        host = first_host(text)
    except StateError:
        return
    assert host
    assert not set(host) & set("[], ")


NAMES = st.text("abxyz.", min_size=1, max_size=5)
NUMBERS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 12)), min_size=1, max_size=4)


def bracket(runs, width):
    """(in brackets, all numbers) of ranges given by their first number and length."""
    parts, numbers = [], []
    for first, more in runs:
        run = [str(number).zfill(width) for number in range(first, first + more + 1)]
        parts.append(run[0] if more == 0 else f"{run[0]}-{run[-1]}")
        numbers += run
    return f"[{','.join(parts)}]", numbers


@st.composite
def host_lists(draw):
    """(list in short form, hosts)."""
    items, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        short, names = draw(NAMES), None
        names = [short]
        for _ in range(draw(st.integers(0, 2))):
            text, numbers = bracket(draw(NUMBERS), draw(st.integers(1, 4)))
            tail = draw(st.one_of(st.just(""), NAMES))
            short += text + tail
            names = [name + number + tail for name in names for number in numbers]
        items.append(short)
        hosts += names
    return ",".join(items), hosts


@settings(deadline=None)
@given(host_lists())
def test_hosts_survive_the_short_form(drawn):
    text, hosts = drawn
    assert first_host(text) == hosts[0]
