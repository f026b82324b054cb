"""Rows of the current round, and leaves of a tree, as `redisacc show` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from redisacc._admin.rows import CurrentRows, Rows
from redisacc._data.spec import Leaf
from redisacc._data.validation import Array
from redisacc._monitoring.facts import count_text, declared_shape_text, number_text
from redisacc._text import printable
from redisacc.cli.shared.output import echo_json, echo_wrapped, print_table

# Number of elements shown of each row.
ELEMENTS = 8


def leaf_facts(leaf: Leaf) -> dict[str, Any]:
    """Returns the description of a leaf for JSON."""
    return {
        "path": leaf.path,
        "kind": "sparse" if leaf.is_sparse else "dense",
        "dtype": leaf.dtype.name,
        "shape": leaf.shape,
    }


def print_leaves(leaves: Sequence[Leaf], *, as_json: bool, indent: int = 0) -> None:
    """Prints what the leaves of a tree are."""
    if as_json:
        echo_json([leaf_facts(leaf) for leaf in leaves])
        return
    print_table(
        ["PATH", "KIND", "DTYPE", "SHAPE"],
        [
            [leaf.path, "sparse" if leaf.is_sparse else "dense", leaf.dtype.name, declared_shape_text(leaf.shape)]
            for leaf in leaves
        ],
        indent=indent,
    )


def print_leaf(name: str, leaf: Leaf, rows: Rows, *, as_json: bool) -> None:
    """Prints how much of a leaf the round holds."""
    norms = _norms(rows.results)
    with np.errstate(all="ignore"):
        norm = float(np.sqrt((norms * norms).sum()))
    if as_json:
        echo_json(
            {
                "name": name,
                "leaf": leaf_facts(leaf),
                "global_step": rows.global_step,
                "num_accumulated": rows.num_accumulated,
                "num_present": rows.num_present,
                "rows": len(rows.indices),
                "norm": norm,
            }
        )
        return
    click.echo(_rows_title(name, leaf.path, rows))
    click.echo(f"  {printable(leaf.text)}")
    of = "" if not leaf.shape or leaf.shape[0] is None else f" of {leaf.shape[0]}"
    held = f"{count_text(len(rows.indices), 'row')}{of}, " if leaf.shape else ""
    click.echo(f"  {held}norm {norm:.6g}")


def _rows_title(name: str, path: str | None, rows: Rows) -> str:
    """Returns the origin of the rows: the accumulator, the leaf, and the gradients of the round."""
    title = printable(name) if path is None else f"{printable(name)}, leaf {printable(path)}"
    text = f"{title}: step {rows.global_step}, {count_text(rows.num_accumulated, 'gradient')}"
    if isinstance(rows.num_present, float):
        weight = f", with a weight of {number_text(rows.total_weight)}"
        has_all = rows.num_present == rows.total_weight
        return text + weight + ("" if has_all else f", {number_text(rows.num_present)} of it with this leaf")
    return text + (f", {rows.num_present} with this leaf" if rows.num_present < rows.num_accumulated else "")


def select_rows(current: CurrentRows, indices: Sequence[int], top: int | None, by: str) -> Rows:
    """Returns the rows that --index, or --top and --by, ask for, as far as the round holds them."""
    if indices and current.is_sparse:
        return current.some(indices)
    rows = current.all()
    if top is None:
        places = np.flatnonzero(np.isin(rows.indices, np.array(indices, np.uint64)))
    else:
        weights = rows.counts.astype(np.float64) if by == "hits" else _norms(rows.results)
        # The largest first, and among equal ones the lower index. NaN counts as the largest: it needs attention.
        weights = np.where(np.isnan(weights), np.inf, weights)
        places = np.argsort(-weights, kind="stable")[:top]
    return Rows(
        rows.indices[places],
        rows.counts[places],
        rows.sums[places],
        rows.results[places],
        rows.global_step,
        rows.num_accumulated,
        rows.num_present,
        rows.total_weight,
    )


def _norms(values: Array) -> Array:
    wide = np.abs(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64))
    with np.errstate(all="ignore"):
        norms: Array = np.sqrt((wide * wide).sum(axis=tuple(range(1, wide.ndim))))
    return norms


def print_rows(
    name: str, path: str | None, reduction_type: str, rows: Rows, wanted: Sequence[int], *, as_json: bool
) -> None:
    """Prints rows, and which of the indices that were asked for no gradient holds."""
    norms = _norms(rows.results)
    reduction = reduction_type.lower()
    if as_json:
        echo_json(
            {
                "name": name,
                **({} if path is None else {"leaf": path, "num_present": rows.num_present}),
                "global_step": rows.global_step,
                "num_accumulated": rows.num_accumulated,
                "rows": [
                    {
                        "index": rows.indices[n],
                        "count": rows.counts[n],
                        "norm": norms[n],
                        "sum": rows.sums[n],
                        **({"mean": rows.results[n]} if reduction == "mean" else {}),
                    }
                    for n in range(len(rows.indices))
                ],
            }
        )
        return
    click.echo(_rows_title(name, path, rows))
    for n, index in enumerate(rows.indices):
        click.echo(f"row {index}  in {_held_text(rows.counts[n])}  norm {norms[n]:.6g}")
        echo_wrapped(f"  sum   {_elements(rows.sums[n])}", indent=8)
        if reduction == "mean":
            echo_wrapped(f"  mean  {_elements(rows.results[n])}", indent=8)
    held = set(rows.indices.tolist())
    for index in wanted:
        if index not in held:
            click.echo(f"row {index}  in no gradient of this round")


def _held_text(count: Any) -> str:
    """Returns how many gradients held a row, or the sum of their weights."""
    if isinstance(count, (int, np.integer)):
        return count_text(int(count), "gradient")
    return f"gradients with a weight of {number_text(count)}"


def _elements(row: Array) -> str:
    flat = row.reshape(-1)
    text = " ".join(number_text(value) for value in flat[:ELEMENTS])
    return text + (f" … and {len(flat) - ELEMENTS} more" if len(flat) > ELEMENTS else "")
