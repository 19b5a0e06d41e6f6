"""What the tool that measures the tree finds in a small one."""

from __future__ import annotations

from pathlib import Path

from tests.tools.scripts import load_script

script = load_script("house_numbers")

ROOT = Path(__file__).parents[2]


def tree(root: Path, **modules: str) -> Path:
    for name, text in modules.items():
        path = root / "src" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_lengths_and_names_that_are_defined_twice_are_found(tmp_path: Path):
    long = "def long():\n" + "    x = 1\n" * 100
    both = "class Draft:\n    @property\n    def f(self):\n        return 1\n"
    house = script.measure(tree(tmp_path, house__a=both + long, house__b="class Draft: ...\n"))
    assert house.functions == {"house.a.Draft.f": 3, "house.a.long": 101}
    assert house.twice == {"Draft": ["house.a", "house.b"]}
    assert house.lines == {"src: Python": 106}
    rows = dict(house.rows)
    assert rows["longer than 100 lines"] == 1 and rows["their 90th percentile"] == 101


def test_no_class_name_stands_for_two_things():
    found = script.unlike_twins(script.measure(ROOT).twice)
    assert not found, "give one of the two another name"


def test_a_part_that_several_backends_have_is_one_thing(tmp_path: Path):
    house = script.measure(
        tree(
            tmp_path,
            house__backends__a__pools="class Pool: ...\nclass Form: ...\nclass Batch: ...\n",
            house__backends__a__plans="class Form: ...\n",
            house__backends__b__pools="class Pool: ...\n",
            house__engine="class Batch: ...\n",
        )
    )
    assert house.twice.keys() == {"Pool", "Form", "Batch"}
    assert script.unlike_twins(house.twice) == {"Form", "Batch"}


def test_circles_are_told_apart_from_those_of_late_imports(tmp_path: Path):
    house = script.measure(
        tree(
            tmp_path,
            house__a="from house import b\n",
            house__b="import house.c\n",
            house__c="from house.a import x\n",
            house__d="def f():\n    import house.e\n",
            house__e="from house.d import f\n",
        )
    )
    assert house.circles == [["house.a", "house.b", "house.c"]]
    assert house.lazy_circles == [["house.d", "house.e"]]


def test_two_trees_are_shown_side_by_side(tmp_path: Path):
    before = script.measure(tree(tmp_path / "before", house__a="x = 1\ndef f():\n    pass\n"))
    now = script.measure(tree(tmp_path / "now", house__a="def f():\n    pass\n"))
    first = next(script.show(now, before, is_all=False))
    assert first.split() == ["lines", "of", "src:", "Python", "2", "3", "-1"]
