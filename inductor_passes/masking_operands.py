"""The k, i32 [B], and p, f32 [B], of the op from what the user's program has of them.

20           full([B], 20, int32)
k i64 [B]    convert(clamp_max(clamp_min(k, 1), V), int32)
0.9          full([B], 0.9, float32)
p [B, 1]     reshape(p, [-1])
p []         expand(p, [B])
1 - p        p, where ascending masses are compared with it
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.base import same_shape
from inductor_passes.calls import HANDED_ON, arguments_of, is_call_to
from inductor_passes.masking_reading import (
    CONVERTS,
    SAME_ENTRIES,
    constant_of,
    number_of,
)
from inductor_passes.masking_terms import Count, Rate
from inductor_passes.segments import at_most, equal
from inductor_passes.symbols import SizeRead, emit_sizes

aten = torch.ops.aten
prims = torch.ops.prims


def rate_of(threshold: Any, num_rows: Any) -> Rate | None:
    """``threshold``, a number or a tensor, as one for each row."""
    number = number_of(threshold)
    if isinstance(number, int | float):
        return Rate(float(number))
    if isinstance(threshold, Node) and _one_a_row(threshold, num_rows):
        return Rate(threshold)
    return None


def complement_of(rate: Rate) -> Rate:
    """1 minus ``rate``, without a subtraction where ``rate`` is itself 1 minus a tensor."""
    node = rate.source
    if not isinstance(node, Node):
        return Rate(1 - node)
    count = node.meta["val"].numel()
    node = _without_views(node)
    if is_call_to(node, aten.sub.Tensor, aten.rsub.Scalar):
        arguments = arguments_of(node)  # type: ignore[arg-type]
        one, other = arguments["self"], arguments["other"]
        if is_call_to(node, aten.rsub.Scalar):
            one, other = other, one
        if constant_of(one) == 1 and arguments["alpha"] == 1 and isinstance(other, Node):
            value = other.meta["val"]
            # A narrower float rounds 1 - p too far.
            is_fine = value.dtype in (torch.float32, torch.float64)
            if is_fine and equal(value.numel(), count):
                return Rate(other)
    return Rate(rate.source, complement=True)


def count_of(k: Any, num_rows: Any) -> Count | None:
    """``k`` as one for each row; whether every one is known to be 1 at least."""
    number = number_of(k)
    if number is not None and not isinstance(number, float):
        return Count(k, at_most(1, number))
    if not isinstance(k, Node) or not _one_a_row(k, num_rows):
        return None
    if k.meta["val"].is_floating_point() or k.meta["val"].dtype == torch.bool:
        return None
    return Count(k, _is_positive(k))


def _is_positive(node: Any) -> bool:
    while is_call_to(node, *SAME_ENTRIES, *CONVERTS, aten.clamp_max.default):
        if is_call_to(node, *CONVERTS) and node.meta["val"].dtype != torch.int64:
            return False  # a narrower one wraps
        most = number_of(node.args[1]) if is_call_to(node, aten.clamp_max.default) else 1
        if most is None or not at_most(1, most):
            return False
        node = node.args[0]
    if is_call_to(node, aten.clamp_min.default, aten.clamp.default):
        arguments = arguments_of(node)
        least, most = arguments["min"], number_of(arguments.get("max"))
        if arguments.get("max") is not None and (most is None or not at_most(1, most)):
            return False
        return type(least) is int and least >= 1
    if is_call_to(node, aten.maximum.default):
        return any(type(c) is int and c >= 1 for c in map(constant_of, node.args))
    return False


def _one_a_row(node: Node, num_rows: Any) -> bool:
    """Whether ``node`` broadcasts against [B, V] as one entry, or as one for each row."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return equal(value.numel(), 1) or same_shape(value.shape, (num_rows, 1))


def _without_views(node: Node) -> Node:
    """Where the entries of ``node``, in their order, come from."""
    count = node.meta["val"].numel()
    while is_call_to(node, *SAME_ENTRIES):
        source = node.args[0]
        if not isinstance(source, Node) or not equal(source.meta["val"].numel(), count):
            break
        node = source
    return node


@dataclass
class Operands:
    """Inserts nodes before ``anchor``, with their fake values; counts those that are kernels."""

    anchor: Node
    logits: Node
    num_rows: int | SizeRead
    launches: int = 0

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Node:
        graph = self.anchor.graph
        with graph.inserting_before(self.anchor):
            node = graph.call_function(function, args, kwargs)
        handed_on = {key: self.anchor.meta[key] for key in HANDED_ON if key in self.anchor.meta}
        with self.logits.meta["val"].fake_mode:
            values = torch.fx.map_arg((args, kwargs), lambda x: x.meta["val"])
            node.meta.update(handed_on, val=function(*values[0], **values[1]))
        return node

    def count(self, k: Any) -> Node | None:
        if k is None:
            return None
        vocab = self.logits.meta["val"].shape[1]
        value = k.meta["val"] if isinstance(k, Node) else k
        if not isinstance(value, torch.Tensor):
            if isinstance(value, int):
                return self._full(min(k, 2**31 - 1), torch.int32)
            return self._full(self.call(torch.sym_min, k, 2**31 - 1), torch.int32)
        if value.dtype not in (torch.int32, torch.int64):
            k = self._convert(k, torch.int64)
        k = _without_views(k)
        self.launches += 1
        # The first of the order is kept whatever k is. Beyond V is off, as V is.
        most = vocab if isinstance(vocab, int) else 2**31 - 1
        k = self.call(aten.clamp_max.default, self.call(aten.clamp_min.default, k, 1), most)
        return self._flat(self._convert(k, torch.int32))

    def rate(self, p: Rate | None) -> Node | None:
        if p is None:
            return None
        node = p.source
        if not isinstance(node, Node):
            return self._full(1 - node if p.complement else node, torch.float32)
        if p.complement:
            self.launches += 1
            node = self.call(aten.sub.Tensor, 1, node)
        if node.meta["val"].device != self.logits.meta["val"].device:
            # A number on the host, as a compiled float argument is, goes where it is added to.
            self.launches += 1
            return self.call(aten.add.Tensor, self._full(0.0, torch.float32), node)
        return self._flat(self._convert(node, torch.float32))

    def _full(self, value: Any, dtype: torch.dtype) -> Node:
        self.launches += 1
        device = self.logits.meta["val"].device
        shape = emit_sizes([self.num_rows], self.anchor)
        return self.call(
            aten.full.default, shape, value, dtype=dtype, device=device, pin_memory=False
        )

    def _convert(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        self.launches += 1
        return self.call(prims.convert_element_type.default, node, dtype)

    def _flat(self, node: Node) -> Node:
        node = _without_views(node)
        if node.meta["val"].dim() != 1:
            node = self.call(aten.reshape.default, node, [-1])
        num_rows = self.logits.meta["val"].shape[0]
        if equal(node.meta["val"].shape[0], num_rows):
            return node
        return self.call(aten.expand.default, node, emit_sizes([self.num_rows], self.anchor))
