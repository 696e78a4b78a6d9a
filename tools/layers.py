"""Writes the table of layers in docs/architecture.md and their picture, docs/layers.svg: `python tools/layers.py`.

The layers are contracts of import-linter, in pyproject.toml. The table has the first paragraph of each room's
docstring. The picture has an arrow for each import between rooms, unless other arrows lead there, too.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "layers.svg"
BEGIN, END = "<!-- layers: written by tools/layers.py -->\n", "<!-- end of layers -->\n"
PACKAGE = "omnireduce"
HEAD = "| level | room | what is in it |\n|---|---|---|\n"
WIDTH, HEIGHT, ACROSS, DOWN = 140, 24, 8, 34  # of a box, and between boxes, in pixels
STYLE = (
    "text{font:12px sans-serif;text-anchor:middle;fill:#222}rect{fill:#eef3f8;stroke:#47a}"
    "path{fill:none;stroke:#666;stroke-opacity:.6}"
)


def levels() -> list[list[str]]:
    """The rooms of each level, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = {contract["containers"][0]: contract["layers"] for contract in contracts if contract["type"] == "layers"}
    rooms = list[list[str]]()
    for layer in layers[PACKAGE]:
        names = _names(PACKAGE, layer)
        rooms += [_names(name, inner) for name in names for inner in layers.get(name, ())] or [names]
    face = next(contract for contract in contracts if PACKAGE in contract.get("protected_modules", ()))
    users = {name.removesuffix(".**") for name in face["allowed_importers"]}
    lowest = max(level for level, names in enumerate(rooms) if users.intersection(names))
    return [*rooms[: lowest + 1], [PACKAGE], *rooms[lowest + 1 :]]


def _names(container: str, layer: str) -> list[str]:
    return [f"{container}.{name.strip()}" for name in layer.split("|")]


def path_of(room: str) -> Path:
    """The file with the docstring of a room."""
    path = ROOT.joinpath(*room.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def table() -> str:
    """The rooms, from the highest level to the lowest."""
    rows = list[str]()
    for level, rooms in enumerate(reversed(levels())):
        for room in reversed(rooms):
            path = path_of(room).resolve()  # aggregator/ and worker/ are links in the package
            path_text = path.relative_to(ROOT).as_posix()
            meaning = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n\n")[0]
            name = path_text.removesuffix("__init__.py") if room != PACKAGE else path_text
            rows.append(f"| {level} | `{name}` | {' '.join(meaning.split())} |\n")
    return HEAD + "".join(reversed(rows))


def imports() -> set[tuple[str, str]]:
    """Pairs of rooms, the first of which imports from the second, except where a chain of such imports leads there."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    rooms = sorted((room for level in levels() for room in level), key=len, reverse=True)

    def room_of(module: str) -> str:
        inside = (room for room in rooms if module == room or (module.startswith(f"{room}.") and room != PACKAGE))
        return next(inside, "")

    direct: dict[str, set[str]] = {room: set() for room in rooms}
    for module in graph.modules - {f"{PACKAGE}.runtime"}:
        for imported in graph.find_modules_directly_imported_by(module):
            direct[room_of(module)].add(room_of(imported))
    return {
        (room, imported_room) for room, imported_rooms in direct.items() for imported_room in imported_rooms - {room}
        if not any(imported_room in _reached(direct, between) for between in imported_rooms - {room, imported_room})
    }  # fmt: skip


def _reached(direct: dict[str, set[str]], start: str) -> set[str]:
    reached, waiting = set[str](), [start]
    while waiting:
        new = direct[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def picture() -> str:
    """The rooms as boxes in rows, and arrows to those that they import from. An SVG file."""
    rows = levels()
    columns = max(map(len, rows))
    positions = {
        room: ((columns - len(row) + 2 * column) * (WIDTH + ACROSS) // 2 + ACROSS, level * (HEIGHT + DOWN) + 4)
        for level, row in enumerate(rows)
        for column, room in enumerate(row)
    }
    lines = list[str]()
    for room, imported_room in sorted(imports()):
        (x, y), (to_x, to_y) = positions[room], positions[imported_room]
        x, to_x, y, end = x + WIDTH // 2, to_x + WIDTH // 2, y + HEIGHT, to_y - 2
        lines.append(f'<path d="M{x} {y}C{x} {y + DOWN} {to_x} {end - DOWN} {to_x} {end}" marker-end="url(#a)"/>')
    for room, (x, y) in positions.items():
        lines.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>')
        lines.append(f'<text x="{x + WIDTH // 2}" y="{y + 16}">{room.rpartition(".")[2]}</text>')
    width, height = columns * (WIDTH + ACROSS) + ACROSS, len(rows) * (HEIGHT + DOWN)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>'
    arrow = '<marker id="a" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    return "\n".join([head, f'{arrow}<polygon points="0,0 6,3 0,6" fill="#666"/></marker>', *lines, "</svg>\n"])


def page(text: str) -> str:
    """The text of the page with the table of today."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    PICTURE.write_text(picture(), "utf-8")
