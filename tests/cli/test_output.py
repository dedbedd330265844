"""What commands print can be read, also where it goes into a file."""

from kvferry.cli.output import print_table


def test_a_table_in_a_pipe_is_whole(capsys):
    answer = "a long answer that nobody should have to guess the end of, " * 2
    print_table(("engine", "answer"), [("A", answer)])
    assert answer.strip() in capsys.readouterr().out
