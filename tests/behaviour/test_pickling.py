"""A handle that is pickled or copied says what to do instead."""

import copy
import pickle

import pytest


@pytest.mark.servers("valkey")
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_handle_cannot_be_pickled(copied, open_dense, open_parameters):
    for handle in (open_dense("float32", [2]), open_parameters()):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied, .* Open it by its name in the other"):
            copied(handle)
