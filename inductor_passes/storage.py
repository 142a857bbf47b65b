"""Which memory a node lives in once Inductor has turned functional updates into writes in place.

Fake values of functional versions have storages of their own, so the graph is walked instead: a
view, a scatter into a tensor, the new base of a functionalized op and a clone, which Inductor may
drop, all lead back to one root.
"""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from inductor_passes.calls import Call, is_call_to, is_getitem

aten = torch.ops.aten

_SIZE_READS = (
    aten.sym_size.int,
    aten.sym_stride.int,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
)
_UPDATES = (
    "select_scatter",
    "slice_scatter",
    "diagonal_scatter",
    "as_strided_scatter",
    "index_put",
    "_unsafe_index_put",
    "index_copy",
    "index_add",
    "index_fill",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "masked_scatter",
    "clone",
    "copy_",
)


def is_view(node: Any) -> bool:
    """Whether the node's result may share memory with its first argument, unchanged."""
    if not (isinstance(node, Node) and isinstance(node.target, OpOverload)):
        return False
    schema = node.target._schema
    return (
        not schema.is_mutable
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
    )


def reads_only_sizes(node: Node) -> bool:
    return is_call_to(node, *_SIZE_READS)


def storage_root(node: Node) -> Node:
    """The node that owns the memory that ``node`` will live in."""
    while True:
        if is_getitem(node):
            producer, index = node.args
            assert isinstance(producer, Node)
            assert isinstance(index, int)
            call = Call.of(producer)
            if call is None:
                return node
            if call.mutated and index >= call.num_returns:
                node = call.bases[index - call.num_returns]
            elif is_view(producer):  # split, unbind
                node = producer
            else:
                return node
        elif is_view(node) or (
            isinstance(node.target, OpOverload)
            and node.target.namespace == "aten"
            and node.target._schema.name.removeprefix("aten::") in _UPDATES
        ):
            first = node.args[0]
            if not isinstance(first, Node):
                return node
            node = first
        else:
            return node


def write_between(first: Node, last: Node, roots: set[Node]) -> Node | None:
    """A node after ``first`` and before ``last`` that writes in place into one of ``roots``."""
    node = first.next
    while node is not last and node.op != "root":
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            if any(storage_root(argument) in roots for argument in node.all_input_nodes):
                return node
        node = node.next
    return None


def hoistable(node: Node, anchor: Node) -> list[Node] | None:
    """What must move before ``anchor`` so that ``node`` is there; None if it depends on ``anchor``.

    The graph is sorted, so only nodes after the anchor can depend on it. Nothing moves that writes,
    or that reads what is written on the way.
    """
    needed: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current is anchor:
            return None
        if current < anchor or current in needed:
            continue
        if not isinstance(current.target, OpOverload) or current.target._schema.is_mutable:
            return None
        if write_between(anchor, current, {storage_root(x) for x in current.all_input_nodes}):
            return None
        needed.add(current)
        pending.extend(current.all_input_nodes)
    return sorted(needed)
