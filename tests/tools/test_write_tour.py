"""The tour and the list of decisions are written from the code; what lacks its line is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.scripts import load_script

script = load_script("write_tour")

SAYS = '"""What is kept.\n\nImports {0}; no text comes in.\n\nStart in ``a.py``. More.\n"""\n'
FRAME = f"# A page\n\n{script.BEGIN}\n{script.END}\n\nBehind it.\n"


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two rooms, one of which has another in it, with one decision."""
    source, docs = tmp_path / "src" / "kvcellar", tmp_path / "docs"
    files = {
        source / "__init__.py": '"""All."""\n',
        source / "words.py": '"""Words | of all."""\n',
        source / "cellars" / "__init__.py": SAYS.format("shelves"),
        source / "cellars" / "a.py": "import kvcellar.shelves.inner.b\n",
        source / "shelves" / "__init__.py": SAYS.format("nothing"),
        source / "shelves" / "inner" / "__init__.py": SAYS.format("nothing"),
        source / "shelves" / "inner" / "b.py": "import kvcellar.words\n",
        docs / "tour.md": FRAME,
        docs / "decisions" / "README.md": FRAME,
        docs / "decisions" / "001-why.md": "# 1. Why\n\nRooms: `shelves/inner`, `cellars`.\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, path in (
        ("ROOT", tmp_path),
        ("SOURCE", source),
        ("TOUR", docs / "tour.md"),
        ("DECISIONS", docs / "decisions"),
        ("MODULES", set()),
    ):
        monkeypatch.setattr(script, name, path)
    monkeypatch.setattr(script.sys, "argv", ["write_tour.py"])
    return tmp_path


def test_the_pages_are_what_would_be_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script.sys, "argv", ["write_tour.py", "--check"])
    assert script.main() == 0


def test_rooms_stand_from_the_bottom_up_each_with_its_line_and_decisions(house: Path):
    assert script.main() == 0
    page = (house / "docs" / "tour.md").read_text()
    rooms = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rooms == ["shelves/", "shelves/inner/", "cellars/"]
    line = "What is kept. Imports shelves; no text comes in. Start in `a.py`."
    assert f"| `cellars/` | {line} | [1](decisions/001-why.md) |" in page
    assert "cellars --> shelves" in page and "- `words.py`: Words \\| of all." in page
    assert page.startswith("# A page\n") and page.endswith("Behind it.\n")


def test_decisions_are_listed_at_each_room_that_they_name(house: Path):
    assert script.main() == 0
    page = (house / "docs" / "decisions" / "README.md").read_text()
    assert page.count("- 1: [Why](001-why.md)") == 2
    assert page.index("`shelves/inner/`") < page.index("`cellars/`")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("src/kvcellar/cellars/__init__.py", '"""What is kept."""\n', "what comes in"),
        ("docs/decisions/001-why.md", "# 1. Why\n\nBecause.\n", "Rooms: `ROOM`"),
        ("docs/decisions/001-why.md", "# 1. Why\n\nRooms: `attic`.\n", "Rooms: `ROOM`"),
        ("docs/decisions/001-why.md", "# 1\n", "Rooms: `ROOM`"),
    ],
)
def test_what_does_not_say_its_line_is_refused_by_name(
    house: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, said: str
):
    (house / file).write_text(text)
    assert script.main() == 1
    told = capsys.readouterr().err
    assert file in told and said in told
    assert (house / "docs" / "tour.md").read_text() == FRAME, "nothing is written"


def test_a_stale_page_fails_the_check_and_is_left_as_it_is(
    house: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(script.sys, "argv", ["write_tour.py", "--check"])
    assert script.main() == 1
    assert "docs/tour.md is stale" in capsys.readouterr().err
    assert (house / "docs" / "tour.md").read_text() == FRAME
