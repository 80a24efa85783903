"""Files that somebody else has written: read with limits, and what they hold cannot control a terminal."""

from __future__ import annotations

import json
import re

import pytest

from exp.console import printable
from exp.errors import ConfigError
from exp.runs.files import csv_content, read_json, read_yaml

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
UNREADABLE = {
    "integer": (b"name: x\nseed: " + b"7" * 5000, "line 2"),
    "digits of a key": (b"1" * 5000 + b": x", "line 1"),
    "brackets": (b"hooks: " + b"[" * 600 + b"]" * 600, "100 levels"),
    "braces": (b"a: " + b"{a: " * 20000, "100 levels"),
    "indents": (b"".join(b" " * n + b"a:\n" for n in range(600)), "100 levels"),
    "latin": ("name: Zürich".encode("latin-1"), "UTF-8"),
    "utf-16": ("name: x".encode("utf-16"), "UTF-8"),
    "bomb": (BOMB.encode(), "aliases"),
    "itself": (b"a: &a [*a]", "aliases"),
    "zeros": (b"\0" * 100, "not allowed"),
    "large": (b"# " + b"x" * 2**23, "8 MiB"),
    "tag": (b"a: !!python/object/apply:os.system [ls]", "line 1"),
    "tab": (b"a:\n\tb: 1", "line 2"),
    "unfinished": (b"a: [1, 2", "line "),
    "key": (b"? [a, b]\n: c", "line 1"),
    "date": (b"a: 2020-13-45", "month"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_yaml_that_cannot_be_used_is_an_error_with_file_and_line(tmp_path, kind):
    content, says = UNREADABLE[kind]
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        read_yaml(path)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_yaml_of_editors_and_with_aliases_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\r\nbase: &base {a: 1}\r\nmore: [*base, *base]\r\n" + b"seed: 1" + b"0" * 900)
    assert read_yaml(path) == {"name": "x", "base": {"a": 1}, "more": [{"a": 1}, {"a": 1}], "seed": 10**900}


@pytest.mark.parametrize(
    "content", [b"[" * 100000, b'{"a": ' * 100000, "{}".encode("utf-16"), b'{"a": "\xfc"}', b"{", b"", b"\0"]
)
def test_json_that_cannot_be_used_is_an_error_with_the_file(tmp_path, content):
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        read_json(path)


def test_text_cannot_control_a_terminal_or_the_order_of_what_is_read():
    assert printable("a\x1b[31mb\r\x07\x9b2J\u202e\udc80") == r"a\x1b[31mb\r\x07\x9b2J\u202e\udc80"
    assert printable("Zürich 日本\té\n") == "Zürich 日本\té\n"
    assert csv_content([["a\x1b]0;x\x07", "\r=1+1", 3, "-3"]]) == b"a\\x1b]0;x\\x07,'\\r=1+1,3,-3\n"


def test_a_result_of_a_stranger_controls_neither_terminal_nor_tables(exp):
    folder = exp.path("runs/a")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text('name: "x\\e[2J"\ntask:\n  name: train\nmodel:\n  "k\\e[2J": "v\\e]0;x\\a"\n')
    (folder / "overrides.yaml").write_text('- "seed=\\e[31m"\n')
    metrics = {"mse": 1.0, "bad\x1b[2J": 2.0}
    result = {"status": "completed\x1b[2J", "metrics": metrics, "metric_name": "bad\x1b[2J", "metric": 2.0}
    error = {"rank": 0, "type": "x\x1b[2J", "message": "y\x1b]52;c;aGk=\x07"}
    (folder / "result.json").write_text(json.dumps({**result, "error": error}))
    done = exp("task=report", "run=runs", "output_dir=report")
    assert done.returncode == 0, done.stderr
    tables = "".join(path.read_text() for path in exp.path("report").iterdir() if path.is_file())
    for text in (done.stdout, done.stderr, tables):
        assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text) == []
    assert r"\x1b[2J" in done.stdout
