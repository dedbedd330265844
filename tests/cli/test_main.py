"""A script must be able to rely on exit codes and on clean standard output."""

import pytest

from kvferry import __version__
from kvferry.cli import main as command
from kvferry.cli import output
from kvferry.errors import (
    ConfigError,
    CorruptError,
    IncompatibleError,
    InternalError,
    UnavailableError,
)


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["kvferry", *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    return caught.value.code


def test_a_wrong_setting_is_2_and_goes_to_standard_error(monkeypatch, capsys):
    assert run(monkeypatch, "doctor", "posx:///var/kv") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Did you mean 'posix'?" in captured.err


def test_a_wrong_option_is_2(monkeypatch):
    assert run(monkeypatch, "doctor", "--nonsense") == 2


def test_the_version_is_printed(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (CorruptError, 1),
        (ConfigError, 2),
        (UnavailableError, 3),
        (IncompatibleError, 3),
        (InternalError, 70),
    ],
)
def test_each_error_has_its_code(kind, code):
    assert output.exit_code(kind("some.kind", "words")) == code


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 51, "2.0 PiB")],
)
def test_sizes_are_readable(size_bytes, text):
    assert output.size_text(size_bytes) == text
