"""Users' code, to be checked by mypy and pyright in their strict modes. It is not run."""

from __future__ import annotations

from typing import Any, Unpack, assert_type

import ml_dtypes
import numpy as np
import numpy.typing as npt

import redisacc
import redisacc.asyncio
from redisacc import errors, raw_ops
from redisacc.embedded import Server
from redisacc.types import AccumulatorOptions, GradientOptions


def chief(url: str) -> npt.NDArray[np.float32]:
    weights = np.zeros(3, np.float32)
    with redisacc.ConditionalAccumulator(np.float32, shape=[3], shared_name="w", redis=url, worker="chief") as acc:
        step = acc.global_step()
        mean = acc.take_grad(num_required=4, timeout=10.0)
        weights -= 0.1 * mean
        with acc.take(4) as taken:
            weights -= taken.gradient
            assert_type(taken.workers, dict[str, int])
            assert_type(taken.gradient, npt.NDArray[Any])
        with acc.recover() as found:
            if found is not None:
                weights -= found.gradient
        look = acc.peek()
        if look.gradient is not None:
            print(look.gradient.sum(), look.num_accumulated)
        assert_type(acc.wait_for_step(step + 1, timeout=1), int)
        acc.set_global_step(7)
    return weights


def worker(acc: redisacc.ConditionalAccumulator, gradient: npt.NDArray[np.float64]) -> bool:
    result = acc.apply_grad(gradient, local_step=acc.global_step())
    assert_type(acc.as_encoded(gradient), npt.NDArray[Any])
    redisacc.Parameters("w", encoding="bfloat16").close()
    if not result:
        print(result.outcome, result.global_step)
    return bool(acc.apply_grad([1.0, 2.0, 3.0]))


async def on_a_loop(url: str) -> None:
    async with redisacc.asyncio.ConditionalAccumulator("float32", [3], "w", redis=url, worker="chief") as acc:
        assert_type(await acc.apply_grad([1.0, 2.0, 3.0], local_step=1), redisacc.ApplyResult)
        assert_type(await acc.take_grad(4, timeout=10.0), npt.NDArray[Any])
        async with acc.take(4, most=5) as taken:
            assert_type(taken, redisacc.Round[npt.NDArray[Any]])
        assert_type(acc.as_encoded([1.0]), npt.NDArray[Any])
        async for event in acc.events(timeout=1):
            assert_type(event, redisacc.types.Event)
        assert_type(acc.shape, tuple[int | None, ...] | None)
    opened = await redisacc.asyncio.SparseConditionalAccumulator("float32", [9, 2])
    assert_type(await opened.take_indexed_slices_grad(1), redisacc.IndexedSlices)
    tree = await redisacc.asyncio.TreeAccumulator.like({"w": np.zeros(3)})
    assert_type(await tree.num_accumulated(), int)
    async with redisacc.asyncio.Parameters("w") as parameters:
        assert_type(await parameters.wait(after=3), tuple[int, Any])
    async with redisacc.asyncio.Chief("t", {"w": np.zeros(2)}, workers=3) as chief:
        async for round_ in chief.rounds(until=3):
            assert_type(round_.global_step, int)
            await chief.publish({"w": chief.parameters["w"]}, finished=True)
    async with redisacc.asyncio.Worker("t", number=2) as worker:
        assert_type(await worker.workers(), int)
        async for step, _ in worker.steps():
            assert_type(step, int)
            assert_type(await worker.apply({"w": np.zeros(2)}), redisacc.ApplyResult)

    async with redisacc.asyncio.Training("t", {"w": np.zeros(2)}, optimizer=redisacc.optim.SGD(0.1)) as training:
        async for step, _ in training.steps(until=3):
            assert_type(step, int)
            assert_type(await training.apply({"w": np.ones(2)}, metrics={"loss": 0.5}), redisacc.ApplyResult)
        assert_type(await training.workers(), int)
        assert_type(await training.finished(), bool)
        assert_type(await training.latest(), tuple[int, Any])


def trainings(loss: np.float32) -> None:
    batches = redisacc.data.Batches(1000, 32, seed=1)
    with redisacc.Training(
        "t", {"w": np.zeros(2)}, optimizer=redisacc.optim.SGD(0.1), workers=2, quorum=redisacc.Quorum(1), log=print
    ) as training:
        for step, parameters in training.steps(until=3):
            indices = batches.indices(step, training.number or 0, training.workers)
            result = training.apply({"w": parameters["w"]}, weight=len(indices), metrics={"loss": loss, "seen": step})
            assert_type(result, redisacc.ApplyResult)
            with training.begin() as upload:
                upload.put("w", np.ones(2))
                upload.commit(metrics={"loss": loss})
        for past in training.history():
            assert_type(past.metrics, dict[str, float])
        assert_type(training.latest_state(), tuple[int, Any])

    def update(taken: redisacc.Round[Any], parameters: dict[str, Any], state: None) -> tuple[dict[str, Any], None]:
        return {"w": parameters["w"] - taken.gradient["w"]}, state

    with redisacc.Training("t", {"w": np.zeros(2)}, update=update, workers="all", number=1) as training:
        training.finish()
    with redisacc.Chief("t", {"w": np.zeros(2)}, workers=2, optimizer=redisacc.optim.Adam(), standby=True) as chief:
        for step in chief.updates(until=3):
            print(step, chief.metrics["loss"])


def opened(name: str, **options: Unpack[AccumulatorOptions]) -> redisacc.ConditionalAccumulator:
    """Passes options on, as programs do that wrap a class."""
    return redisacc.ConditionalAccumulator("float32", [2], name, **options)


def options() -> None:
    opened("w", worker="ann", staleness=2, mean=redisacc.Mean(by="count"), limits=redisacc.Limits(in_place=0))
    late = redisacc.Staleness(2, weight="inverse_sqrt")
    redisacc.TreeAccumulator(
        {"w": ("float32", (2,))},
        "w",
        reduction_type="SUM",
        staleness=late,
        mean=redisacc.Mean(rows="index", missing="skip"),
        order="worker",
        partitions="auto",
        min_replicas=1,
        create=False,
    )
    # Each of these lines has one mistake, which both type checkers find.
    opened("w", stalness=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    opened("w", finite="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    redisacc.SparseConditionalAccumulator("float32", sparse_mean="round")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    redisacc.asyncio.ConditionalAccumulator("float32", order="name")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    checkpoints = redisacc.Checkpoints("saved", every=50, keep_every=1000)
    gradients: GradientOptions = {"sparse": ["table"], "order": "arrival", "finite": True}
    steps = redisacc.LocalSteps(redisacc.optim.SGD(0.1), 20, outer=redisacc.optim.SGD(1.0))
    redisacc.Training("t", {}, optimizer=steps, workers=2, checkpoint=checkpoints, accumulator=gradients)
    redisacc.Training("t", {}, optimizer=steps, chekpoint="saved")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    redisacc.Training("t", {}, optimizer=steps, quorum="all")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    redisacc.Training("t", {}, optimizer=steps, accumulator={"ordre": "arrival"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    redisacc.Chief("t", {}, log=print)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def sparse() -> None:
    table = redisacc.SparseConditionalAccumulator("float32", [10_000, 2], "embeddings", reduction_type="SUM")
    table.apply_grad(grad_indices=[7, 42], grad_values=[[1.0, 1.0], [2.0, 2.0]], grad_shape=[10_000, 2])
    table.apply_grad(np.array([1]), np.ones((1, 2), ml_dtypes.bfloat16))
    indices, values, shape = table.take_grad(2)
    assert_type(indices, npt.NDArray[Any])
    slices = table.take_indexed_slices_grad(2)
    assert_type(slices, redisacc.IndexedSlices)
    table.apply_indexed_slices_grad(slices)
    with table.take(1) as taken:
        dense = taken.gradient.to_dense()
        print(dense.shape, values.shape, shape.tolist())
    table.delete()


def tree(model: dict[str, npt.NDArray[np.float32]]) -> None:
    spec = {"emb": redisacc.Sparse("float32", (10_000, 2)), "layers": [(np.float32, (2, 2)), ("int64", ())]}
    with redisacc.TreeAccumulator(
        spec, "model", mean=redisacc.Mean(missing="skip", rows="index"), reduction_type="SUM"
    ) as acc:
        rows = redisacc.IndexedSlices([[1.0, 1.0]], [7])
        assert_type(acc.apply_grad({"emb": rows, "layers": [np.ones((2, 2)), None]}), redisacc.ApplyResult)
        total = acc.take_grad(1, timeout=5)
        print(total["layers"][0].sum())
        with acc.take(1) as taken:
            print(taken.gradient["emb"].indices, taken.num_accumulated)
        assert_type(acc.like(model), redisacc.TreeAccumulator)
    like = redisacc.TreeAccumulator.like(model, "like", sparse={"emb"}, worker="ann")
    assert_type(like, redisacc.TreeAccumulator)
    of_any_kind(like)


def observer(acc: redisacc.ConditionalAccumulator) -> list[str]:
    info = acc.info()
    assert_type(info, redisacc.types.AccumulatorInfo)
    late = [worker.name for worker in info.late if (info.read_at - worker.seen_at).total_seconds() > 60]
    for waiting in info.waiting:
        print(waiting.taker, waiting.num_required, waiting.lease_ends_at.isoformat())
    for taken in info.unacknowledged:
        print(taken.token, taken.granted_at)
    with acc.events(timeout=5) as events:
        for event in events:
            assert_type(event, redisacc.types.Event)
            if event.kind == "taken":
                print(event.global_step, event.who, event.details.get("taken"))
    return late


def parameters() -> None:
    with redisacc.Parameters("w", redis="redis://localhost", publisher="chief", create=True) as weights:
        weights.publish({"w": np.ones(3), "layers": [np.zeros(2), (1.0, None)]}, 0)
        weights.publish(np.ones(3), step=1, changed={".": [1]}, state={"momentum": np.zeros(3)})
        assert_type(weights.latest(), tuple[int, Any] | None)
        assert_type(weights.latest_state(), tuple[int, Any] | None)
        assert_type(weights.step(), int | None)
        try:
            step, tree = weights.wait(after=1, timeout=2.5)
            assert_type(step, int)
            print(step, tree["w"])
        except redisacc.FinishedError as error:
            print(error.step)
        except (redisacc.WaitTimeoutError, redisacc.ConflictError) as error:
            print(error)
        weights.delete()


def of_an_array(acc: redisacc.ConditionalAccumulator | redisacc.SparseConditionalAccumulator) -> str:
    return f"{acc.name} {acc.dtype} {acc.shape}"


def of_any_kind(acc: redisacc.ConditionalAccumulatorBase[Any]) -> str:
    return f"{acc.name} {acc.reduction_type} {acc.accumulator_ref} {acc.num_accumulated()}"


def failures(acc: redisacc.ConditionalAccumulator) -> None:
    try:
        acc.take_grad(2, timeout=0)
    except redisacc.TakeTimeoutError as error:
        print(error.num_accumulated, error.num_required, error.workers)
    except redisacc.WaitTimeoutError as error:
        print(error)
    except errors.RedisAccError:
        pass


def operations() -> npt.NDArray[Any]:
    handle = raw_ops.ConditionalAccumulator(dtype=np.float32, shape=[2], shared_name="w")
    raw_ops.AccumulatorApplyGradient(handle=handle, local_step=0, gradient=[1.0, 2.0])
    return raw_ops.AccumulatorTakeGradient(handle=handle, num_required=1, dtype=np.float32)


def optimizers(paths: list[str]) -> tuple[tuple[float, ...], ...]:
    def halved(step: int) -> float:
        return 0.5**step

    optimizer: redisacc.optim.Optimizer = redisacc.optim.AdamW(
        halved, weight_decay=0.1, no_decay=["*/bias"], lr_factor={"head/*": 0.1}, betas=(0.9, 0.95), clip_norm=1
    )
    groups, number = optimizer.groups(paths)
    print(groups, number, optimizer.slots, redisacc.optim.SGD(1e-3, momentum=0.9, nesterov=True, ema=0.99).name)
    assert redisacc.optim.from_config(optimizer.to_config()).state_matches(optimizer)
    return optimizer.scalars(0, 1)


def embedded() -> str:
    with Server() as server:
        client = server.client()
        acc = redisacc.ConditionalAccumulator(np.float32, redis=client)
        return acc.accumulator_ref + server.url
