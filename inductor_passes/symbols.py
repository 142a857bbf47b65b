"""Sizes as graph operands: a node's arguments hold ints and nodes, never a bare ``SymInt``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.base import LeftAlone
from inductor_passes.source_lines import described
from inductor_passes.storage import reads_only_sizes

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
    if not isinstance(number, torch.SymInt):
        return None
    for tensor in tensors:
        value = tensor.meta["val"]
        known: list[tuple[Any, tuple[int, ...], Any]] = []
        known += [(aten.sym_size.int, (dim,), size) for dim, size in enumerate(value.shape)]
        known += [(aten.sym_stride.int, (dim,), s) for dim, s in enumerate(value.stride())]
        known += [(aten.sym_storage_offset.default, (), value.storage_offset())]
        for op, args, candidate in known:
            if isinstance(candidate, torch.SymInt) and candidate.node.expr == number.node.expr:
                return SizeRead(op, tensor, args, candidate)
    return None


def emit_sizes(numbers: Any, anchor: Node) -> Any:
    """``numbers`` (one or a list) with every `SizeRead` as a node before ``anchor``."""
    if isinstance(numbers, list):
        return [emit_sizes(number, anchor) for number in numbers]
    return numbers.emit_before(anchor) if isinstance(numbers, SizeRead) else numbers


@dataclass(frozen=True)
class SizeReaders:
    """Readers of only the sizes of nodes that a rewrite erases, and where else the sizes stand."""

    dead: list[Node]  # read by erased nodes alone
    moved: list[tuple[Node, SizeRead]]

    def replace(self, anchor: Node) -> list[Node]:
        """Read the sizes elsewhere, before ``anchor``; return what nobody needs any more."""
        for node, read in self.moved:
            node.replace_all_uses_with(read.emit_before(anchor))
        return [*self.dead, *(node for node, _ in self.moved)]


def find_size_readers(erased: Sequence[Node], kept: Sequence[Node]) -> SizeReaders:
    """``kept``: nodes whose sizes can be read instead. Raises `LeftAlone` if none has one."""
    gone = set(erased)
    found = SizeReaders([], [])
    for node in erased:
        for reader in node.users:
            if not reads_only_sizes(reader):
                continue
            if all(user in gone for user in reader.users):
                found.dead.append(reader)
                continue
            read = size_read(reader.meta.get("val"), kept)
            if not isinstance(read, SizeRead):
                raise LeftAlone(f"the shape of {described(node)} is read by {described(reader)}")
            found.moved.append((reader, read))
    return found
