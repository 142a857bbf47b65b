"""Sizes as graph operands: a node's arguments hold ints and nodes, never a bare ``SymInt``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten


@dataclass(frozen=True)
class SizeRead:
    """``op(tensor, *args)`` gives the number."""

    op: Any
    tensor: Node
    args: tuple[int, ...]
    value: Any

    def emit_before(self, anchor: Node) -> Node:
        with anchor.graph.inserting_before(anchor):
            node = anchor.graph.call_function(self.op, (self.tensor, *self.args))
        node.meta["val"] = self.value
        return node


def size_read(number: Any, tensors: Sequence[Node]) -> int | SizeRead | None:
    """``number`` as an int, or as a size, stride or offset of one of ``tensors``."""
    if isinstance(number, int):
        return number
    for tensor in tensors:
        value = tensor.meta["val"]
        known = [(aten.sym_size.int, (dim,), size) for dim, size in enumerate(value.shape)]
        known += [(aten.sym_stride.int, (dim,), s) for dim, s in enumerate(value.stride())]
        known += [(aten.sym_storage_offset.default, (), value.storage_offset())]
        for op, args, candidate in known:
            if not isinstance(candidate, int) and statically_known_true(candidate == number):
                return SizeRead(op, tensor, args, candidate)
    return None


def emit_sizes(numbers: Any, anchor: Node) -> Any:
    """``numbers`` (one or a list) with every `SizeRead` as a node before ``anchor``."""
    if isinstance(numbers, list):
        return [emit_sizes(number, anchor) for number in numbers]
    return numbers.emit_before(anchor) if isinstance(numbers, SizeRead) else numbers
