"""Tables in the output of commands."""

from distribuuuu.commands.terminal import align_columns


def test_columns_have_the_width_of_their_longest_cell():
    lines = [["class", "train", "val"], ["ant", "1,000", "", "no image", "of val"], ["a longer name", "-", "7"]]
    assert align_columns(lines, "<>>") == [
        "class          train  val",
        "ant            1,000       no image  of val",
        "a longer name      -    7",
    ]
    assert align_columns([["ant", ""], ["bee", ""]], "<<") == ["ant", "bee"], "no trailing spaces"
