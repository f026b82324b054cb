"""For how long a taker does without a reducer that was late."""

from redisacc._protocol.sums.part_sums import ReducerReliance


def test_reliance_doubles_its_pauses_and_success_ends_them(clock):
    clock.stop()
    reliance = ReducerReliance()
    for seconds in (1, 2, 4, 8, 16, 32, 64, 64):
        assert reliance.relies
        reliance.fail()
        clock.advance(seconds - 0.01)
        assert not reliance.relies
        clock.advance(0.02)
    reliance.fail()
    reliance.succeed()
    assert reliance.relies
    reliance.fail()
    clock.advance(1.01)
    assert reliance.relies
