"""Messages between processes: values and errors arrive everywhere, in time, and do not pile up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from alpa_lite.errors import CheckpointError, InfeasibleError, OptionError, ProcessError
from alpa_lite.processes import channel
from alpa_lite.processes.channel import Board, Collective
from tests.processes.fake_store import Processes


def failing(error: Exception) -> Any:
    raise error


def test_values_arrive_in_all_processes(processes: Processes) -> None:
    large = random.Random(0).randbytes(2 * channel.MAX_PART_BYTES).hex()

    def program(index: int) -> list[Any]:
        if index == 1:  # a local collective does not count
            assert Collective("test", "testing", local=True).gather("value", lambda: index) == [1]
        one = Collective("test", "testing")
        return [
            one.broadcast("large", lambda: large if index == 0 else failing(AssertionError())),
            one.gather("indices", lambda: (index,)),
            one.gather("sum", lambda: index, sum),
            Collective("test", "testing").broadcast("next", lambda: "another"),
        ]

    assert processes.run(program) == [[large, [[0], [1], [2]], 3, "another"]] * 3


def test_one_process_calls_its_functions_alone() -> None:
    one = Collective("test", "testing")
    assert one.broadcast("value", lambda: 1) == 1 and one.gather("value", lambda: 2) == [2]
    with pytest.raises(KeyError), one.error_scope():
        raise KeyError("its own")


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("scope", [False, True], ids=["in the round", "before the round"])
def test_an_error_of_one_is_raised_by_all(processes: Processes, culprit: int, scope: bool) -> None:
    def program(index: int) -> None:
        one = Collective("test", "testing")
        with one.error_scope():
            one.gather("first", lambda: index)
            error = ValueError("no data") if index == culprit else None
            if scope and error:
                raise error
            one.gather("second", lambda: failing(error) if error else index)

    errors = processes.run(program)
    assert isinstance(errors.pop(culprit), ValueError)
    for error in errors:
        assert isinstance(error, ProcessError)
        assert str(error) == f"testing: process {culprit} failed: ValueError: no data"


@pytest.mark.parametrize(
    ("error", "expected"), [(InfeasibleError("too large"), InfeasibleError), (OSError("full"), CheckpointError)]
)
def test_an_error_of_alpa_lite_keeps_its_class_and_others_get_that_of_the_collective(processes, error, expected):
    def program(index: int) -> None:
        Collective("test", "testing", error=CheckpointError).broadcast("value", lambda: failing(error))

    first, *others = processes.run(program)
    assert first is error and [type(other) for other in others] == [expected] * 2


def test_processes_that_are_unlike_missing_or_in_other_rounds_are_named_by_all(processes: Processes) -> None:
    def combine(values: list[int]) -> None:
        raise ProcessError(f"unlike: {values}")

    def missing(index: int) -> Any:
        if index != 2:
            return Collective("test", "testing", seconds=0.2, remedy="wait").gather("value", lambda: index)
        return None

    errors = processes.run(lambda index: Collective("test", "testing").gather("value", lambda: index, combine))
    assert [str(error) for error in errors] == ["unlike: [0, 1, 2]"] * 3
    errors = processes.run(lambda index: Collective("test", "testing").gather("ab"[index == 1], lambda: index))
    assert [str(error) for error in errors] == ["testing: process 1 is at b, not at a"] * 3
    expected = "testing: process 2 did not respond within 0.2 s (value); wait"
    assert [str(found) for found in processes.run(missing)] == [expected, expected, "None"]


def test_a_check_of_the_peers_ends_waiting(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_POLL_SECONDS", 0.02)

    class Checked(Collective):
        def check_peers(self) -> None:
            raise ProcessError("will not come")

    found = processes.run(lambda index: index or Checked("test", "testing").gather("value", lambda: index))
    assert str(found[0]) == "will not come"


def test_messages_of_old_collectives_are_removed(processes: Processes) -> None:
    def program(index: int) -> None:
        for _ in range(3 * channel.RETAINED_COLLECTIVES):
            Collective("test", "testing").gather("value", lambda: index)

    processes.run(program)
    assert len({key.split("/")[2] for key in processes.store.values}) == channel.RETAINED_COLLECTIVES + 1


def test_a_board_has_the_last_value_of_each_process(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(index: int) -> None:
        for value in (index, {"value": index}):
            Board("topic").post(value)

    board = Board("topic")
    assert board.poll() == {}
    processes.run(program)
    assert board.poll() == {index: {"value": index} for index in range(3)}
    board.post(None)  # of process 0
    assert set(board.poll()) == {1, 2} and Board("other").poll() == {}
    monkeypatch.setattr(channel._jax, "coordination_client", lambda: None)
    board = Board("topic")
    board.post(1)
    assert board.poll() == {}
    with pytest.raises(ProcessError, match=r"3 processes, but no coordination service: call jax.distributed"):
        Collective("test", "testing")


def test_the_timeout_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert channel.timeout() == channel.DEFAULT_TIMEOUT_SECONDS
    for given in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv(channel.TIMEOUT_VARIABLE, given)
        with pytest.raises(OptionError, match=f"{channel.TIMEOUT_VARIABLE}='{given}': give a positive number"):
            channel.timeout()
    monkeypatch.setenv(channel.TIMEOUT_VARIABLE, "2.5")
    assert channel.timeout() == 2.5
