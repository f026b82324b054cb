"""Options and arguments that several commands share."""

import pytest
from terminals import on_a_terminal

from redisacc.embedded import Server
from redisacc.embedded.addresses import free_port
from redisacc.tools.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "w", "--index", "-1"), "-1 is not in the range 0<=x<=9223372036854775807"),
        (("show", "a{b}"), "no accumulator can have the name 'a{b}'"),
        (("ls", "--redis", "http://x"), "a URL must begin with"),
        (("rm",), "give the name of at least one accumulator, or --older-than AGE"),
        (("rm", "--older-than", "3"), "'3' is no age: give a whole number and s, m, h or d, such as 30d."),
        (("watch", "--events"), "--events prints those of one accumulator: give its NAME, and no --interval"),
        (("watch", "w", "--timeout", "1"), "--timeout needs --events"),
        (("take", "w", "3", "--recover"), "--recover does not wait"),
        (("take", "w", "--token", "t"), "--token needs --recover"),
        (("doctor", "w"), "NAME, --dry-run and --yes need --fix"),
        (("acl", "worker"), "give a ROLE and a PATTERN, or --load without them"),
        (("acl", "worker", "*", "--load", "--file"), "give --load or --file, not both"),
        (("set", "w", "step=1", "least=2"), "or step=N alone; or --forget WORKER alone"),
    ],
)
def test_wrong_usage(offline_cli, words, message):
    found = offline_cli(*words)
    assert found.exit_code == 2
    assert message in found.stderr


@pytest.mark.servers("valkey")
def test_the_password_of_a_url_without_one_may_be_in_the_environment(cli, monkeypatch):
    with Server(port=(port := free_port()), password="a:b@c d"):
        where = f"127.0.0.1:{port}"
        for url, password, code in [
            (f"redis://{where}", "a:b@c d", 0),
            (f"redis://{where}", "wrong", 1),
            (f"redis://{where}", "", 1),
            (f"redis://:a%3Ab%40c%20d@{where}", "wrong", 0),
        ]:
            for words, variable in ((["--redis", url], {}), ([], {"REDISACC_URL": url})):
                assert cli("ls", *words, env={"REDISACC_PASSWORD": password, **variable}).exit_code == code
    monkeypatch.setenv("REDISACC_PASSWORD", "a:b")
    monkeypatch.delenv("REDISACC_URL", raising=False)
    assert main.get_command(None, "ls").make_context("ls", []).meta["redisacc.url"] == "redis://:a%3Ab@localhost:6379/0"


@pytest.mark.slow
@pytest.mark.servers("valkey")
@pytest.mark.parametrize(
    ("answer", "last_line", "left"), [("n\n", "redisacc: canceled, nothing was changed", 1), ("y\n", "deleted w", 0)]
)
def test_the_question_before_a_deletion(real_server, open_dense, client, answer, last_line, left):
    accumulator = open_dense("float32", [1], "w")
    said = on_a_terminal("rm", "w", "--redis", real_server.url, until=r"\[y/N\]", answer=answer)
    lines = said.split("\r\n")
    assert lines[0] == "w: step 0, 0 gradients in the round"
    assert lines[1].startswith("Delete this for every process? [y/N]: ")
    assert last_line in lines
    assert client.exists(accumulator.accumulator_ref) == left
    if left:
        accumulator.delete()


REFUSED = [
    *((("watch", "--interval", value)) for value in ("nan", "inf", "-inf", "0", "-1", "1e300", "x", "")),
    *((("watch", "w", "--events", "--timeout", value)) for value in ("nan", "-1", "-inf", "x")),
    *((("take", "w", "1", "--discard", "--timeout", value)) for value in ("nan", "-1", "x")),
    *((("show", "w", "--index", value)) for value in ("99999999999999999999", "-1", "1.5", "9" * 5000, "nan")),
    ("apply", "w", "-", "--local-step", str(2**63)),
    ("watch", "-n", "0"),
    ("watch", "w", "--events", "-n", "-1"),
    ("serve", "--port", "65536"),
    ("serve", "--port", "-1"),
    ("serve", "--interval", "nan"),
    ("serve", "--interval", "0.1"),
    ("ls", "\udcff"),
    ("show", "\udcff"),
    ("show", "redisacc:{\udcff}"),
    ("ls", "--redis", "redis://\udcff"),
    ("nothing\x1b]0;pwn\a",),
    ("ls", "--nothing\x1b]0;pwn\a"),
    ("apply", "w", "nowhere\x1b]0;pwn\a"),
]


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("words", REFUSED, ids=range(len(REFUSED)))
def test_values_that_no_option_can_have(cli, words):
    found = cli(*words)
    assert found.exit_code == 2, found.output
    assert "\x1b" not in found.output
    assert found.stdout == ""
    assert len(found.stderr) < 2000
