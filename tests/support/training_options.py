"""Options of trainings, as tests give them: one after the other, and not in groups."""

import redisacc

CHECKPOINTS = {"checkpoint_every": "every", "checkpoint_keep": "keep", "checkpoint_keep_every": "keep_every"}


def grouped(options):
    """Returns the arguments of a Chief, a Training or an Optimizer for options that are not grouped."""
    names = redisacc.types.GradientOptions.__annotations__
    gradients = {name: value for name, value in options.items() if name in names}
    checkpoints = {CHECKPOINTS[name]: value for name, value in options.items() if name in CHECKPOINTS}
    kept = {name: value for name, value in options.items() if name not in {*names, *CHECKPOINTS}}
    if gradients:
        kept["accumulator"] = gradients
    if checkpoints:
        kept["checkpoint"] = redisacc.Checkpoints(kept["checkpoint"], **checkpoints)
    return kept
