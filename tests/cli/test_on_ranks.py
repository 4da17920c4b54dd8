"""Which commands run on several ranks: the table of docs/limits.md, and what the commands themselves say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dnis_torchrec.cli.app import ON_RANKS, ORDER
from tests.cli.test_cli import dnis
from tests.documents import table_rows

ROWS = table_rows("docs/limits.md", "Commands on several ranks")
REFUSED = [name for name, cells in ROWS.items() if cells[0] == "refused"]


def test_each_command_has_its_row() -> None:
    assert list(ROWS) == [f"`dnis {command}`" for command in ORDER]
    assert [name for name, cells in ROWS.items() if cells[0] == "yes"] == [
        f"`dnis {command}`" for command in ORDER if command in ON_RANKS
    ]
    assert {cells[0] for cells in ROWS.values()} == {"yes", "refused"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_work_for_several_ranks_refuses_them(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = name.strip("`").removeprefix("dnis ")
    done = dnis(command, tmp_path / "none", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: dnis {command}: expected one process: package, plan and report have no work for several ranks, got 2 "
        f"ranks; {ROWS[name][-1]}\n"
    )
    assert list(tmp_path.iterdir()) == []
