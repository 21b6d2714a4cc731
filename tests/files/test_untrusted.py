"""Regular files only, JSON within limits, and names without control characters."""

import json
import os

import pytest

from distribuuuu.commands.guard import report
from distribuuuu.config import ConfigError
from distribuuuu.config.json_file import load_json
from distribuuuu.files.untrusted import open_regular, printable, read_regular


@pytest.fixture(params=["pipe", "device", "folder"])
def special(request, tmp_path):
    """A path that a plain `open` waits for, never reads to its end, or cannot open."""
    path = tmp_path / "special"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[request.param](path)
    return path


def test_only_regular_files_are_opened(special, tmp_path):
    for read in (open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(OSError, match="not a regular file"):
            read(special)
    with pytest.raises(ConfigError, match=f"{special}: cannot be read"):
        load_json(special)


def test_a_file_has_a_largest_size(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "a", 4)


def test_json_is_returned_or_named_as_damaged(tmp_path):
    for content in [b"\xff", b"{", b"NaN", b"[" * 100_000, b"9" * 5000, b'"\\ud800"', b""]:
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.json: invalid JSON"):
            load_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({"a": [1, None]}))
    assert load_json(tmp_path / "a.json") == {"a": [1, None]}


def test_a_name_with_characters_that_a_terminal_acts_on_is_escaped(capsys):
    for name, shown in [
        ("\x1b[2J\x07", "\\x1b[2J\\x07"), ("gpj.\u202exe", "gpj.\\u202exe"),
        ("\u2066a\u2069\u200f\u061c", "\\u2066a\\u2069\\u200f\\u061c"),
        ("a\r\nb\tc\x85\u2028", "a\\r\\nb\\tc\\x85\\u2028"),
        ("\udcff", "\\udcff"), ("naïve 猫 \U0001f469\u200d\U0001f52c.jpg", "naïve 猫 \U0001f469\u200d\U0001f52c.jpg"),
    ]:  # fmt: skip
        assert printable(name) == shown
        shown.encode()
    report(ConfigError("a\n  - b\x1b[1A.jpg: broken"))
    assert capsys.readouterr().err == "1 problem to solve first:\n  - a\n      - b\\x1b[1A.jpg: broken\n"
