"""A step that a worker makes alone."""

import numpy as np
from support.local_updates import LocalTraining, gradient_of
from support.rows import every_row

from redisacc._training.local_steps import LocalModel
from redisacc.optim import AdamW


@every_row("clip_norm", [None, 1.0])
def test_a_step_alone_has_the_bits_of_a_training_of_one_worker(clip_norm):
    optimizer = AdamW(
        lambda step: 0.01 / (step + 1), weight_decay=0.1, no_decay=["b"], lr_factor={"b": 0.5}, clip_norm=clip_norm
    )
    start = {"b": np.ones(7, np.float32), "w": np.full((40, 3), 2, np.float32)}
    known = LocalTraining(optimizer, start).train(4)
    model = LocalModel(optimizer, start)
    model.set(start)
    held = []
    for step in range(4):
        held.append((model.weights, {path: values.copy() for path, values in model.weights.items()}))
        model.update(gradient_of(0, step, model.weights), step, {})
    for path, values in known.parameters.items():
        # The sum of squares for a clipping is added up by leaves here, and by parts there.
        assert_same = np.testing.assert_array_equal if clip_norm is None else np.testing.assert_allclose
        assert_same(model.weights[path], values, **({} if clip_norm is None else {"rtol": 1e-6}))
        assert not model.weights[path].flags.writeable
    for weights, copies in held:
        for path, values in weights.items():
            np.testing.assert_array_equal(values, copies[path])
