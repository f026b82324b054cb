"""Parameters that an optimizer updates, in the commands `show`, `ls`, `rm` and `gc`."""

import numpy as np
import pytest
from support.training_options import grouped

import redisacc

pytestmark = [pytest.mark.servers("valkey", "cluster")]

# The bytes of the weights themselves, and of those in bfloat16.
WIDE, NARROW = 80_000, 40_000


@pytest.fixture(params=[None, 3])
def trained(request, client, background):
    """Opens a chief with an optimizer that has made two updates, and is closed again."""

    def make(**options):
        encoding = options.pop("encoding", None)

        def work():
            with redisacc.Worker("w", redis=client) as worker:
                for _, parameters in worker.steps():
                    worker.apply(parameters)

        optimizer = redisacc.optim.AdamW(0.1, ema=0.5, **options)
        weights = {"w": np.ones(20_000, np.float32)}
        given = {"workers": 1, "partitions": request.param, "redis": client, "encoding": encoding}
        with redisacc.Chief("w", weights, optimizer=optimizer, **grouped(given)) as chief:
            worker = background(work)
            for _ in chief.updates(until=2):
                pass
            worker.result(30)

    return make


@pytest.mark.parametrize(("encoding", "state", "version"), [
    (None, 3 * WIDE, 4 * WIDE), ("bfloat16", 4 * WIDE, 4 * WIDE + NARROW),
])  # fmt: skip
def test_show_counts_state_and_earlier_versions(trained, cli, cli_json, encoding, state, version):
    trained(encoding=encoding)
    found = cli_json("show", "w")["parameters"]
    assert (found["optimizer"], found["updates"], found["step"], found["finished"]) == ("adamw", 2, 2, True)
    assert found["nbytes"] == WIDE
    assert found["state_bytes"] == state
    # The version, and earlier ones for slow readers.
    assert found["stored_bytes"] % version == 0
    assert found["stored_bytes"] > version
    (listed,) = cli_json("ls", "w")
    assert listed["parameters"] | {"read_at": ""} == found | {"read_at": ""}
    text = cli("show", "w").stdout
    assert "  optimizer    adamw, 2 updates\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_stored_is_what_the_server_has(trained, cli_json, client):
    trained()
    keys = [*client.scan_iter("redisacc:{w}:parameters:object:*"), *client.scan_iter("redisacc:{w/*}:partition:blob:*")]
    # Parts that nobody has listed expire: a bet of an updater would be one.
    assert sum(map(client.strlen, keys)) == cli_json("show", "w")["parameters"]["stored_bytes"]
