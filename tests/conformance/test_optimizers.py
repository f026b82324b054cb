"""Optimizers do what torch's were recorded to do, step by step and bit by bit: see torch_optimizers.py."""

import base64
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from optimizer_cases import CASES, CLIPPED, DTYPES, SPARSE
from our_optimizers import distance, run, run_sparse
from support.selection import thorough

RECORDED = json.loads(gzip.decompress(Path(__file__).with_name("recorded_optimizers.json.gz").read_bytes()))

# Differences after 1,000 steps in units of epsilon, relative to the root mean square of an array. Steps of rows have
# another order of operations in torch, and its norms are sums in the dtype of the gradient.
BOUNDS = {"sparse-sgd": 0, "sparse-adagrad": 1, "sparse-adam": 32, "sgd-clipped": 16, "adam-clipped": 16}
# SparseAdam adds eps before it corrects the bias, so it moves rows less while their averages are young.
EPS_ELSEWHERE = 1e-5


def decoded(arrays, dtype):
    return [np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")) for text in arrays]


@pytest.mark.slow(keep="all|ema|decay-float32|nesterov")
@pytest.mark.parametrize("dtype", thorough(DTYPES, usual=["float32"]))
@pytest.mark.parametrize("name", CASES)
def test_every_step_has_torchs_bits(name, dtype):
    recorded = RECORDED[f"{name} {dtype}"]
    leaves, digest = run(name, dtype)
    for path, arrays in leaves.items():
        assert distance(arrays, decoded(recorded[path], dtype)) == 0, path
    assert digest == recorded["digest"]


@pytest.mark.slow(keep="float32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_by_the_global_norm(name, dtype):
    recorded = RECORDED[f"{name} {dtype}"]
    leaves, _ = run(name, dtype)
    for path, arrays in leaves.items():
        assert distance(arrays, decoded(recorded[path], dtype)) <= BOUNDS[name]


@pytest.mark.slow(keep="float32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPARSE)
def test_rows_have_lazy_state_as_in_torch(name, dtype):
    arrays = [array.reshape(-1) for array in run_sparse(name, dtype)]
    bound = BOUNDS.get(name, EPS_ELSEWHERE / np.finfo(dtype).eps)
    assert distance(arrays, decoded(RECORDED[f"{name} {dtype}"], dtype)) <= bound
