"""torch tensors as gradients: dense and sparse ones in every form, and those that have no values."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from support.model import assert_same

import redisacc
from redisacc._arrays import foreign


def host(tensor):
    """Returns the array that redisacc reads."""
    return redisacc.IndexedSlices(tensor, []).values


# The dtypes of accumulators, and those that torch has quantised.
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = ["bfloat16", "float16", "float32", "float64", "complex64", "complex128", *INTEGERS]
QUANTISED = ["qint8", "qint32", "quint8"]


# Dense tensors.


def test_a_dense_tensor_is_added(open_dense_stored):
    acc = open_dense_stored("float32", [2, 3])
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    (parameter * torch.arange(6.0).reshape(2, 3)).sum().backward()
    assert acc.apply_grad(parameter.grad)
    assert acc.apply_grad(parameter)
    assert_same(acc.take_grad(2), ((np.arange(6) + 1) / 2).astype(np.float32).reshape(2, 3))


@pytest.mark.parametrize(
    "read",
    [
        lambda base: base,
        lambda base: base.requires_grad_(),
        torch.nn.Parameter,
        lambda base: base.T,
        lambda base: base[:, ::2],
        lambda base: base[1, 2],
        lambda base: base[:0],
        lambda base: base[0].expand(5, 4),
    ],
    ids=["plain", "requires_grad", "parameter", "transposed", "strided", "scalar", "empty", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_a_tensor_in_host_memory_is_not_copied(dtype, read):
    base = torch.arange(12).reshape(3, 4).to(dtype)
    tensor = read(base)
    array = host(tensor)
    assert type(array) is np.ndarray
    assert array.shape == tuple(tensor.shape)
    assert array.tolist() == tensor.tolist()
    if array.size:
        assert array.ctypes.data == tensor.data_ptr()
        with torch.no_grad():
            base.fill_(7)
        assert set(array.ravel().tolist()) == {7}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(open_dense, name):
    acc = open_dense(getattr(torch, name), [2], reduction_type="SUM")
    for _ in range(2):
        acc.apply_grad(torch.tensor([1, 2]).to(getattr(torch, name)))
    assert_same(acc.take_grad(2), np.array([2, 4], np.dtype(name)))


@pytest.mark.parametrize("name", [*DTYPES, *QUANTISED])
def test_names_of_dtypes(open_dense, name):
    assert open_dense(getattr(torch, name), [2]).dtype == open_dense(name, [2]).dtype


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex32, torch.float8_e5m2])
def test_dtypes_that_accumulators_lack(open_dense, dtype):
    with pytest.raises(redisacc.InvalidArgumentError, match=str(dtype)):
        open_dense(dtype, [2])


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_small_floats_are_those_of_ml_dtypes(open_dense, name):
    tensor = torch.tensor([0.5, -2.0, 0.0]).to(getattr(torch, name))
    array = host(tensor)
    assert array.dtype == getattr(ml_dtypes, name)
    assert array.ctypes.data == tensor.data_ptr()
    acc = open_dense("float32", [3])
    acc.apply_grad(tensor)
    assert_same(acc.take_grad(1), np.float32([0.5, -2, 0]))


def test_pending_conjugation_and_negation(open_dense):
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert tensor.is_conj()
    assert tensor.imag.is_neg()
    acc = open_dense("complex64", [2])
    acc.apply_grad(tensor)
    assert_same(acc.take_grad(1), np.complex64([1 - 2j, 3 + 4j]))
    assert host(tensor.imag).tolist() == [-2, 4]
    negative = torch._neg_view(torch.tensor([1.0, 2.0]).bfloat16())
    assert negative.is_neg()
    assert host(negative).tolist() == [-1, -2]


def test_steps_and_numbers_may_be_tensors(open_dense):
    acc = open_dense("float32", [])
    assert acc.apply_grad(torch.tensor(2.0), local_step=torch.tensor(0))
    assert acc.take_grad(torch.tensor(1)) == 2
    for wrong in (torch.tensor([0]), torch.tensor(True), torch.tensor(0.0), torch.tensor(0, device="meta")):
        with pytest.raises(redisacc.InvalidArgumentError, match="local_step"):
            acc.apply_grad(1.0, local_step=wrong)


# Dense tensors that cannot be read.


def _quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def _nested(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], **options)


def _masked():
    from torch.masked import masked_tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(torch.ones(2), torch.tensor([True, False]))


def _fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def _proxy():
    found = []
    torch.fx.symbolic_trace(lambda x: (found.append(x), x + 1)[1])
    return found[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, device="meta"), "meta device and has no values: create it on another device"),
        (_quantised, r"is quantised, .*: pass its dequantize\(\), or its int_repr\(\) if the scale is known"),
        (_nested, r"is nested: call to_padded_tensor\(\) first"),
        (lambda: _nested(layout=torch.jagged), r"is nested: call to_padded_tensor\(\) first"),
        (_masked, r"mask would be lost: call to_tensor\(\) first, with a number for what is masked"),
        (_fake, "no values"),
        (_proxy, "no values"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
        (lambda: torch.empty(2, dtype=torch.float4_e2m1fn_x2), "Float4"),
        (lambda: torch.empty(2, dtype=torch.bits8), "Bits8"),
        (lambda: torch.eye(2).to_sparse(), r"sparse.*to_dense\(\).*SparseConditionalAccumulator"),
        (lambda: torch.eye(2).to_sparse_csc(), r"sparse.*to_dense\(\).*SparseConditionalAccumulator"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse C:UserWarning")
def test_what_is_no_dense_array_of_numbers(open_dense, open_sparse, make, message):
    tensor = make()
    dense, sparse = open_dense("float32", None), open_sparse("float32", None)
    with pytest.raises(redisacc.InvalidArgumentError, match=f"^grad .*{message}"):
        dense.apply_grad(tensor)
    with pytest.raises(redisacc.InvalidArgumentError, match=f"^grad_values .*{message}"):
        sparse.apply_grad([0, 1], tensor)
    with pytest.raises(redisacc.InvalidArgumentError, match=f"^grad_indices .*{message}"):
        sparse.apply_grad(tensor, [1.0, 1.0])
    with pytest.raises(redisacc.InvalidArgumentError, match=f"^values .*{message}"):
        redisacc.IndexedSlices(tensor, [0, 1])
    assert dense.num_accumulated() == sparse.num_accumulated() == 0


@pytest.mark.parametrize(
    "transform",
    [
        torch.vmap,
        lambda function: torch.func.grad(lambda x: function(x).sum()),
        torch.func.functionalize,
        lambda function: lambda x: torch.func.jvp(function, (x,), (x,)),
        torch.func.jacrev,
    ],
    ids=["vmap", "grad", "functionalize", "jvp", "jacrev"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# torch.func.jvp compiles something of its own in a way that torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_inside_of_a_transformed_function_there_are_no_values(open_dense, transform, dtype):
    acc = open_dense("float32", None)
    refused = []

    def function(x):
        with pytest.raises(redisacc.InvalidArgumentError, match=r"^grad .* has no values"):
            acc.apply_grad(x)
        refused.append(x)
        return x * 2

    transform(function)(torch.ones(2, dtype=dtype))
    assert refused
    assert acc.num_accumulated() == 0


def test_a_tensor_of_several_processes(tmp_path):
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(
            redisacc.InvalidArgumentError,
            match=r"pass its full_tensor\(\), or its to_local\(\) to an accumulator of that shard",
        ):
            host(tensor)
        assert host(tensor.full_tensor()).tolist() == [1] * 4
    finally:
        distributed.destroy_process_group()


def test_a_gpu_is_copied_to_host_memory(open_dense):
    devices = [name for name in ("cuda", "mps", "xpu") if getattr(torch, name).is_available()]
    if not devices:
        pytest.skip("this machine has no other device")
    acc = open_dense("float32", [2])
    acc.apply_grad(torch.ones(2, device=devices[0], requires_grad=True))
    assert acc.take_grad(1).tolist() == [1, 1]


# Sparse tensors.


def test_the_gradient_of_an_embedding(open_sparse_stored):
    table = torch.nn.Embedding(10, 2, sparse=True)
    (table(torch.tensor([7, 3, 7])) * torch.tensor([[1.0], [2.0], [4.0]])).sum().backward()
    assert not table.weight.grad.is_coalesced()
    acc = open_sparse_stored("float32", [10, 2])
    acc.apply_indexed_slices_grad(table.weight.grad)
    indices, values, shape = acc.take_grad(1)
    assert indices.tolist() == [3, 7]
    assert_same(values, np.float32([[2, 2], [5, 5]]))
    assert shape.tolist() == [10, 2]


def coo(indices, values, shape, **options):
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_rows_are_not_copied(dtype, coalesced, requires_grad):
    if requires_grad and dtype is torch.int8:
        pytest.skip("gradients are floating-point numbers")
    tensor = coo([[4, 0, 1]], torch.arange(6).reshape(3, 2).to(dtype), (5, 2))
    if coalesced:
        tensor = tensor.coalesce()
    indices, values, shape = foreign.rows_of(tensor.requires_grad_(requires_grad), "grad")
    assert values.ctypes.data == tensor.detach()._values().data_ptr()
    assert indices.ctypes.data == tensor.detach()._indices().data_ptr()
    assert shape.tolist() == [5, 2]
    found = dict(zip(indices.tolist(), values.tolist(), strict=True))
    assert found == {4: [0, 1], 0: [2, 3], 1: [4, 5]}


def test_repeated_rows_are_added_up_with_all_their_digits(open_sparse_stored):
    # coalesce() would add up to 256 in bfloat16 and then stay there.
    number = 300
    tensor = coo([[3] * number], torch.ones(number, 1, dtype=torch.bfloat16), (5, 1))
    acc = open_sparse_stored("bfloat16", [5, 1])
    acc.apply_indexed_slices_grad(tensor)
    assert float(acc.take_grad(1)[1][0, 0]) == 300


LAYOUTS = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.filterwarnings("ignore:Sparse [BC]S:UserWarning")
def test_elements_become_rows(open_sparse, layout, dtype):
    dense = torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]]).to(dtype)
    name = str(dtype).removeprefix("torch.")
    acc = open_sparse(name, [4, 4])
    acc.apply_indexed_slices_grad(LAYOUTS[layout](dense))
    slices = acc.take_indexed_slices_grad(1)
    # A block holds zeros, and these are entries.
    assert slices.indices.tolist() == ([0, 1, 2, 3] if layout.startswith("bs") else [0, 2])
    assert_same(slices.to_dense(), host(dense))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.float64])
def test_repeated_elements_are_added_up_with_all_their_digits(open_sparse, dtype):
    # One by one, 2,050 would remain 2,048 in float16 and 256 in bfloat16; an eighth of it fits into the others.
    number = 2050 if dtype in (torch.bfloat16, torch.float16) else 250
    coordinates = torch.tensor([[2, 0, *[2] * number], [1, 0, *[1] * number]])
    acc = open_sparse(dtype, [3, 2])
    acc.apply_indexed_slices_grad(coo(coordinates, torch.ones(number + 2, dtype=dtype), (3, 2)))
    total = float(torch.tensor(number + 1).to(dtype))
    assert acc.take_indexed_slices_grad(1).to_dense().tolist() == [[1, 0], [0, 0], [0, total]]


def test_repeated_elements_that_are_too_much_for_their_dtype(open_sparse):
    acc = open_sparse("uint8", [3, 2])
    with pytest.raises(redisacc.InvalidArgumentError, match="holds 256"):
        acc.apply_indexed_slices_grad(coo([[2] * 256, [1] * 256], torch.ones(256, dtype=torch.uint8), (3, 2)))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (coo([[0], [2]], [1.0], (4, 2)), r"dimension 1 must be in \[0, 1\]"),
        (coo([[0]], [[1.0, 1.0]], (5, 2)), "declared shape"),
        (coo(torch.zeros((0, 1), dtype=torch.int64), [1.0], ()), "at least one sparse dimension"),
        (coo([[0]], [[1.0, 1.0]], (4, 2), device="meta"), "meta device and has no values: create it on another device"),
        (torch.ones(4, 2), "must be sparse"),
        (torch.ones(4, 2).to_mkldnn(), "must be sparse"),
    ],
)
def test_sparse_tensors_that_are_refused(open_sparse, tensor, message):
    acc = open_sparse("float32", [4, 2])
    with pytest.raises(redisacc.InvalidArgumentError, match=f"grad.*{message}"):
        acc.apply_indexed_slices_grad(tensor)
    assert acc.num_accumulated() == 0


# Leaves of trees.


def test_tensors_are_leaves_of_trees(real_server):
    model = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 2, sparse=True), "out": torch.nn.Linear(2, 1)})
    named = dict(model.named_parameters())
    model["out"](model["words"](torch.tensor([3, 1, 3]))).sum().backward()
    gradient = {name: parameter.grad for name, parameter in named.items()}
    with redisacc.TreeAccumulator.like(named, sparse=["words.weight"], redis=real_server.client()) as acc:
        assert acc.apply_grad(gradient)
        taken = acc.take_grad(1)
    assert_same(taken["out.weight"], named["out.weight"].grad.numpy())
    assert_same(taken["out.bias"], np.full(1, 3, np.float32))
    rows = taken["words.weight"]
    assert_same(rows.indices, np.array([1, 3]))
    assert_same(rows.values, named["words.weight"].grad.to_dense().numpy()[[1, 3]])
