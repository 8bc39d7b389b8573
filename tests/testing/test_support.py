"""The table of what works with what, and the README that shows it."""

from pathlib import Path

import pytest

from farspan.testing import support

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_the_table():
    """Made by: python -m farspan.testing.support README.md."""
    text = README.read_text()
    shown = text.split(support.START)[1].split(support.STOP)[0]
    assert shown.strip() == support.support_table()


def test_writing_the_table_changes_nothing_else(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{support.START}\nold\n{support.STOP}\nafter\n")
    monkeypatch.setattr("sys.argv", ["support", str(page)])
    support.main()
    text = page.read_text()
    assert text.startswith(f"before\n{support.START}\n| choice")
    assert text.endswith(f"{support.STOP}\nafter\n")
    assert "old" not in text


def test_every_strategy_takes_most_of_the_table():
    """A rule that refuses too much would make the suite pass with nothing computed."""
    cells = support.cells()
    exact = dict.fromkeys(support.CHOICES["strategy"], 0)
    for (_, _, strategy), refused in cells.items():
        exact[strategy] += refused is None
    rows = len(cells) // len(exact)
    assert exact == {
        "all_gather": rows - 1, "ulysses": rows - 1, "ring": rows - 1, "usp": rows - 1,
        "halo": rows - 12,
    }  # fmt: skip


@pytest.mark.parametrize("strength", [1, 2])
def test_a_covering_array_holds_no_refused_selection(strength):
    rows = support.covering_array(strength)
    assert len(rows) >= max(map(len, support.CHOICES.values()))
    assert all(support.refusal(row) is None for row in rows)
