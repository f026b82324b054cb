"""The parts of an upload are, byte for byte, those of the whole gradient."""

import numpy as np
from support.rows import every_row

from redisacc._arrays.encodings import encode
from redisacc._arrays.leaf_values import leaf_elements, tree_gradient
from redisacc._arrays.spec import AccumulatorSpec, described_by
from redisacc._format import buffered
from redisacc._format.keys import Keys
from redisacc._format.upload_layout import UploadLayout

SHAPES = {"a": (7,), "b": (300, 401), "c": (), "d": (0, 3), "e": (70_001,), "f": (100_003,)}


@every_row("missing", ["zero", "skip"])
@every_row("partitions", [1, 3])
@every_row("encoding", ["float32", "bfloat16", "int8"])
@every_row("others", [{}, {"b": "float64", "c": "int32"}])
def test_parts_are_those_of_the_whole_gradient(encoding, partitions, missing, others):
    dtypes = {path: others.get(path, "float32") for path in SHAPES}
    described = described_by({path: (dtypes[path], shape) for path, shape in SHAPES.items()})
    spec = AccumulatorSpec.of_tree(*described, reduction_type="MEAN", missing=missing)
    rng = np.random.default_rng(1)
    tree = {path: (rng.normal(size=shape) * 9).astype(dtypes[path]) for path, shape in SHAPES.items()}
    if missing == "skip":
        tree["e"] = None
    whole = encode(tree_gradient(spec, tree, "grad"), encoding, spec)
    keys = Keys("x", tuple(range(partitions)) if partitions > 1 else ())
    packed = buffered.pack(keys, whole)
    layout = UploadLayout(spec, encoding, partitions)
    leaves = {n: leaf_elements(leaf, tree[leaf.path], "grad") for n, leaf in enumerate(spec.leaves)}
    leaves[len(leaves)] = np.array([tree[leaf.path] is not None for leaf in spec.leaves], np.int32)
    assert layout.header == packed.header
    assert list(layout.lengths) == list(packed.lengths)
    for number, part in enumerate(packed.parts):
        some = {leaf: leaves[leaf] for leaf in layout.leaves_of[number]}
        found = layout.part(number, some)
        assert _bytes(found) == _bytes(part), number


def _bytes(part):
    return b"".join(part) if isinstance(part, tuple) else bytes(part)
