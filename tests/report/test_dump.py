from __future__ import annotations

from pathlib import Path

from alpa_lite.report import dump, listing
from alpa_lite.strategy import Factor, Rule
from tests.plans import small_plan

MATMUL = Rule(
    (Factor(16, "parallel"), Factor(32, "parallel"), Factor(8, "sum")), (((0,), (2,)), ((2,), (1,))), (((0,), (1,)),)
)


def test_stages_are_numbered_and_several_dumps_share_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        with dump.stages(folder) as write:
            write("graph", "a program")
            write("mesh (4, 2)/choice", small_plan())
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["01_graph.txt", "02_mesh_4_2_choice.txt", "03_graph.txt", "04_mesh_4_2_choice.txt"]
    assert (folder / "01_graph.txt").read_text(encoding="utf-8") == "a program\n"
    assert (folder / "02_mesh_4_2_choice.txt").read_text(encoding="utf-8") == f"{small_plan()}\n"


def test_without_a_directory_nothing_is_made_into_text() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError

    with dump.stages(None) as write:
        write("graph", Unprintable())


def test_rules_are_one_line_each() -> None:
    wanted = "[0 2] [2 1] -> [0 1]  0=16 parallel, 1=32 parallel, 2=8 sum (shardy)"
    assert listing.rule_text(MATMUL) == wanted
    assert listing.text({("dot_general", 3): MATMUL}) == f"('dot_general', 3)\n    {wanted}"
