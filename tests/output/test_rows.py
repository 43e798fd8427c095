"""Words in columns: beside each other where they fit, else below each other."""

from __future__ import annotations

from batchscout.orchestrator.output.rows import labelled_lines, table_lines

SENTENCE = "every word of a sentence stands in one column, however long the sentence is"


def test_texts_begin_in_one_column_and_are_broken_between_words() -> None:
    lines = list(labelled_lines([("a", SENTENCE), ("longer", "short")], 50))
    assert lines[0].startswith("  a       every")
    assert all(line.startswith(10 * " ") for line in lines[1:-1])
    assert lines[-1] == "  longer  short"
    assert all(len(line) <= 50 for line in lines)
    assert " ".join(" ".join(lines).split()) == f"a {SENTENCE} longer short"


def test_texts_with_little_room_beside_their_names_go_below_them() -> None:
    assert list(labelled_lines([("a name of many letters", "words")], 40)) == ["  a name of many letters", "    words"]


def test_a_text_without_a_name_leaves_no_line_empty() -> None:
    assert list(labelled_lines([("name of many letters ", "words"), ("", "more")], 40)) == [
        "  name of many letters",
        "    words",
        "    more",
    ]


def test_a_name_without_a_text_stands_alone() -> None:
    assert list(labelled_lines([("a", "")], 80)) == ["  a"]


def test_cells_stand_below_the_names_of_their_columns_only_where_they_fit() -> None:
    head, rows = ("", "one", "other"), [("key", "1", "2")]
    assert list(table_lines(head, rows, 80)) == ["       one  other", "  key  1    2"]
    assert list(table_lines(head, rows, 16)) == ["  key", "    one", "      1", "    other", "      2"]
