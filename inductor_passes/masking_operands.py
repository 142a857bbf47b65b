"""The k, i32 [B], and p, f32 [B], of the op from what the user's program has of them.

20           full([B], 20, int32)
k i64 [B]    convert(clamp(k, 1, V), int32)
0.9          full([B], 0.9, float32)
p [B, 1]     reshape(p, [-1])
p []         expand(p, [B])
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.calls import HANDED_ON
from inductor_passes.masking_terms import Rate, without_views
from inductor_passes.segments import equal
from inductor_passes.symbols import SizeRead, emit_sizes

aten = torch.ops.aten
prims = torch.ops.prims


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
        k = without_views(k)
        self.launches += 1
        # The first of the order is kept whatever k is. Beyond V is off, as V is.
        most = vocab if isinstance(vocab, int) else 2**31 - 1
        return self._flat(self._convert(self.call(aten.clamp.default, k, 1, most), torch.int32))

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
        node = without_views(node)
        if node.meta["val"].dim() != 1:
            node = self.call(aten.reshape.default, node, [-1])
        num_rows = self.logits.meta["val"].shape[0]
        if equal(node.meta["val"].shape[0], num_rows):
            return node
        return self.call(aten.expand.default, node, emit_sizes([self.num_rows], self.anchor))
