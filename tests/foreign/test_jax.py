"""JAX arrays as gradients: dense ones, BCOO and BCSR, and those that have no values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from support.model import assert_same

import redisacc
from redisacc._arrays import foreign, validation
from redisacc._arrays.dtypes import TABLE

# Dense arrays.


def test_a_gradient_of_jax_is_added(open_dense_stored):
    acc = open_dense_stored(jnp.float32, [3])
    acc.apply_grad(jax.grad(lambda x: (x**2).sum())(jnp.arange(3.0)))
    assert_same(acc.take_grad(1), np.float32([0, 2, 4]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int8, jnp.complex64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_an_array_in_host_memory_is_not_copied(dtype, shape):
    array = jnp.full(shape, 3, dtype)
    given = validation.array(array, "grad")
    assert given.ctypes.data == array.unsafe_buffer_pointer()
    assert_same(given, np.full(shape, 3, dtype))


@pytest.mark.parametrize("name", sorted(name for name in TABLE if not name.startswith("q")))
def test_every_dtype(open_dense, name):
    with jax.enable_x64(True):
        grad = jnp.array([1, 2], name)
        acc = open_dense(grad.dtype, [2], reduction_type="SUM")
        for _ in range(2):
            acc.apply_grad(grad)
    assert_same(acc.take_grad(2), np.array([2, 4], TABLE[name].storage))


def test_dtypes_that_accumulators_lack(open_dense):
    acc = open_dense("float32", [2])
    acc.apply_grad(jnp.array([0.5, 1], jnp.float8_e4m3fn))
    assert_same(acc.take_grad(1), np.float32([0.5, 1]))
    for wrong in (jnp.ones(2, jnp.int4), jnp.ones(2, jnp.complex64), jax.random.split(jax.random.key(0), 2)):
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad must be "):
            acc.apply_grad(wrong, local_step=1)


def test_steps_may_be_arrays(open_dense):
    acc = open_dense("float32", [])
    assert acc.apply_grad(jnp.array(2.0), local_step=jnp.array(0))
    assert acc.take_grad(jnp.array(1)) == 2


def test_options_of_an_optimizer_may_be_arrays():
    optimizer = redisacc.optim.Adam(lambda step: jnp.where(step < 2, 0.5, 0.25), eps=jnp.float32(0.125))
    assert optimizer.eps == 0.125
    assert [optimizer.scalars(step, 1)[0][0] * (1 - 0.9) for step in (1, 2)] == [0.5, 0.25]


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, jax.make_jaxpr], ids=lambda f: f.__name__)
def test_inside_of_a_transformed_function_there_are_no_values(open_dense, open_sparse, transform):
    dense, rows = open_dense("float32", None), open_sparse("float32", None)
    refused = []

    def function(x):
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad .* has no values"):
            dense.apply_grad(x)
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad_values .* has no values"):
            rows.apply_grad([0], x)
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad .* has no values"):
            rows.apply_indexed_slices_grad(sparse.BCOO((x, jnp.array([[0]])), shape=(3,)))
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^local_step .* has no values"):
            dense.apply_grad(1.0, local_step=x)
        refused.append(x)
        return (x * 2).sum()

    transform(function)(jnp.ones((1, 1)) if transform is jax.vmap else jnp.ones(1))
    assert refused
    assert dense.num_accumulated() == rows.num_accumulated() == 0


def test_an_array_that_was_given_away_is_refused(open_dense):
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(redisacc.InvalidArgumentError, match="deleted"):
        open_dense("float32", None).apply_grad(array)


def test_the_shape_of_an_array_is_no_array(open_dense):
    with pytest.raises(redisacc.InvalidArgumentError, match="array of numbers"):
        open_dense("float32", None).apply_grad(jax.ShapeDtypeStruct((2,), jnp.float32))


# Sparse arrays.


WHOLE = np.float32([[0, 1, 0], [0, 0, 0], [2, 0, 3], [0, 0, 0]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_not_copied(dtype):
    array = sparse.BCOO.fromdense(jnp.array(WHOLE, dtype), n_dense=1)
    indices, values, shape = foreign.rows_of(array, "grad")
    assert indices.ctypes.data == array.indices.unsafe_buffer_pointer()
    assert values.ctypes.data == array.data.unsafe_buffer_pointer()
    assert values.dtype == dtype
    assert (indices.tolist(), shape.tolist()) == ([0, 2], [4, 3])


@pytest.mark.parametrize(
    "make",
    [
        sparse.BCOO.fromdense,
        lambda whole: sparse.BCOO.fromdense(whole, n_dense=1),
        # Padded with entries beyond the shape.
        lambda whole: sparse.BCOO.fromdense(whole, nse=7),
        lambda whole: sparse.BCOO.fromdense(whole, n_dense=1, nse=4),
        jax.jit(lambda whole: sparse.BCOO.fromdense(whole, nse=7)),
        sparse.BCSR.fromdense,
        lambda whole: sparse.BCSR.fromdense(whole, nse=7),
    ],
    ids=["elements", "rows", "padded elements", "padded rows", "jit", "BCSR", "padded BCSR"],
)
def test_sparse_arrays_are_added_as_rows(open_sparse_stored, make):
    acc = open_sparse_stored("float32", [4, 3])
    acc.apply_indexed_slices_grad(make(jnp.array(WHOLE)))
    slices = acc.take_indexed_slices_grad(1)
    assert slices.indices.tolist() == [0, 2]
    assert_same(slices.to_dense(), WHOLE)


BCOO = r"pass a BCOO, which jax\.experimental\.sparse\.BCOO\.fromdense\(\) makes"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: sparse.BCOO.fromdense(jnp.ones((4, 3)), n_batch=1),
            r"must have no batch dimensions, but has 1: call update_layout\(n_batch=0\) first",
        ),
        (lambda: sparse.BCOO((jnp.ones(1), jnp.array([[-1, 0]])), shape=(4, 3)), "dimension 0"),
        (lambda: sparse.CSR.fromdense(jnp.ones((4, 3))), BCOO),
        (lambda: sparse.COO.fromdense(jnp.ones((4, 3))), BCOO),
        (lambda: sparse.BCOO.fromdense(jnp.ones((4, 3)), n_dense=2), "at least one sparse dimension"),
        (lambda: jnp.ones((4, 3)), "must be sparse"),
    ],
)
def test_sparse_arrays_that_are_refused(open_sparse, make, message):
    acc = open_sparse("float32", [4, 3])
    with pytest.raises(redisacc.InvalidArgumentError, match=f"grad.*{message}"):
        acc.apply_indexed_slices_grad(make())
    assert acc.num_accumulated() == 0


@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR, sparse.CSR, sparse.COO], ids=lambda kind: kind.__name__)
def test_a_dense_accumulator_refuses_sparse_arrays(open_dense, kind):
    acc = open_dense("float32", [4, 3])
    with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad .*todense\(\).*SparseConditionalAccumulator"):
        acc.apply_grad(kind.fromdense(jnp.ones((4, 3))))
