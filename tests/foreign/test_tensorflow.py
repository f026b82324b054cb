"""TensorFlow's tensors, variables and sparse gradients, and tensors that have no values."""

import numpy as np
import pytest
import tensorflow as tf
from support.model import assert_same

import redisacc
from redisacc._arrays import foreign, validation
from redisacc._arrays.dtypes import TABLE

# Dense tensors.


def test_a_gradient_of_tensorflow_is_added(open_dense_stored):
    acc = open_dense_stored(tf.float32, tf.TensorShape([3]))
    variable = tf.Variable([0.0, 1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**2)
    acc.apply_grad(tape.gradient(loss, variable))
    assert_same(acc.take_grad(1), np.float32([0, 2, 4]))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.int64, tf.complex64])
@pytest.mark.parametrize("make", [lambda tensor: tensor, tf.Variable], ids=["tensor", "variable"])
def test_a_tensor_in_host_memory_is_not_copied(dtype, make):
    tensor = make(tf.cast(tf.reshape(tf.range(6), (2, 3)), dtype))
    first, second = validation.array(tensor, "grad"), validation.array(tensor, "grad")
    assert np.shares_memory(first, second)
    assert_same(first, tensor.numpy())


@pytest.mark.parametrize("name", sorted(name for name in TABLE if not name.startswith("q")))
def test_every_dtype(open_dense, name):
    acc = open_dense(getattr(tf, name), [2], reduction_type="SUM")
    for grad in (tf.cast([1, 2], name), tf.Variable(tf.cast([1, 2], name))):
        acc.apply_grad(grad)
    assert_same(acc.take_grad(2), np.array([2, 4], TABLE[name].storage))


def test_variables(open_dense):
    acc = open_dense("float32", [2])
    for variable in (tf.Variable([1.0, 2.0]), tf.keras.Variable([3.0, 4.0])):
        assert acc.apply_grad(variable, local_step=tf.Variable(0))
    assert_same(acc.take_grad(tf.constant(2)), np.float32([2, 3]))


def _symbols():
    found = []
    tf.function(found.append).get_concrete_function(tf.TensorSpec([2], tf.float32))
    return found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _symbols()[0], r"has no values .*: apply what the function returns"),
        (lambda: tf.keras.Input((2,)), r"has no values .*: apply what the function returns"),
        (lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]), r"is ragged: call to_tensor\(\) first"),
        (lambda: tf.constant(["a", "b"]), "array of numbers"),
        (lambda: tf.Variable(["a", "b"]), "array of numbers"),
        (lambda: tf.sparse.from_dense([1.0, 0.0]), r"tf.sparse.to_dense\(\).*SparseConditionalAccumulator"),
        (
            lambda: tf.IndexedSlices(tf.ones([1]), tf.constant([0])),
            "tf.convert_to_tensor.*SparseConditionalAccumulator",
        ),
        (lambda: tf.TensorSpec([2]), "array of numbers"),
    ],
)
def test_what_is_no_dense_array_of_numbers(open_dense, make, message):
    acc = open_dense("float32", None)
    with pytest.raises(redisacc.InvalidArgumentError, match=f"^grad .*{message}"):
        acc.apply_grad(make())
    assert acc.num_accumulated() == 0


def test_inside_of_a_tf_function_there_are_no_values(open_dense, open_sparse):
    dense, rows = open_dense("float32", None), open_sparse("float32", None)
    refused = []

    @tf.function
    def function(x):
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad .* has no values"):
            dense.apply_grad(x)
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad_indices .* has no values"):
            rows.apply_indexed_slices_grad(tf.IndexedSlices(x, tf.constant([0])))
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad .* has no values"):
            rows.apply_indexed_slices_grad(tf.sparse.from_dense(x))
        refused.append(x)
        return x

    function(tf.ones([1]))
    assert refused
    assert dense.num_accumulated() == rows.num_accumulated() == 0


# Sparse gradients.


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_the_gradient_of_an_embedding(open_sparse_stored, dtype):
    table = tf.Variable(tf.zeros([10, 2], dtype))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [7, 3, 7]) * tf.cast([[1], [2], [4]], dtype))
    gradient = tape.gradient(loss, table)
    assert isinstance(gradient, tf.IndexedSlices)
    acc = open_sparse_stored(dtype, [10, 2])
    acc.apply_indexed_slices_grad(gradient)
    indices, values, shape = acc.take_grad(1)
    assert indices.tolist() == [3, 7]
    assert_same(values, np.array([[2, 2], [5, 5]], dtype.as_numpy_dtype))
    assert shape.tolist() == [10, 2]


def test_indexed_slices_are_not_copied():
    slices = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 1]), tf.constant([5, 3]))
    rows = foreign.rows_of(slices, "grad")
    values, indices = validation.array(rows.values, "values"), validation.array(rows.indices, "indices")
    assert np.shares_memory(values, validation.array(slices.values, "values"))
    assert np.shares_memory(indices, validation.array(slices.indices, "indices"))
    ours = redisacc.IndexedSlices(slices.values, slices.indices, slices.dense_shape)
    assert ours.to_dense().sum() == 6


WHOLE = np.float32([[0, 1, 0], [0, 0, 0], [2, 0, 3], [0, 0, 0]])


def test_elements_become_rows(open_sparse_stored):
    acc = open_sparse_stored("float32", [4, 3])
    acc.apply_indexed_slices_grad(tf.sparse.from_dense(WHOLE))
    slices = acc.take_indexed_slices_grad(1)
    assert slices.indices.tolist() == [0, 2]
    assert_same(slices.to_dense(), WHOLE)


def test_gradients_that_a_session_returned(open_sparse):
    from tensorflow.python.framework.indexed_slices import IndexedSlicesValue

    acc = open_sparse("float32", [4, 3])
    slices = IndexedSlicesValue(WHOLE[[2, 0]], np.array([2, 0]), None)
    elements = tf.compat.v1.SparseTensorValue([[0, 1], [2, 0], [2, 2]], np.float32([1, 2, 3]), (4, 3))
    for gradient in (slices, elements):
        acc.apply_indexed_slices_grad(gradient)
    assert_same(acc.take_indexed_slices_grad(2).to_dense(), WHOLE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1])), "declared shape"),
        (lambda: tf.SparseTensor([[0, 3]], [1.0], [4, 3]), "dimension 1"),
        (lambda: tf.ones([4, 3]), "must be sparse"),
        (lambda: tf.Variable(tf.ones([4, 3])), "must be sparse"),
    ],
)
def test_sparse_gradients_that_are_refused(open_sparse, make, message):
    acc = open_sparse("float32", [4, 3])
    with pytest.raises(redisacc.InvalidArgumentError, match=f"grad.*{message}"):
        acc.apply_indexed_slices_grad(make())
    assert acc.num_accumulated() == 0
