"""Tables go back to what they were."""

from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.passes.microbatches.journal import Journal, Members, Row, Table

WRITES = st.lists(st.tuples(st.sampled_from(["set", "delete", "update", "add", "discard", "row"]), st.integers(0, 4)))


def write(table, members, row, writes):
    for number, (what, key) in enumerate(writes):
        if what == "set":
            table[key] = number
        elif what == "delete" and key in table:
            del table[key]
        elif what == "update":
            table.update({key: number, key + 1: number})
            members.update((key, key + 1))
        elif what == "add":
            members.add(key)
        elif what == "discard":
            members.difference_update((key,))
        elif what == "row":
            row.append(key)


@given(WRITES, WRITES)
def test_back(before, after):
    journal = Journal()
    table, members, row = Table[int, int](journal), Members[int](journal), Row[int](journal)
    write(table, members, row, before)
    mark, kept = journal.mark, (dict(table), set(members), list(row))
    write(table, members, row, after)
    journal.back(mark)
    assert (dict(table), set(members), list(row)) == kept
    journal.back(0)
    assert not (table or members or row)
