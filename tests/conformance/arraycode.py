"""Arrays as JSON: {"dtype", "shape", "hex"}, where hex is the little-endian bytes in row-major order.

Used by the driver in TensorFlow's environment and by the replay in ours, so it needs nothing but numpy (and
ml_dtypes, which both have, for bfloat16 arrays).
"""

import numpy as np

# TensorFlow's quantized types are structured numpy types with one field that bears the type's name.
QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}


def storage_dtype(name):
    """The numpy type whose bytes an array of the type `name` is made of."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(QUANTIZED.get(name, {"half": "float16"}.get(name, name)))


def encode(array):
    """The JSON form of an array; a quantized (structured) one keeps the name of its type."""
    array = np.asarray(array)
    name = array.dtype.names[0] if array.dtype.names else array.dtype.name
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": name, "shape": list(array.shape), "hex": array.tobytes().hex()}


def decode(coded):
    """The array of a JSON form; quantized types come as plain arrays of their storage type."""
    dtype = storage_dtype(coded["dtype"])
    return np.frombuffer(bytes.fromhex(coded["hex"]), dtype=dtype).reshape(coded["shape"]).copy()


def is_array(value):
    """True for the JSON form of an array."""
    return isinstance(value, dict) and "hex" in value
