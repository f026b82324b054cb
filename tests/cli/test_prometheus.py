"""The metrics of the command `serve`."""

import pytest

pytestmark = pytest.mark.servers("valkey", "cluster")


@pytest.mark.slow
def test_export(export, open_dense, background, until):
    ann, bob = (open_dense("float32", [1], "w", worker=name) for name in ("ann", "bob"))
    open_dense("float32", [1], "other")
    ann.apply_grad([1.0])
    bob.apply_grad([1.0])
    ann.take_grad(2)
    ann.apply_grad([1.0], 1)
    ann.apply_grad([1.0], 0)
    take = background(ann.take_grad, 2, timeout=30)
    until(lambda: ann.info().waiting)
    lines = export("w*").scrape()
    for line in (
        "redisacc_up 1.0",
        'redisacc_global_step{accumulator="w"} 1.0',
        'redisacc_accumulated{accumulator="w"} 1.0',
        'redisacc_required{accumulator="w"} 2.0',
        'redisacc_applied_total{accumulator="w"} 3.0',
        'redisacc_stale_total{accumulator="w"} 1.0',
        'redisacc_takes_total{accumulator="w"} 1.0',
        'redisacc_worker_applied_total{accumulator="w",worker="ann"} 2.0',
        'redisacc_worker_missing{accumulator="w",worker="ann"} 0.0',
    ):
        assert line in lines
    assert not any("other" in line for line in lines if not line.startswith("#"))
    bob.apply_grad([1.0], 1)
    take.result()


def test_histograms(export, open_dense, until):
    """Two rounds of two gradients of 12 bytes, of which one is a step late; nobody had to wait for the second."""
    acc = open_dense("float32", [3], "w", staleness=2)
    exporter = export("w")
    # In a cluster, it listens to the accumulators that it has found.
    exporter.scrape()
    for steps in ((0, 0), (0, 1)):
        for step in steps:
            acc.apply_grad([1.0, 2.0, 3.0], step)
        acc.take_grad(2)

    def lines():
        # Events are heard a moment after what they announce.
        found = exporter.scrape()
        return found if 'redisacc_round_bytes_count{accumulator="w"} 2.0' in found else None

    found = until(lines)
    for line in (
        'redisacc_round_bytes_sum{accumulator="w"} 48.0',
        'redisacc_round_bytes_bucket{accumulator="w",le="1024.0"} 2.0',
        'redisacc_round_bytes_bucket{accumulator="w",le="+Inf"} 2.0',
        'redisacc_staleness_steps_bucket{accumulator="w",le="0.0"} 3.0',
        'redisacc_staleness_steps_bucket{accumulator="w",le="1.0"} 4.0',
        'redisacc_staleness_steps_sum{accumulator="w"} 1.0',
        'redisacc_round_seconds_count{accumulator="w"} 1.0',
        'redisacc_gathering_seconds_count{accumulator="w"} 2.0',
        # Whether the first take waited was not known yet.
        'redisacc_take_wait_seconds_bucket{accumulator="w",le="0.001"} 1.0',
        'redisacc_take_wait_seconds_count{accumulator="w"} 1.0',
    ):
        assert line in found


@pytest.mark.slow
@pytest.mark.servers("valkey")
def test_export_without_a_server_says_so_in_a_metric(export, proxy):
    exporter = export(url=proxy.url)
    assert "redisacc_up 1.0" in exporter.scrape()
    proxy.stall()
    assert "redisacc_up 0.0" in exporter.scrape()
    proxy.resume()
