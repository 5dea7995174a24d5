"""The table of docs/memory.md: its planned columns are today's arithmetic, and near what the compiler said."""

from pathlib import Path

import pytest

from scripts import memory_table

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"


def cells():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(memory_table.BEGIN)
    lines = rest.partition(memory_table.END)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_every_combination():
    wanted = [(strategy, remat) for strategy in memory_table.STRATEGIES for remat in memory_table.REMATS]
    assert [tuple(row[:2]) for row in cells()] == wanted


@pytest.mark.parametrize("row", cells(), ids=lambda row: "-".join(row[:2]))
def test_planned_columns_are_up_to_date_and_near_the_compiled_one(row):
    memory = memory_table.planned(memory_table.config_of(*row[:2]))
    total = memory_table.used_bytes(memory) / memory_table.GIB
    assert row[3] == f"{total:.2f}"
    assert row[5:] == memory_table.planned_cells(memory)
    assert total == pytest.approx(float(row[2]), rel=0.07)
