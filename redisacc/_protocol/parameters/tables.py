"""Reads tables, leaves whose gradients are rows, with the state that an optimizer keeps of them."""

from __future__ import annotations

import numpy as np

from redisacc._arrays.sums import put_rows
from redisacc._arrays.validation import Array
from redisacc._format.leaves import Schema, arrays_in
from redisacc._format.parameter_record import ParameterRecord, check_kept, is_needed, tables_of
from redisacc._protocol.parameters.update import rows_in
from redisacc._protocol.parts.fetch import fetched_blobs
from redisacc._wire.transport import Transport


def fetch_tables(
    transport: Transport, record: ParameterRecord, schema: Schema, number: int, *, weights: bool
) -> dict[int, list[Array]]:
    """Returns the arrays of each table of a version that an optimizer has made, by the number of the leaf.

    Args:
        transport: the way to the nodes.
        record: the record of the version.
        schema: the schema of the leaves.
        number: how many arrays of state there are.
        weights: whether the weights come first, as they are stored. They must not be rounded.

    Raises:
        PartMissingError: a part is not there.
        CorruptDataError: redisacc did not write a blob.
    """
    if not (number or weights):
        return {}
    manifest = record.manifest(schema)
    tables, stored = tables_of(manifest), schema.stored(record.encoding)
    kept = check_kept(record.keys, schema, manifest, number)
    shares = tables.shares(schema)
    whole_at = {leaf: blob.step for blob, leaves in shares for leaf in leaves}
    rows = [blob for blob in tables.rows if is_needed(blob, whole_at)]
    wanted = [*kept.values(), *(blob.blob(stored) for blob in rows)]
    if weights:
        wanted += [blob.blob(schema) for blob in tables.full]
    data = fetched_blobs(transport, record.keys, wanted)
    bytes_of = {blob.id: of_blob for blob, of_blob in zip(wanted, data, strict=True)}
    found: dict[int, list[Array]] = {}
    for blob, leaves in shares:
        layout = schema.layout(blob.leaves)
        every = [bytes_of[blob.id]] if weights else []
        if number:
            every += np.split(bytes_of[kept[blob.id].id], number)
        arrays = [arrays_in(schema, layout, of_array) for of_array in every]
        found.update({leaf: [array[leaf] for array in arrays] for leaf in leaves})
    for of_rows in rows:
        of_state = np.split(bytes_of[kept[of_rows.id].id], number) if number else []
        begin, where = 0, record.keys.part(of_rows.id, 0)
        for leaf, sent in rows_in(of_rows, bytes_of[of_rows.id], stored, where):
            of, count = schema.leaves[leaf], len(sent.indices)
            end = begin + count * of.row_bytes
            if whole_at[leaf] < of_rows.step:
                new = [sent.rows.reshape(-1)] if weights else []
                new += [of_array[begin:end] for of_array in of_state]
                for array, values in zip(found[leaf], new, strict=True):
                    put_rows(array, sent.indices, values.view(of.given).reshape(count, *of.shape[1:]))
            begin = end
    return found
