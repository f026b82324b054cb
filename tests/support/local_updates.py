"""A plain local loop that trains a model with an optimizer: what a training with updates must equal, bit for bit."""

import ml_dtypes
import numpy as np

from redisacc import IndexedSlices
from redisacc.optim.kernel import sum_of_squares, update_part


def rounded(values):
    """Returns what arrives of values of float32 that travel as bfloat16. Other dtypes travel as they are."""
    if values.dtype != np.float32:
        return values
    with np.errstate(all="ignore"):
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def gradient_of(number, step, parameters, sparse=()):
    """Returns the gradient of a worker. Any other order of addition gives other bits; some elements are -0.0.

    Of sparse leaves, it has some rows, more often the first ones; in the second step of worker 1, none.
    """
    found = {}
    for place, (path, values) in enumerate(sorted(parameters.items())):
        random = np.random.default_rng((number, step, place))
        scales = np.array([1e-3, 1.0, 1e3])[random.integers(0, 3, values.shape)]
        noise = random.standard_normal(values.shape, np.float32) * scales
        gradient = (values * 0.5 + noise).astype(values.dtype)
        gradient.reshape(-1)[:: number + 2] = -0.0
        if path in sparse:
            often = random.random(len(gradient)) < 1 / (1 + np.arange(len(gradient)) / 4)
            (rows,) = (often & ((number, step) != (1, 1))).nonzero()
            found[path] = IndexedSlices(gradient[rows], rows)
        else:
            found[path] = gradient
    return found


class LocalTraining:
    """The weights and the state of a model that is trained in memory.

    Args:
        optimizer: the optimizer.
        parameters: the weights to begin with.
        weights: the weight of the gradients of each worker.
        encoding: how the weights travel to the workers.
        encodings: how the gradients of each worker travel; None: all as they are.
        reduction_type: "MEAN" or "SUM".
        gradient: returns the gradient of a worker, given its number, the step and the parameters.
        sparse_mean: what the mean of a row divides by: "round" or "index".
    """

    def __init__(
        self,
        optimizer,
        parameters,
        *,
        weights=(1.0,),
        encoding=None,
        encodings=None,
        reduction_type="MEAN",
        gradient=gradient_of,
        sparse_mean="round",
    ):
        self.optimizer = optimizer
        # Leaves of a tree are in the order of their paths.
        self.parameters = {path: np.array(values) for path, values in sorted(parameters.items())}
        self.state = {
            slot: {path: optimizer.initial(slot, values) for path, values in self.parameters.items()}
            for slot in optimizer.slots
        }
        self.step = self.updates = 0
        self._weights = weights
        self._encoding = encoding
        self._encodings = encodings or (None,) * len(weights)
        self._is_mean = reduction_type == "MEAN"
        self._gradient = gradient
        self._by_index = self._is_mean and sparse_mean == "index"

    @property
    def sent(self):
        """The weights as workers get them."""
        return {path: rounded(v) if self._encoding == "bfloat16" else v for path, v in self.parameters.items()}

    def train(self, until, squares=None):
        """Makes all updates up to a step, and returns itself.

        Args:
            until: the step.
            squares: returns the sum of the squares of the mean, given the sums of the leaves and the divisor; None:
                that of all elements.
        """
        while self.step < until:
            self._advance(squares or _squares)
        return self

    def _advance(self, squares):
        sums = {}
        whole = 0.0
        for number, (weight, encoding) in enumerate(zip(self._weights, self._encodings, strict=True)):
            whole += weight
            for path, values in self._gradient(number, self.step, self.sent).items():
                if isinstance(values, IndexedSlices):
                    sums.setdefault(path, RowSums()).add(values, weight, encoding)
                    continue
                gradient = rounded(values) if encoding == "bfloat16" else values
                if weight != 1:
                    gradient = gradient * gradient.dtype.type(weight)
                sums[path] = sums[path] + gradient if path in sums else gradient
        is_weighted = any(weight != 1 for weight in self._weights)
        divisor = 1
        if self._is_mean:
            divisor = whole if is_weighted else len(self._weights)
        scalars = self.optimizer.scalars(self.step, self.updates + 1)
        groups, _ = self.optimizer.groups(list(self.parameters))
        if self._by_index:
            sums = {path: of.mean() if isinstance(of, RowSums) else of for path, of in sums.items()}
        clip = 1.0
        if self.optimizer.clip_norm is not None:
            clip = self.optimizer.clip_scale(squares(sums, divisor))
        for (path, values), group in zip(self.parameters.items(), groups, strict=True):
            state = [self.state[slot][path] for slot in self.optimizer.slots]
            of = sums[path]
            if not isinstance(of, RowSums):
                self._update(values, of, state, scalars[group], divisor, clip)
                continue
            for index, row in sorted(of.rows.items()):
                by = 1 if of.is_mean else divisor
                places = slice(index, index + 1)
                self._update(values[places], row, [slot[places] for slot in state], scalars[group], by, clip)
        self.step += 1
        self.updates += 1

    def _update(self, weights, gradient, state, scalars, divisor, clip):
        flat = [each.reshape(-1) for each in (weights, *state)]
        update_part(
            self.optimizer,
            flat[0],
            gradient.reshape(-1),
            flat[1:],
            scalars=scalars,
            divisor=divisor,
            clip=clip,
            out_weights=flat[0],
            out_state=flat[1:],
        )


class RowSums:
    """The sums of rows, by index."""

    def __init__(self):
        self.rows = {}
        self.counts = {}
        self.is_mean = False

    def add(self, given, weight, encoding):
        """Adds the rows of a gradient, one by one."""
        for index, values in zip(given.indices.tolist(), given.values, strict=True):
            row = rounded(values) if encoding == "bfloat16" else values
            if weight != 1:
                row = row * row.dtype.type(weight)
            self.rows[index] = self.rows[index] + row if index in self.rows else row
            self.counts[index] = self.counts.get(index, 0) + weight

    def mean(self):
        """Returns the rows divided by the weights of the gradients that held them."""
        found = RowSums()
        found.is_mean = True
        found.rows = {index: row / row.dtype.type(self.counts[index]) for index, row in self.rows.items()}
        return found

    def squares(self, divisor):
        """Returns the sum of squares of the mean."""
        if not self.rows:
            return 0.0
        every = np.stack([row for _, row in sorted(self.rows.items())])
        return sum_of_squares(every, 1 if self.is_mean else divisor)


def _squares(sums, divisor):
    total = 0.0
    for values in sums.values():
        is_rows = isinstance(values, RowSums)
        total += values.squares(divisor) if is_rows else sum_of_squares(values.reshape(-1), divisor)
    return total


def squares_by_part(model):
    """Returns a function that returns the sum of squares as updates form it: of each part, added in their order.

    Then come the tables.

    Args:
        model: the package's model of the updates, which says what the parts are.
    """

    def squares(sums, divisor):
        flat = {}
        paths = model.schema.structure.paths
        for leaf, (section, _) in zip(model.flat.layout.leaves, model.flat.places, strict=True):
            flat.setdefault(section, []).append(sums[paths[leaf]].reshape(-1))
        whole = {section: np.concatenate(leaves) for section, leaves in flat.items()}
        total = 0.0
        for runs in model.parts:
            total += model.squares([whole[section][first : first + size] for section, first, size in runs], divisor)
        for leaf in model.tables:
            total += sums[paths[leaf]].squares(divisor)
        return total

    return squares


def state_of(chief):
    """Returns the slots of what is published."""
    return {slot: leaves for slot, leaves in chief.latest_state()[1].items() if slot != "updates"}


def differences(local, parameters, state):
    """Returns which leaves and slots differ in any bit."""
    found = [path for path, values in local.parameters.items() if parameters[path].tobytes() != values.tobytes()]
    if {*state} != {*local.state}:
        found.append(f"slots {sorted(state)}")
    for slot, leaves in local.state.items():
        found += [
            f"{slot}/{path}" for path, values in leaves.items() if state[slot][path].tobytes() != values.tobytes()
        ]
    return found
