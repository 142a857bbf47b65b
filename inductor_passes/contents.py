"""What 1-D tensors of a graph hold, by following the writes that functionalization left of them.

    full_1 = full([6], False)                       [0, 6) False
    m_1    = slice_scatter(m, full_1, 0, 0, 6)      [0, 6) False   [6, 16) what m holds
    iota   = iota(16)                               [0, 16) 0, 1, 2, ...
    ge     = ge(iota, 6)                            [0, 6) False   [6, 16) True

A 0-d tensor counts as one of length 1, a view of a 1-D one in another shape as the same. True and
False stand for 1 and 0 where the dtype is a number; other constants are unknown, and so is all that
no rule describes.
"""

from typing import Any

import torch
from torch.fx import Node

from inductor_passes import contents_of_masks as masks
from inductor_passes import contents_of_writes as writes
from inductor_passes.calls import arguments_of
from inductor_passes.contents_of_writes import Known, Rule, length_in
from inductor_passes.segments import Contents, Kept, Unknown

aten = torch.ops.aten
prims = torch.ops.prims

_MOST_RUNS = 64


def contents_of(node: Node) -> Known:
    """The contents of ``node`` and of the nodes that they are known from."""
    needed = {node}
    pending = [node]
    while pending:
        current = pending.pop()
        if current.target in _RULES:
            sources = [x for x in current.all_input_nodes if x not in needed]
            needed.update(sources)
            pending.extend(sources)
    known: Known = {}
    for current in sorted(needed):
        contents = _contents(current, known)
        if contents is not None:
            known[current] = contents
    return known


def _contents(node: Node, known: Known) -> Contents | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    rule = _RULES.get(node.target)  # type: ignore[arg-type]
    if rule is writes.unchanged:
        contents = known.get(node.args[0])  # type: ignore[arg-type]
        if contents is not None or value.dim() > 1:
            return contents
        return Contents.of(Unknown(node), length_in(value))
    if value.dim() > 1:
        return None
    if node.op in ("placeholder", "get_attr"):
        return Contents.of(Kept(node, 0), length_in(value))
    contents = None
    if rule is not None and all(map(_is_flat, node.all_input_nodes)):
        contents = rule(node, arguments_of(node), known)
    if contents is None or len(contents.runs) > _MOST_RUNS:
        return Contents.of(Unknown(node), length_in(value))
    return contents


def _is_flat(node: Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() < 2


_RULES: dict[Any, Rule] = {
    aten.full.default: writes.full,
    prims.iota.default: writes.iota,
    aten.slice.Tensor: writes.slice_,
    aten.slice_scatter.default: writes.slice_scatter,
    aten.select.int: writes.select,
    aten.select_scatter.default: writes.select_scatter,
    aten.expand.default: writes.expand,
    aten.copy.default: writes.copy,
    prims.convert_element_type.default: writes.convert,
    aten._to_copy.default: writes.convert,
    aten.cat.default: writes.cat,
    aten.ge.Scalar: masks.compare(False, 0),
    aten.gt.Scalar: masks.compare(False, 1),
    aten.lt.Scalar: masks.compare(True, 0),
    aten.le.Scalar: masks.compare(True, 1),
    aten.logical_not.default: masks.not_,
    aten.bitwise_not.default: masks.not_,
    aten.where.self: masks.where,
    aten.logical_or.default: masks.or_,
    aten.bitwise_or.Tensor: masks.or_,
    aten.logical_and.default: masks.and_,
    aten.bitwise_and.Tensor: masks.and_,
    aten.index_put.default: masks.index_put,
    **dict.fromkeys(
        (
            aten.clone.default,
            aten.alias.default,
            aten.detach.default,
            aten.lift_fresh_copy.default,
            aten.view.default,
            aten.reshape.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
        ),
        writes.unchanged,
    ),
}
# Those of the above that compute something: a launch each.
COMPUTED = (
    *(aten.ge.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.le.Scalar),
    *(aten.logical_not.default, aten.bitwise_not.default, aten.where.self, aten.cat.default),
    *(aten.logical_or.default, aten.bitwise_or.Tensor),
    *(aten.logical_and.default, aten.bitwise_and.Tensor),
    *(prims.iota.default, prims.convert_element_type.default, aten._to_copy.default),
    aten.index_put.default,
)
