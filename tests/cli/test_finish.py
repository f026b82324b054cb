"""The command `finish`."""

import numpy as np
import pytest

import redisacc

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.fixture
def weights(client):
    with redisacc.Parameters("w", redis=client) as parameters:
        parameters.publish({"w": np.ones(3)}, 7)
        yield parameters
        parameters.delete()


def test_finish(cli, cli_json, weights):
    assert cli_json("finish", "w") == {"finished": True, "step": 7}
    assert weights.finished()
    with pytest.raises(redisacc.FinishedError):
        weights.wait(after=7, timeout=0)
    found = cli("finish", "redisacc:{w}")
    said = "redisacc:{w} is finished at step 7: the loops of its processes end within a second\n"
    assert (found.exit_code, found.stdout) == (0, said)


def test_nothing_is_published(cli, accumulator):
    found = cli("finish", "w")
    assert (found.exit_code, found.stdout) == (3, "")
    assert "nothing has been published under the name 'w'" in found.stderr


def test_the_loops_of_a_training_end(cli, client, background, until):
    optimizer = redisacc.optim.SGD(0.1)
    with redisacc.Training("w", {"w": np.zeros(2)}, optimizer=optimizer, workers=1, redis=client) as training:
        assert not training.finished
        steps = []

        def loop():
            for step, weights in training.steps():
                steps.append(step)
                training.apply({"w": weights["w"] - 1})

        running = background(loop)
        until(lambda: len(steps) > 2)
        assert cli("finish", "w").exit_code == 0
        running.result()
        assert training.finished
        assert training.latest()[0] - steps[-1] in (0, 1)
        training.delete()
