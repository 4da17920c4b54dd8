"""The rooms of the package, drawn from its imports: a room imports only from rooms below it.

python -m docs.rooms [--out docs/rooms.png]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib import pyplot

PACKAGE = Path(__file__).parents[1] / "dnis_torchrec"
SAID = {
    "ranks": "sums and errors over ranks",
    "checks": "wording of errors",
    "blocks": "rows of similar frequency",
    "data": "recipes, batches, files",
    "ops": "select and packed lookup",
    "scheme": "what is retained",
    "report": "rows and a page",
    "selection": "alpha, wrapper, sharding",
    "serving": "modules that look up",
    "allocation": "what columns are worth",
    "training": "shard, train, evaluate",
    "artifact": "write, load, verify",
    "search": "both levels, ramp, pruning",
    "cli": "dnis",
}
"""Room -> its content, in a few words; rooms of a floor stand in this order."""


def imports_between_rooms() -> dict[str, set[str]]:
    """Room or loose module of the package -> those that its files import from."""
    rooms: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        targets = rooms.setdefault(room, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dnis_torchrec."):
                targets.add(str(node.module).split(".")[1])
        targets.discard(room)
    return rooms


def floors(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """Room -> the longest way down to it from a room that imports none.

    Example:
        >>> floors({"a": set(), "b": {"a"}, "c": {"a", "b"}})
        {'a': 0, 'b': 1, 'c': 2}
    """
    floor_by_room: dict[str, int] = {}

    def floor_of(room: str) -> int:
        if room not in floor_by_room:
            floor_by_room[room] = 1 + max((floor_of(target) for target in imports[room]), default=-1)
        return floor_by_room[room]

    return {room: floor_of(room) for room in imports}


def needed_arrows(imports: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """(room, room that it imports from), without arrows that follow from others.

    Example:
        >>> needed_arrows({"a": set(), "b": {"a"}, "c": {"a", "b"}})
        [('b', 'a'), ('c', 'b')]
    """

    def reached(room: str) -> set[str]:
        return imports[room].union(*(reached(target) for target in imports[room]))

    return [
        (room, target)
        for room, targets in imports.items()
        for target in sorted(targets)
        if not any(target in reached(other) for other in targets)
    ]


def draw(path: Path) -> None:
    """Draws the rooms, a row for each floor."""
    imports = imports_between_rooms()
    floor_of = floors(imports)
    rows: list[list[str]] = [[] for _ in range(max(floor_of.values()) + 1)]
    for room in sorted(imports, key=list(SAID).index):
        rows[floor_of[room]].append(room)
    figure, axis = pyplot.subplots(figsize=(9, 1.05 * len(rows)))
    places = {
        room: ((column + 0.5) / len(row), floor) for floor, row in enumerate(rows) for column, room in enumerate(row)
    }
    for room, target in needed_arrows(imports):
        (x, y), (to_x, to_y) = places[room], places[target]
        style = {"arrowstyle": "-|>", "color": "#8a8f98", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", xy=(to_x, to_y + 0.3), xytext=(x, y - 0.3), arrowprops=style, zorder=1)
    for room, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3fb", "edgecolor": "#3b6ea8"}
        label = f"{room}\n{SAID.get(room, '')}"
        axis.text(x, y, label, ha="center", va="center", fontsize=9, bbox=box, zorder=2, linespacing=1.25)
    axis.set(xlim=(0, 1), ylim=(-0.6, len(rows) - 0.4))
    axis.axis("off")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    matplotlib.use("agg")
    parser = argparse.ArgumentParser(description="Draws the rooms of the package from its imports.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("rooms.png"))
    draw(parser.parse_args().out)
