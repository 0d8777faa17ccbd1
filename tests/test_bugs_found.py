"""Bugs of others: each is found where it is, its mend is sound, and the page shows the reports."""

import pytest

pytest.importorskip("transformers")

from tools.pages import bug_reports

MISSING = "a sum over all ranks is missing"
PLACES = {  # direction, modules, a word of how it is wrong
    "apertus": ("synchronisation", [], MISSING),
    "hrm_text": ("start", ["model.L_module.layers.0.self_attn.q_proj"], "values that differ"),
    "mean_of_means": ("forward", ["loss"], "times the right values"),
    "norm_of_a_share": ("synchronisation", [], MISSING),
    "scaled_twice": ("synchronisation", [], "values that differ"),
    "scores_of_experts": ("backward", ["experts"], MISSING),
    "strided_gather": ("backward", ["loss"], "at slices 16-47 of dim 2"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return bug_reports.reports(tmp_path_factory.mktemp("bugs"))


def test_each_bug_is_found_where_it_is(found):
    assert set(found) == set(PLACES)
    for name, (direction, modules, how) in PLACES.items():
        first, *more = found[name].wrong.found
        assert not more, f"{name}: {found[name].wrong}"
        assert first.birth.direction == direction, f"{name}: {found[name].wrong}"
        assert first.birth.modules[: len(modules)] == modules, f"{name}: {found[name].wrong}"
        assert how in " ".join(first.how), f"{name}: {found[name].wrong}"


def test_what_is_right_is_sound_and_all_of_it_was_compared(found):
    for name, (_, mended) in found.items():
        assert mended.sound, f"{name}: {mended}"
        assert not mended.count("unseen"), f"{name}: {mended}"


@pytest.mark.parametrize("page", bug_reports.PAGES, ids=lambda page: page.parent.name)
def test_the_pages_show_these_reports(page, found):
    shown = bug_reports.shown(page.read_text(encoding="utf-8"))
    assert set(shown) == set(found)
    for name, text in shown.items():
        printed = bug_reports.rounded(f"{found[name].wrong}\n")
        assert bug_reports.rounded(text) == printed, f"python -m tools.pages.bug_reports: {name}"


def test_programs_are_short():
    for path in bug_reports.PROGRAMS.values():
        assert len(path.read_text().splitlines()) <= 30, path.name
