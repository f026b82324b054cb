"""Options and arguments that several commands share."""

from __future__ import annotations

import pytest
from terminals import on_a_terminal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "w", "--index", "1", "--top", "1"), "give --index or --top, not both"),
        (("show", "w", "--index", "-1"), "-1 is not in the range 0<=x<=9223372036854775807"),
        (("show", "a{b}"), "no accumulator can have the name 'a{b}'"),
        (("ls", "--redis", "http://x"), "a URL must begin with"),
        (("rm",), "give the name of at least one accumulator"),
    ],
)
def test_wrong_usage(offline_cli, words, message):
    found = offline_cli(*words)
    assert found.exit_code == 2
    assert message in found.stderr


@pytest.mark.servers("valkey")
@pytest.mark.parametrize(
    ("answer", "last_line", "left"), [("n\n", "redisacc: cancelled, nothing was changed", 1), ("y\n", "deleted w", 0)]
)
def test_the_question_before_a_deletion(real_server, open_dense, client, answer, last_line, left):
    accumulator = open_dense("float32", [1], "w")
    said = on_a_terminal("rm", "w", "--redis", real_server.url, until=r"\[y/N\]", answer=answer)
    lines = said.split("\r\n")
    assert lines[0] == "w: step 0, 0 gradients in the round"
    assert lines[1].startswith("Delete this accumulator for every process? [y/N]: ")
    assert last_line in lines
    assert client.exists(accumulator.accumulator_ref) == left
    if left:
        accumulator.delete()
