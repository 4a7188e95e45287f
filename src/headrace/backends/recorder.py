"""Records a forward as a list of ops and arranges it into regions; pure Python, no native code.

A traced op is a `Node`; tensors are symbolic, their first axis is the step's tokens or the rows
asked for. `arrange` turns the list into regions that need a barrier only between them: row-wise
ops run together on their rows, linears whose inputs are ready share one region (q, k, v; gate,
up), attention stands alone. Every input of a quantised linear is quantised once, by a row-wise
node right after its producer. `assign_slots` gives tensors buffers by liveness.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["rows", "linears", "attend"]

ROW_OPS = frozenset(
    {
        "embedding",
        "rms_norm",
        "rope",
        "glu_silu",
        "glu_gelu_tanh",
        "add",
        "scale",
        "softcap",
        "take_rows",
        "quantize",
        "kv_write",
    }
)


@dataclass(frozen=True, eq=False)
class Traced:
    """A symbolic activation: `tail` is its shape after the first axis; `source` if it is a view.

    `is_rows`: the first axis is R (rows asked for) instead of T (tokens).
    """

    tail: tuple[int, ...]
    is_rows: bool = False
    source: Traced | None = None
    is_quantized: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        """(symbol, *tail)."""
        return ("R" if self.is_rows else "T", *self.tail)

    @property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.tail)

    @property
    def base(self) -> Traced:
        """The tensor that owns the buffer."""
        return self.source.base if self.source is not None else self


@dataclass(frozen=True, eq=False)
class Node:
    """One op. `weight` and `bias` are native handles; `params` are the op's own numbers."""

    op: str
    inputs: tuple[Traced, ...]
    out: Traced | None
    weight: Any = None
    bias: Any = None
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def is_rows(self) -> bool:
        """Which row axis the op runs over."""
        return self.out.is_rows if self.out is not None else False


@dataclass(frozen=True)
class Region:
    """Nodes that run without a barrier between them."""

    kind: Kind
    is_rows: bool
    nodes: tuple[Node, ...]


def add_quantize(nodes: list[Node]) -> list[Node]:
    """Insert one quantize node per tensor that a quantised linear reads; rewire the linears."""
    wanted = {
        node.inputs[0].base for node in nodes if node.op == "linear" and not node.weight.is_float
    }
    quantized: dict[Traced, Traced] = {}
    out: list[Node] = []
    for node in nodes:
        if node.op == "linear" and not node.weight.is_float:
            x = node.inputs[0].base
            node = Node(node.op, (quantized[x],), node.out, node.weight, node.bias, node.params)
        out.append(node)
        if node.out is not None and node.out.base in wanted and node.out.base not in quantized:
            x = node.out.base
            quantized[x] = Traced((x.width,), x.is_rows, is_quantized=True)
            out.append(Node("quantize", (x,), quantized[x]))
    return out


def arrange(nodes: Iterable[Node]) -> list[Region]:
    """Regions in an order that respects data flow; original order breaks ties."""
    waiting = list(nodes)
    ready: set[Traced] = set()
    regions: list[Region] = []
    while waiting:
        region = _next_region(waiting, ready)
        taken = set(map(id, region.nodes))
        waiting = [node for node in waiting if id(node) not in taken]
        ready.update(node.out.base for node in region.nodes if node.out is not None)
        # Nodes without output (kv_write) are ordered by the token tensor they name.
        ready.update(node.params["token"] for node in region.nodes if "token" in node.params)
        regions.append(region)
    return regions


def _inputs_ready(node: Node, ready: set[Traced]) -> bool:
    return all(x.base in ready for x in node.inputs)


def _next_region(waiting: list[Node], ready: set[Traced]) -> Region:
    first = next(node for node in waiting if _inputs_ready(node, ready))
    if first.op == "attend":
        return Region("attend", False, (first,))
    if first.op == "linear":
        return Region("linears", first.is_rows, _linears(first, waiting, ready))
    return Region("rows", first.is_rows, _row_ops(first, waiting, ready))


def _linears(first: Node, waiting: list[Node], ready: set[Traced]) -> tuple[Node, ...]:
    """Linears with the same row axis whose inputs are ready now: independent of each other."""
    return tuple(
        node
        for node in waiting
        if node.op == "linear" and node.is_rows == first.is_rows and _inputs_ready(node, ready)
    )


def _row_ops(first: Node, waiting: list[Node], ready: set[Traced]) -> tuple[Node, ...]:
    """Row-wise ops that need nothing but what is ready or made in this region, on the same rows.

    `take_rows` reads tokens and makes rows asked for: the axes part it from what makes its input.
    """
    here: set[Traced] = set()
    taken: list[Node] = []
    for node in waiting:
        if node.op not in ROW_OPS or node.is_rows != first.is_rows:
            continue
        if all(x.base in ready or x.base in here for x in node.inputs):
            taken.append(node)
            if node.out is not None:
                here.add(node.out.base)
            if "token" in node.params:
                here.add(node.params["token"])
    return tuple(taken)


def assign_slots(regions: list[Region], output: Traced) -> tuple[dict[Traced, int], list[Traced]]:
    """Slot of every tensor, and one tensor per slot that has its geometry.

    A slot is free again after the region of its last reader.
    """
    last_use: dict[Traced, int] = {output.base: len(regions)}
    for index, region in enumerate(regions):
        for node in region.nodes:
            for x in node.inputs:
                last_use[x.base] = max(last_use.get(x.base, 0), index)
    slots: dict[Traced, int] = {}
    geometry: list[Traced] = []
    free: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, region in enumerate(regions):
        for tensor in (node.out.base for node in region.nodes if node.out is not None):
            key = _geometry(tensor)
            if free[key]:
                slots[tensor] = free[key].pop()
            else:
                slots[tensor] = len(geometry)
                geometry.append(tensor)
        for tensor, slot in slots.items():
            if last_use.get(tensor, index) == index:
                last_use[tensor] = -1
                free[_geometry(tensor)].append(slot)
    return slots, geometry


def _geometry(tensor: Traced) -> tuple[Any, ...]:
    return (tensor.width, tensor.is_rows, tensor.is_quantized)
