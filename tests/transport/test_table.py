"""What several processes count in one table."""

import asyncio
import subprocess
import sys
from pathlib import Path

from processes import GUARD_S

from sonoro.transport.table import Changes, Table

COLUMNS, ADDED = ["begun", "running", "given"], 20_000

COUNTING = f"""
import sys
from pathlib import Path
from sonoro.transport.table import Table

table = Table({COLUMNS}, 2, int(sys.argv[1]), Path(sys.argv[2]))
table.add("begun", 1)
while table.total("begun") < 2:
    pass
for _ in range({ADDED}):
    table.add("running", 1, 0)
    with table.lock():
        table.add("running", -1, 0)
        table.add("given", 1, 0)
"""


def test_no_count_is_lost_between_processes_that_change_the_same_number(tmp_path: Path) -> None:
    """As when one front gives a permit to another, which releases one of its own at that moment."""
    Table.create(COLUMNS, 2, tmp_path)
    command = [sys.executable, "-c", COUNTING]
    fronts = [subprocess.Popen([*command, str(front), str(tmp_path)]) for front in range(2)]
    assert [front.wait(GUARD_S) for front in fronts] == [0, 0]
    table = Table(COLUMNS, 2, 0, tmp_path)
    assert (table.total("running"), table.total("given")) == (0, 2 * ADDED)


def test_a_front_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    Table.create(COLUMNS, 2, tmp_path)
    parent, front = (Table(COLUMNS, 2, number, tmp_path) for number in range(2))
    front.add("running", 3)
    parent.add("running", 1)
    assert parent.total("running") == 4
    parent.clear(1)
    assert (parent.total("running"), front.get("running")) == (1, 0)


def test_each_process_reads_what_others_have_changed_once(tmp_path: Path) -> None:
    Table.create(COLUMNS, 2, tmp_path)
    tables = [Table(COLUMNS, 2, number, tmp_path) for number in range(2)]
    one, other = (Changes(table, "given") for table in tables)
    read: list[Changes] = []

    async def readers() -> list[Changes]:
        read.clear()
        for each in (one, other):

            async def note(each: Changes = each) -> None:
                read.append(each)

            await each.catch_up(note)
        return read

    async def change() -> None:
        assert await readers() == []
        one.note()
        assert await readers() == [other]
        assert await readers() == []
        for each in (one, other, one):
            each.note()
        assert await readers() == [one, other]
        tables[0].clear(1)
        assert await readers() == []

    async def change_meanwhile() -> None:
        one.note()
        other.note()

        async def note() -> None:
            one.note()

        await other.catch_up(note)
        assert await readers() == [one, other]

    asyncio.run(change())
    asyncio.run(change_meanwhile())
