"""The recorder on random forwards: data flow, barriers, grouping, and buffers that nobody shares.

A forward is replayed by a toy machine that has what the native program has: regions with a barrier
between them, inside a region rows (or linears) in any order, and one buffer per slot. Buffers hold
which tensor was last written to each row, so any reuse too early shows as the wrong tensor.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.recorder import Node, Region, Traced, add_quantize, arrange, assign_slots

NUM_TOKENS, NUM_ROWS = 3, 2
WIDTHS = (32, 64)


@dataclass(frozen=True)
class FakeWeight:
    is_float: bool


FLOAT, BLOCKS = FakeWeight(True), FakeWeight(False)


@dataclass
class Tape:
    """Appends nodes as the ops of `backends.cpu` do."""

    nodes: list[Node] = field(default_factory=list)
    num_layers: int = 0

    def op(self, name: str, *inputs: Traced, width: int = 0, **params: Any) -> Traced:
        x = inputs[0] if inputs else None
        out = Traced((width or (x.width if x else 0),), x.is_rows if x else False)
        self.nodes.append(Node(name, inputs, out, params=params))
        return out

    def linear(self, x: Traced, weight: FakeWeight, width: int) -> Traced:
        out = Traced((width,), x.is_rows)
        self.nodes.append(Node("linear", (x,), out, weight))
        return out

    def take_rows(self, x: Traced) -> Traced:
        out = Traced((x.width,), is_rows=True)
        self.nodes.append(Node("take_rows", (x,), out))
        return out

    def attention(self, q: Traced, k: Traced, v: Traced) -> Traced:
        written, out = Traced(()), Traced((q.width,))
        params = {"index": self.num_layers, "token": written}
        self.nodes.append(Node("kv_write", (k, v), None, params=params))
        self.nodes.append(Node("attend", (q, written), out))
        self.num_layers += 1
        return out


@dataclass(frozen=True)
class Recorded:
    nodes: list[Node]
    output: Traced

    @property
    def regions(self) -> list[Region]:
        return arrange(add_quantize(self.nodes))


@st.composite
def recordings(draw: st.DrawFn) -> Recorded:
    """Any forward: every op on any earlier tensors of fitting width and rows."""
    tape = Tape()
    tensors = [
        tape.op("embedding", width=w)
        for w in draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=3))
    ]
    names = [
        "scale",
        "rms_norm",
        "add",
        "glu_silu",
        "linear",
        "linear",
        "view",
        "attention",
        "take_rows",
    ]
    for name in draw(st.lists(st.sampled_from(names), max_size=24)):
        x = draw(st.sampled_from(tensors))
        fitting = [t for t in tensors if (t.width, t.is_rows) == (x.width, x.is_rows)]
        if name in ("scale", "rms_norm"):
            tensors.append(tape.op(name, x))
        elif name in ("add", "glu_silu"):
            tensors.append(tape.op(name, x, draw(st.sampled_from(fitting))))
        elif name == "linear":
            weight, width = draw(st.sampled_from([FLOAT, BLOCKS])), draw(st.sampled_from(WIDTHS))
            tensors.append(tape.linear(x, weight, width))
        elif name == "view":
            tensors.append(Traced((2, x.width // 2), x.is_rows, source=x))
        elif not x.is_rows and name == "attention":
            k, v = draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting))
            tensors.append(tape.attention(x, k, v))
        elif not x.is_rows:
            tensors.append(tape.take_rows(x))
    last = tensors[-1]
    return Recorded(tape.nodes, last if last.is_rows else tape.take_rows(last))


# ---- the toy machine


class Machine:
    """Buffers by slot: for each row, the tensor that was last written there."""

    def __init__(self, recorded: Recorded, order: random.Random) -> None:
        self.regions, self.order = recorded.regions, order
        self.slots, self.geometry = assign_slots(self.regions, recorded.output)
        self.rows: dict[tuple[int, int], Traced] = {}
        self.written: set[Traced] = set()  # what kv_write has put into the pool, row by row

    def run(self) -> None:
        for region in self.regions:
            if region.kind == "rows":
                rows = list(range(NUM_ROWS if region.is_rows else NUM_TOKENS))
                self.order.shuffle(rows)
                for row in rows:
                    for node in region.nodes:
                        self.step(node, row)
            else:
                nodes = list(region.nodes)
                self.order.shuffle(nodes)
                for node in nodes:
                    for x in node.inputs:
                        self.check_all(x)
                    assert node.out is not None
                    for row in range(NUM_ROWS if node.out.is_rows else NUM_TOKENS):
                        self.write(node.out, row)

    def step(self, node: Node, row: int) -> None:
        for x in node.inputs:
            if node.op == "take_rows":
                self.check_all(x)
            else:
                self.check(x, row)
        if node.out is not None:
            self.write(node.out, row)
        if "token" in node.params and row == NUM_TOKENS - 1:
            self.written.add(node.params["token"])

    def check_all(self, x: Traced) -> None:
        if x.tail == ():
            assert x in self.written, "attention before its keys were written"
            return
        for row in range(NUM_ROWS if x.is_rows else NUM_TOKENS):
            self.check(x, row)

    def check(self, x: Traced, row: int) -> None:
        assert self.rows.get((self.slots[x.base], row)) is x.base

    def write(self, x: Traced, row: int) -> None:
        buffer = self.geometry[self.slots[x]]
        assert (buffer.width, buffer.is_rows, buffer.is_quantized) == (
            x.width,
            x.is_rows,
            x.is_quantized,
        )
        self.rows[self.slots[x], row] = x


@settings(deadline=None, max_examples=150)
@given(recordings(), st.randoms(use_true_random=False))
def test_every_op_reads_what_was_meant_for_it(recorded: Recorded, order: random.Random) -> None:
    machine = Machine(recorded, order)
    machine.run()
    machine.check_all(recorded.output)


@settings(deadline=None, max_examples=100)
@given(recordings())
def test_no_op_is_lost_or_doubled(recorded: Recorded) -> None:
    arranged = [node for region in recorded.regions for node in region.nodes]
    kept = Counter((n.op, n.out, n.weight) for n in arranged if n.op != "quantize")
    assert kept == Counter((n.op, n.out, n.weight) for n in recorded.nodes)


@settings(deadline=None, max_examples=100)
@given(recordings())
def test_regions_hold_ops_of_one_sort(recorded: Recorded) -> None:
    for region in recorded.regions:
        ops = {node.op for node in region.nodes}
        assert {node.is_rows for node in region.nodes} == {region.is_rows}
        if region.kind == "attend":
            assert ops == {"attend"}
            assert len(region.nodes) == 1
        elif region.kind == "linears":
            assert ops == {"linear"}
        else:
            assert not ops & {"linear", "attend"}


@settings(deadline=None, max_examples=100)
@given(recordings())
def test_linears_that_could_share_a_region_do(recorded: Recorded) -> None:
    """A linear of a later region, on the same rows, read something that was not there yet."""
    ready: set[Traced] = set()
    regions = recorded.regions
    for i, region in enumerate(regions):
        if region.kind == "linears":
            later = [node for r in regions[i + 1 :] for node in r.nodes if node.op == "linear"]
            for node in later:
                is_ready = all(x.base in ready for x in node.inputs)
                assert node.is_rows != region.is_rows or not is_ready
        ready.update(node.out for node in region.nodes if node.out is not None)


@settings(deadline=None, max_examples=100)
@given(recordings())
def test_inputs_of_quantised_linears_are_quantised_once(recorded: Recorded) -> None:
    nodes = add_quantize(recorded.nodes)
    made = {node.out: node.inputs[0] for node in nodes if node.op == "quantize"}
    assert len(set(made.values())) == len(made)
    read: set[Traced] = set()
    for old, new in zip(recorded.nodes, (n for n in nodes if n.op != "quantize"), strict=True):
        if old.op == "linear" and not old.weight.is_float:
            assert new.inputs[0].is_quantized
            assert made[new.inputs[0]] is old.inputs[0].base
            read.add(new.inputs[0])
        else:
            assert new is old
    assert read == set(made), "nothing is quantised that nobody reads"


@settings(deadline=None, max_examples=100)
@given(recordings())
def test_a_slot_is_reused_only_for_its_own_geometry(recorded: Recorded) -> None:
    slots, geometry = assign_slots(recorded.regions, recorded.output)
    assert set(slots.values()) == set(range(len(geometry)))


# ---- known shapes


def decoder_layer(tape: Tape, x: Traced) -> Traced:
    h = tape.op("rms_norm", x)
    q, k, v = (tape.linear(h, BLOCKS, 64) for _ in range(3))
    mixed = tape.attention(tape.op("rope", q), tape.op("rope", k), v)
    x = tape.op("add", x, tape.linear(mixed, BLOCKS, 64))
    h = tape.op("rms_norm", x)
    gated = tape.op("glu_silu", tape.linear(h, BLOCKS, 64), tape.linear(h, FLOAT, 64))
    return tape.op("add", x, tape.linear(gated, BLOCKS, 64))


def decoder(num_layers: int) -> Recorded:
    tape = Tape()
    x = tape.op("embedding", width=64)
    for _ in range(num_layers):
        x = decoder_layer(tape, x)
    return Recorded(tape.nodes, tape.linear(tape.op("rms_norm", tape.take_rows(x)), BLOCKS, 96))


def test_a_decoder_layer_is_ten_regions() -> None:
    listed = [[node.op for node in region.nodes] for region in decoder(1).regions]
    assert listed == [
        ["embedding", "rms_norm", "quantize"],
        ["linear", "linear", "linear"],
        ["rope", "rope", "kv_write"],
        ["attend"],
        ["quantize"],
        ["linear"],
        ["add", "rms_norm", "quantize"],
        ["linear", "linear"],
        ["glu_silu", "quantize"],
        ["linear"],
        ["add"],
        ["take_rows", "rms_norm", "quantize"],
        ["linear"],
    ]
    assert len(decoder(5).regions) - len(decoder(4).regions) == 10


def test_buffers_do_not_grow_with_layers() -> None:
    sizes = [len(assign_slots(d.regions, d.output)[1]) for d in (decoder(2), decoder(12))]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("weight", [FLOAT, BLOCKS])
def test_a_view_is_quantised_as_the_tensor_behind_it(weight: FakeWeight) -> None:
    tape = Tape()
    x = tape.op("embedding", width=64)
    view = Traced((2, 32), source=Traced((4, 16), source=x))
    tape.linear(view, weight, 32)
    tape.linear(x, weight, 32)
    quantised = [node for node in add_quantize(tape.nodes) if node.op == "quantize"]
    assert [node.inputs for node in quantised] == ([] if weight.is_float else [(x,)])
