"""The optimizers: their options, their state, the numbers of a step, and what they do to each weight.

``_step`` computes its constants once, in the dtype of the leaf, and returns what runs for every block. An output may be
an input, so an input is not read after its output was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from redisacc._arrays.validation import Array, flag
from redisacc._text import shown
from redisacc.errors import InvalidArgumentError
from redisacc.optim.base import Arrays, Number, Optimizer, Rate, Scalars, Step
from redisacc.optim.kernel import decayed, lerp, mean_square, quotient
from redisacc.optim.options import betas, number

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "RMSprop", "from_config"]

MOMENTUM_BUFFER = "momentum_buffer"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MAX_EXP_AVG_SQ = "max_exp_avg_sq"
SUM = "sum"
SQUARE_AVG = "square_avg"
GRAD_AVG = "grad_avg"


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum, as torch.optim.SGD.

    With g = gradient + weight_decay * weights::

        buffer  = momentum * buffer + (1 - dampening) * g     (the first update: buffer = g)
        weights = weights - lr * buffer                       (Nesterov: weights - lr * (g + momentum * buffer))

    The numbers of a step are lr, weight_decay, and the share of the gradient in the buffer. For rows, "the first
    update" means that of the run; a row that occurs later begins with (1 - dampening) * g.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html

    Args:
        lr: see ``Optimizer``, like all options that are not listed here.
        momentum: at least 0; 0 for no buffer.
        dampening: any finite number.
        nesterov: needs momentum above 0 and no dampening.
    """

    name: ClassVar[str] = "sgd"

    lr: Rate = 1e-3
    _: KW_ONLY
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            momentum=number(self.momentum, "momentum"),
            dampening=number(self.dampening, "dampening", low=-float("inf")),
            nesterov=flag(self.nesterov, "nesterov"),
        )
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            raise InvalidArgumentError(
                f"nesterov must have a momentum above 0 and dampening=0, not {self.momentum:g} and {self.dampening:g}"
            )

    def _slots(self) -> tuple[str, ...]:
        return (MOMENTUM_BUFFER,) if self.momentum else ()

    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:
        return lr, weight_decay, 1.0 if updates == 1 else 1 - self.dampening

    def _step(self, scalars: Scalars, number: Number) -> Step:
        back, decay, share = number(-scalars[0]), number(scalars[1]), number(scalars[2])
        momentum, nesterov = number(self.momentum), self.nesterov

        def step(block: Arrays, scratch: list[Array]) -> None:
            w, g, state, out, to = block
            a, b, _ = scratch
            g = decayed(w, g, decay, a, b)
            if momentum:
                buffer = np.multiply(state[0], momentum, out=to[0])
                np.add(buffer, g if share == 1 else np.multiply(g, share, out=b), out=buffer)
                g = np.add(g, np.multiply(buffer, momentum, out=b), out=a) if nesterov else buffer
            np.multiply(g, back, out=b)
            np.add(w, b, out=out)

        return step


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as torch.optim.Adam.

    With g = gradient + weight_decay * weights and t updates so far, this one included::

        exp_avg    = exp_avg + (1 - beta1) * (g - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        weights    = weights - lr / (1 - beta1**t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2**t) + eps)

    With ``amsgrad``, the largest exp_avg_sq so far takes the place of exp_avg_sq in the last line. The numbers of a
    step are lr / (1 - beta1**t), sqrt(1 - beta2**t) and weight_decay.

    For rows, torch.optim.SparseAdam adds eps before it divides by sqrt(1 - beta2**t); this is Adam there as well.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html, from https://arxiv.org/abs/1412.6980

    Args:
        lr: see ``Optimizer``, like all options that are not listed here.
        betas: the decay rates of both averages, each in [0, 1).
        eps: at least 0.
        amsgrad: keep the largest average of squares: https://openreview.net/forum?id=ryQu7f-RZ
    """

    name: ClassVar[str] = "adam"

    lr: Rate = 1e-3
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(betas=betas(self.betas), eps=number(self.eps, "eps"), amsgrad=flag(self.amsgrad, "amsgrad"))

    def _slots(self) -> tuple[str, ...]:
        return (EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ) if self.amsgrad else (EXP_AVG, EXP_AVG_SQ)

    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:
        beta1, beta2 = self.betas
        return lr / (1 - beta1**updates), (1 - beta2**updates) ** 0.5, weight_decay

    def _step(self, scalars: Scalars, number: Number) -> Step:
        step_size, bias, decay = map(number, scalars)
        beta1, beta2 = self.betas
        eps, back = number(self.eps), -step_size
        first, second = lerp(number(1 - beta1), number), mean_square(beta2, number)
        amsgrad, decoupled = self.amsgrad, isinstance(self, AdamW)

        def step(block: Arrays, scratch: list[Array]) -> None:
            w, g, state, out, to = block
            a, b, _ = scratch
            if not decoupled:
                g = decayed(w, g, decay, a, b)
            elif decay != 1:
                w = np.multiply(w, decay, out=out)
            first(state[0], g, to[0], b)
            second(state[1], g, to[1], b)
            square = np.maximum(state[2], to[1], out=to[2]) if amsgrad else to[1]
            np.sqrt(square, out=b)
            np.divide(b, bias, out=b)
            np.add(b, eps, out=b)
            np.add(w, quotient(to[0], b, back, a), out=out)

        return step


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay does not enter the averages, as torch.optim.AdamW.

    Multiplies the weights by 1 - lr * weight_decay, then does what ``Adam`` does without weight decay. The numbers of a
    step are ``Adam``'s, with 1 - lr * weight_decay as the last.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.AdamW.html, from
    https://arxiv.org/abs/1711.05101

    Args:
        weight_decay: at least 0. For the other options, see ``Adam`` and ``Optimizer``.
    """

    name: ClassVar[str] = "adamw"

    _: KW_ONLY
    weight_decay: float = 1e-2

    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:
        step_size, bias, _ = super()._scalars(lr, weight_decay, updates)
        return step_size, bias, 1 - lr * weight_decay


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, as torch.optim.Adagrad.

    With g = gradient + weight_decay * weights and t updates so far, this one included::

        sum     = sum + g * g
        weights = weights - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps)

    The numbers of a step are lr / (1 + (t - 1) * lr_decay) and weight_decay. For rows, torch refuses weight decay; here
    it acts on the rows that occur.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.Adagrad.html, from
    https://jmlr.org/papers/v12/duchi11a.html

    Args:
        lr: see ``Optimizer``, like all options that are not listed here.
        lr_decay: at least 0.
        initial_accumulator_value: what the sum begins with, at least 0.
        eps: at least 0.
    """

    name: ClassVar[str] = "adagrad"

    lr: Rate = 1e-2
    _: KW_ONLY
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            lr_decay=number(self.lr_decay, "lr_decay"),
            initial_accumulator_value=number(self.initial_accumulator_value, "initial_accumulator_value"),
            eps=number(self.eps, "eps"),
        )

    def _slots(self) -> tuple[str, ...]:
        return (SUM,)

    def _initial_value(self, slot: str) -> float:  # noqa: ARG002
        return self.initial_accumulator_value

    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:
        return lr / (1 + (updates - 1) * self.lr_decay), weight_decay

    def _step(self, scalars: Scalars, number: Number) -> Step:
        back, decay, eps = number(-scalars[0]), number(scalars[1]), number(self.eps)

        def step(block: Arrays, scratch: list[Array]) -> None:
            w, g, state, out, to = block
            a, b, _ = scratch
            g = decayed(w, g, decay, a, b)
            np.multiply(g, g, out=b)
            np.add(state[0], b, out=to[0])
            np.sqrt(to[0], out=b)
            np.add(b, eps, out=b)
            np.add(w, quotient(g, b, back, a), out=out)

        return step


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, as torch.optim.RMSprop.

    With g = gradient + weight_decay * weights::

        square_avg = alpha * square_avg + (1 - alpha) * g * g
        weights    = weights - lr * g / (sqrt(square_avg) + eps)

    With ``centered``, grad_avg = grad_avg + (1 - alpha) * (g - grad_avg), and the root is
    sqrt(square_avg - grad_avg * grad_avg). With ``momentum``, the quotient is added to momentum * momentum_buffer,
    which is kept and takes its place. The numbers of a step are lr and weight_decay.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.RMSprop.html, from
    https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf

    Args:
        lr: see ``Optimizer``, like all options that are not listed here.
        alpha: the decay rate of the averages, in [0, 1).
        eps: at least 0.
        momentum: at least 0; 0 for no buffer.
        centered: divide by an estimate of the standard deviation instead of the root of the mean square.
    """

    name: ClassVar[str] = "rmsprop"

    lr: Rate = 1e-2
    _: KW_ONLY
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            alpha=number(self.alpha, "alpha", below=1),
            eps=number(self.eps, "eps"),
            momentum=number(self.momentum, "momentum"),
            centered=flag(self.centered, "centered"),
        )

    def _slots(self) -> tuple[str, ...]:
        more = (MOMENTUM_BUFFER,) if self.momentum else ()
        return (SQUARE_AVG, *more, GRAD_AVG) if self.centered else (SQUARE_AVG, *more)

    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:  # noqa: ARG002
        return lr, weight_decay

    def _step(self, scalars: Scalars, number: Number) -> Step:
        back, decay, eps = number(-scalars[0]), number(scalars[1]), number(self.eps)
        momentum, centered = number(self.momentum), self.centered
        square, mean = mean_square(self.alpha, number), lerp(number(1 - self.alpha), number)
        of_mean = 2 if momentum else 1

        def step(block: Arrays, scratch: list[Array]) -> None:
            w, g, state, out, to = block
            a, b, _ = scratch
            g = decayed(w, g, decay, a, b)
            square(state[0], g, to[0], b)
            if centered:
                mean(state[of_mean], g, to[of_mean], b)
                np.multiply(to[of_mean], to[of_mean], out=b)
                np.subtract(to[0], b, out=b)
                np.sqrt(b, out=b)
            else:
                np.sqrt(to[0], out=b)
            np.add(b, eps, out=b)
            if momentum:
                np.divide(g, b, out=b)
                np.multiply(state[1], momentum, out=to[1])
                np.add(to[1], b, out=to[1])
                np.multiply(to[1], back, out=b)
                np.add(w, b, out=out)
            else:
                np.add(w, quotient(g, b, back, a), out=out)

        return step


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: each weight moves by the learning rate, up or down, as in the code of its paper.

    ::

        weights = weights * (1 - lr * weight_decay) - lr * sign(beta1 * exp_avg + (1 - beta1) * gradient)
        exp_avg = beta2 * exp_avg + (1 - beta2) * gradient

    The numbers of a step are lr and 1 - lr * weight_decay. The sign of NaN is NaN, so it shows in the weights.

    Source: https://arxiv.org/abs/2302.06675

    Args:
        lr: see ``Optimizer``, like all options that are not listed here. The paper recommends a third to a tenth of the
            rate for ``AdamW``, with a weight decay that is as many times larger.
        betas: the decay rates for the direction and for the average, each in [0, 1).
    """

    name: ClassVar[str] = "lion"

    lr: Rate = 1e-4
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(betas=betas(self.betas))

    def _slots(self) -> tuple[str, ...]:
        return (EXP_AVG,)

    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:  # noqa: ARG002
        return lr, 1 - lr * weight_decay

    def _step(self, scalars: Scalars, number: Number) -> Step:
        back, shrink = number(-scalars[0]), number(scalars[1])
        beta1, beta2 = self.betas
        keep, share = number(beta1), number(1 - beta1)
        keep_longer, smaller_share = number(beta2), number(1 - beta2)
        one = number(1)
        # The largest power of two.
        huge = number(2.0 ** (np.finfo(number).maxexp - 1))

        def step(block: Arrays, scratch: list[Array]) -> None:
            w, g, state, out, to = block
            _, b, c = scratch
            if shrink != 1:
                w = np.multiply(w, shrink, out=out)
            np.multiply(state[0], keep, out=b)
            np.multiply(g, share, out=c)
            np.add(b, c, out=b)
            # The sign. np.sign takes ten times as long: these make every number but 0 at least 1, exactly.
            np.multiply(b, huge, out=b)
            np.multiply(b, huge, out=b)
            np.minimum(b, one, out=b)
            np.maximum(b, -one, out=b)
            np.multiply(b, back, out=b)
            np.add(w, b, out=out)
            np.multiply(g, smaller_share, out=c)
            np.multiply(state[0], keep_longer, out=to[0])
            np.add(to[0], c, out=to[0])

        return step


@dataclass(frozen=True)
class MeanGradient(Optimizer):
    """Makes each version the mean gradient of its step, for workers that have weights and an optimizer of their own.

    A version depends on no other one. It is 0 everywhere if every worker has skipped the step. Versions since the last
    snapshot are kept, and listed among the retired blobs.
    """

    name: ClassVar[str] = "mean"

    lr: Rate = 0.0

    def _slots(self) -> tuple[str, ...]:
        return ()

    def _scalars(self, lr: float, weight_decay: float, updates: int) -> Scalars:  # noqa: ARG002
        return (lr,)

    def _step(self, scalars: Scalars, number: Number) -> Step:  # noqa: ARG002
        return lambda block, _: np.copyto(block.out, block.gradient)


# Name → class, for configs.
BY_NAME: dict[str, type[Optimizer]] = {
    each.name: each for each in (SGD, Adam, AdamW, Adagrad, RMSprop, Lion, MeanGradient)
}


def from_config(config: object) -> Optimizer:
    """Returns the optimizer that a config describes. Everything in it is checked, because it may be anybody's.

    Args:
        config: what ``to_config`` returned, perhaps written and read as JSON or MessagePack.

    Returns:
        An equal optimizer. If ``lr`` was no number, it has a function that refuses to be called.

    Raises:
        InvalidArgumentError: this is not the config of an optimizer that this version knows, with exactly its options.
    """
    if not isinstance(config, Mapping):
        raise InvalidArgumentError(f"the config of an optimizer must be a dict, not {shown(config)}")
    name = config.get("name")
    kind = BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidArgumentError(f"the name of an optimizer must be one of {sorted(BY_NAME)}, not {shown(name)}")
    expected = {"name", *(each.name for each in fields(kind))}
    if set(config) != expected:
        raise InvalidArgumentError(
            f"the config of {name} must have the options {sorted(expected)}: it has {shown(list(config))}"
        )
    options: dict[str, Any] = {key: value for key, value in config.items() if key != "name"}
    # A text would be the name of a metric.
    options["lr"] = _unknown_schedule if options["lr"] is None else number(options["lr"], "lr")
    return kind(**options)


def _unknown_schedule(step: int) -> float:
    raise InvalidArgumentError(
        f"the learning rate of step {step} is unknown here: lr is a function, which only the chief's program has"
    )
