"""Spans, links and metrics of operations, as OpenTelemetry's SDK records them."""

import asyncio

import numpy as np
import pytest
import redis
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

import redisacc
import redisacc.asyncio
from redisacc._telemetry import spans
from redisacc._wire.faults import NotPermittedError, WritesRefusedError

WORKERS = "redisacc:{w}:workers"


def linked(span):
    return [link.context.span_id for link in span.links]


def ids(found):
    return [span.context.span_id for span in found]


@pytest.mark.every_server
def test_a_take_links_the_spans_of_its_gradients_and_is_not_their_child(open_dense_stored, recorded):
    acc = open_dense_stored("float32", [3], "w", worker="ann")
    bob = open_dense_stored("float32", [3], "w", worker="bob")
    acc.apply_grad([1, 2, 3])
    acc.apply_grad([1, 2, 3])
    bob.apply_grad([1, 2, 3])
    acc.take_grad(3)
    bob.apply_grad([1, 2, 3], local_step=1)
    bob.take_grad(1)
    applies, takes = recorded.spans("apply"), recorded.spans("take")
    assert [sorted(linked(take)) for take in takes] == [sorted(ids(applies[:3])), ids(applies[3:])]
    assert all(link.context.is_remote for take in takes for link in take.links)
    assert len({span.context.trace_id for span in applies + takes}) == 6
    assert {span.parent for span in applies + takes} == {None}


def test_spans_say_what_the_conventions_for_messaging_ask_for(open_dense, client, recorded):
    acc = open_dense("float32", [3], "w", worker="ann")
    acc.apply_grad([1, 2, 3], local_step=4)
    acc.apply_grad([1, 2, 3], local_step=-1)
    acc.take_grad(1)
    applied, stale, take = recorded.spans()
    common = {
        "messaging.system": "redisacc",
        "messaging.destination.name": "w",
        "messaging.client.id": "ann",
        "db.system.name": "redis",
        "redisacc.kind": "dense",
    }
    if isinstance(client, redis.RedisCluster):
        common["server.address"] = acc._transport.address
    elif "host" in (settings := client.connection_pool.connection_kwargs):
        common |= {
            "server.address": settings["host"],
            "server.port": settings["port"],
            "db.namespace": str(settings["db"]),
        }
    send = {"messaging.operation.name": "apply", "messaging.operation.type": "send", "messaging.message.body.size": 12}
    receive = {"messaging.operation.name": "take", "messaging.operation.type": "receive"}
    steps = {"redisacc.local_step": 4, "redisacc.global_step": 0}
    assert (applied.name, applied.kind) == ("apply w", SpanKind.PRODUCER)
    assert dict(applied.attributes) == common | send | steps | {"redisacc.outcome": "applied"}
    assert dict(stale.attributes) == common | send | steps | {"redisacc.local_step": -1, "redisacc.outcome": "stale"}
    assert (take.name, take.kind) == ("take w", SpanKind.CONSUMER)
    assert dict(take.attributes) == common | receive | {"messaging.batch.message_count": 1, "redisacc.global_step": 0}
    assert {span.status.status_code for span in (applied, stale, take)} == {StatusCode.UNSET}


def test_a_private_accumulator_has_a_span_name_that_does_not_vary(client, recorded):
    with redisacc.ConditionalAccumulator("float32", [1], redis=client) as acc:
        acc.apply_grad([1.0])
        (span,) = recorded.spans()
        assert span.name == "apply (temporary)"
        assert span.attributes["messaging.destination.name"] in acc.accumulator_ref
        assert span.attributes["messaging.destination.temporary"]
        assert span.attributes["messaging.destination.anonymous"]


def test_spans_of_the_application_are_parents_in_its_own_process_only(open_dense, recorded):
    acc = open_dense("float32", [1], "w")
    with recorded.tracer.start_as_current_span("train") as train:
        acc.apply_grad([1.0])
    with recorded.tracer.start_as_current_span("update") as update:
        acc.take_grad(1)
    apply, take = recorded.spans("apply") + recorded.spans("take")
    assert apply.parent.span_id == train.get_span_context().span_id
    assert take.parent.span_id == update.get_span_context().span_id
    assert linked(take) == ids([apply])


def test_a_round_that_is_recovered_has_the_same_links(open_sparse, recorded):
    acc = open_sparse("float32", [5, 2], "w")
    acc.apply_grad([1], np.ones((1, 2)))
    with pytest.raises(RuntimeError), acc.take(1):
        raise RuntimeError
    with acc.recover() as found:
        assert found is not None
    with acc.recover() as found:
        assert found is None
    (apply,), (take,), (recovered, nothing) = (recorded.spans(name) for name in ("apply", "take", "recover"))
    assert linked(take) == linked(recovered) == ids([apply])
    assert linked(nothing) == []
    # What a `with` block does with the round is not part of the take.
    assert take.status.status_code == StatusCode.UNSET


def test_an_error_is_the_status_of_the_span(open_dense, recorded):
    acc = open_dense("float32", [1], "w")
    with pytest.raises(redisacc.TakeTimeoutError) as caught:
        acc.take_grad(1, timeout=0)
    acc.delete()
    with pytest.raises(redisacc.NotFoundError, match="accumulator"):
        acc.apply_grad([1.0])
    take, apply = recorded.spans()
    assert take.status.status_code == apply.status.status_code == StatusCode.ERROR
    assert take.status.description == str(caught.value)
    assert take.attributes["error.type"] == "TakeTimeoutError"
    assert apply.attributes["error.type"] == "NotFoundError"


def test_an_error_of_a_class_that_only_redisacc_uses_has_the_name_of_a_public_one():
    for error in (NotPermittedError("x"), WritesRefusedError("x")):
        assert spans._error_type(error) == "ServerError"


def test_compacting_is_a_child_of_the_apply_and_keeps_the_links(open_dense, recorded):
    acc = open_dense("float32", [3], "w", limits=redisacc.Limits(in_place=0, buffer=30))
    for _ in range(3):
        acc.apply_grad([1, 2, 3])
    acc.take_grad(3)
    applies, (compact,), (take,) = (recorded.spans(name) for name in ("apply", "compact", "take"))
    assert compact.parent.span_id == applies[-1].context.span_id
    assert compact.attributes["messaging.batch.message_count"] == 2
    assert sorted(linked(take)) == sorted(ids(applies))


def test_parameters_have_spans_for_publish_and_wait(open_parameters, recorded):
    weights = open_parameters("w", publisher="chief")
    weights.publish([1, 2], step=7)
    assert weights.wait(after=6)[0] == 7
    publish, wait = recorded.spans()
    assert (publish.name, publish.kind) == ("publish w", SpanKind.PRODUCER)
    assert (wait.name, wait.kind) == ("wait w", SpanKind.CONSUMER)
    assert publish.attributes["messaging.client.id"] == "chief"
    assert publish.attributes["redisacc.step"] == wait.attributes["redisacc.step"] == 7


def test_a_wait_for_a_step_has_a_span(open_dense, recorded):
    acc = open_dense("float32", [1], "w")
    acc.wait_for_step(0)
    (span,) = recorded.spans("wait")
    assert span.attributes["redisacc.global_step"] == 0


def test_no_context_is_sent_unless_the_span_is_recorded(open_dense, client, record):
    recorded = record(ALWAYS_OFF)
    acc = open_dense("float32", [1], "w", worker="ann")
    acc.apply_grad([1.0])
    assert client.hgetall(WORKERS) == {b"ann": b"1"}
    acc.take_grad(1)
    assert recorded.spans() == []


def test_links_are_bounded_for_each_worker_and_for_each_take(open_dense, client, recorded):
    acc = open_dense("float32", [1], "w", worker="ann")
    for _ in range(40):
        acc.apply_grad([1.0])
    # Of 56 bytes each.
    assert client.hget(WORKERS, "ann").count(b" ") == 2048 // 56
    assert acc.info().workers == {"ann": 40}
    acc.take_grad(40)
    for number in range(9):
        with redisacc.ConditionalAccumulator("float32", [1], "w", redis=client, worker=str(number)) as other:
            for _ in range(16):
                other.apply_grad([1.0], local_step=1)
    acc.take_grad(144)
    first, second = recorded.spans("take")
    assert sorted(linked(first)) == sorted(ids(recorded.spans("apply")[: 2048 // 56]))
    assert len(second.links) == 128


def test_metrics_count_and_time_operations_with_few_attributes(open_dense, recorded):
    acc = open_dense("float32", [1], "w")
    acc.apply_grad([1.0])
    acc.apply_grad([1.0])
    acc.apply_grad([1.0], local_step=-1)
    acc.take_grad(2)
    with pytest.raises(redisacc.TakeTimeoutError):
        acc.take_grad(1, timeout=0)
    acc.delete()
    found = recorded.metrics()
    assert sorted(found) == [
        "messaging.client.consumed.messages",
        "messaging.client.operation.duration",
        "messaging.client.sent.messages",
    ]
    sent = {point.attributes["redisacc.outcome"]: point.value for point in found["messaging.client.sent.messages"]}
    assert sent == {"applied": 2, "stale": 1}
    (received,) = found["messaging.client.consumed.messages"]
    assert received.value == 2
    durations = found["messaging.client.operation.duration"]
    assert sorted((point.attributes["messaging.operation.name"], point.count) for point in durations) == [
        ("apply", 3), ("take", 1), ("take", 1),
    ]  # fmt: skip
    assert [point.attributes["error.type"] for point in durations if "error.type" in point.attributes] == [
        "TakeTimeoutError"
    ]
    keys = {key for points in found.values() for point in points for key in point.attributes}
    assert keys == {
        "messaging.system", "messaging.operation.name", "messaging.operation.type", "redisacc.outcome", "error.type",
    }  # fmt: skip


@pytest.mark.servers("valkey")
def test_spans_of_asyncio_have_the_parents_of_their_tasks(real_server, recorded):
    async def work(number):
        async with redisacc.asyncio.ConditionalAccumulator(
            "float32", [1], "w", redis=real_server.url, worker=str(number)
        ) as acc:
            with recorded.tracer.start_as_current_span(f"task {number}"):
                if number == 0:
                    await acc.take_grad(2)
                else:
                    await acc.apply_grad([1.0])

    async def all_at_once():
        await asyncio.gather(*map(work, range(3)))
        async with redisacc.asyncio.ConditionalAccumulator("float32", [1], "w", redis=real_server.url) as acc:
            await acc.delete()

    asyncio.run(all_at_once())
    tasks = {span.name: span.context.span_id for span in recorded.spans("task")}
    (take,), applies = recorded.spans("take"), recorded.spans("apply")
    assert take.parent.span_id == tasks["task 0"]
    assert sorted(apply.parent.span_id for apply in applies) == sorted([tasks["task 1"], tasks["task 2"]])
    assert sorted(linked(take)) == sorted(ids(applies))
