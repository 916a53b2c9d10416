from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.report import grouping


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ([f"s['h_{i}']['k']" for i in range(12)], ["s/h_{0-11}/k"]),
        ([f"s.a['h_{i}']['{name}'].w" for i in range(2) for name in "qkv"], ["s/a/h_{0,1}/{q,k,v}/w"]),
        (["s.mu['a']", "s.nu['a']"], ["s/{mu,nu}/a"]),
        (["s.mu", "s['nu']"], ["s/mu", "s/nu"]),  # an attribute and a key
        (["a['x']", "b['x']"], ["a/x", "b/x"]),  # two arguments
        ([f"s['{n}']" for n in "abcdefgh"], ["s/{a,b,c,d,+4}"]),
    ],
)
def test_names_that_differ_in_one_key_are_one_row(names: list[str], rows: list[str]) -> None:
    found = grouping.group((n, None) for n in names)
    assert [row.path for row in found] == rows
    assert sorted(path for row in found for path in row.members) == sorted(names)


def test_different_attributes_keep_rows_apart() -> None:
    rows = grouping.group((f"s['h_{i}']", i == 2) for i in range(4))
    assert [row.path for row in rows] == ["s/h_{0,1,3}", "s/h_2"]


def test_sections_are_the_trees_of_an_argument_and_long_names_move_into_a_heading() -> None:
    names = ["s['params']['a']['w']", "s['params']['b']['v']", "s['opt'][0].mu['a']", "s['opt'][0].count", "batch"]
    found = grouping.sections(grouping.group((n, n) for n in names))
    assert [("".join(s.prefix), len(s.rows)) for s in found] == [("s['params']", 2), ("s['opt'][0]", 2), ("", 1)]
    leaves = [f"['attention_of_many_heads']['{name}']['kernel']" for name in ("query", "key", "value", "output")]
    names = [f"s['m']['blocks']['layers'][{i}]{leaf}" for i in range(3) for leaf in leaves]
    names += ["s['m']['norm']", "s['m']['embedding']", "s['count']"]
    found = grouping.sections(grouping.group((n, n[-20:]) for n in names))
    branch = "s['m']['blocks']['layers'][{0-2}]['attention_of_many_heads']"
    assert [("".join(s.prefix), len(s.rows)) for s in found] == [("s['m']", 2), (branch, 4), ("s", 1)]


def test_long_headings_are_broken_after_a_slash() -> None:
    prefix = ("state", "['opt_state']", "[0]", ".{mu,nu}", "['blocks']", "['layers']")
    assert grouping.heading(prefix) == "state/opt_state/0/{mu,nu}/blocks/layers"
    broken = grouping.heading((*prefix, "[{0-11}]", ".kernel"))
    assert broken == "state/opt_state/0/{mu,nu}/blocks/layers/\n  {0-11}/kernel"


keys = st.one_of(
    st.sampled_from(["['a']", "['b']", ".c", ".d"]), st.integers(0, 12).map(lambda i: f"['h_{i}']"), st.just("[3]")
)


@given(st.lists(st.tuples(st.lists(keys, max_size=4).map(lambda k: "s" + "".join(k)), st.booleans()), unique=True))
@settings(max_examples=50)
def test_every_path_is_in_exactly_one_row(items: list[tuple[str, bool]]) -> None:
    rows = grouping.group(items)
    members = [path for row in rows for path in row.members]
    assert sorted(members) == sorted(path for path, _ in items)
    sections = grouping.sections(rows)
    assert sorted(path for s in sections for row in s.rows for path in row.members) == sorted(members)
    for section in sections:
        for row in section.rows:
            assert row.tokens[: len(section.prefix)] == section.prefix
            assert len(row.tokens) > len(section.prefix)
