"""Which sorts are candidates: near them something masks what they sort, or what they return.

A sort whose order is used for something else, a router that takes the largest of its scores or a
beam search, is none.
"""

import torch
from torch.fx import Node

from inductor_passes.base import same_shape
from inductor_passes.calls import arguments_of, is_call_to, is_getitem

aten = torch.ops.aten

SORTS = (aten.sort.default, aten.sort.stable, aten.topk.default)
MASKINGS = (aten.where.self, aten.index_put.default, aten.scatter.src, aten.scatter.value)
_NEAR_ABOVE, _NEAR_BELOW = 16, 64  # nodes looked at


def masks_what_it_sorts(sort: Node) -> bool:
    """Whether something near that is computed from ``sort`` masks its input or what it returns."""
    source = arguments_of(sort)["self"]
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    above = [source]
    for node in above:
        sources = [x for x in node.all_input_nodes if x not in above]
        above += sources if len(above) < _NEAR_ABOVE else []
    reached = [sort]
    for node in reached:
        if len(reached) < _NEAR_BELOW:
            reached += [user for user in node.users if user not in reached]
    return any(_masks(node, value, above, reached, sort) for node in reached)


def _masks(
    node: Node, like: torch.Tensor, above: list[Node], reached: list[Node], sort: Node
) -> bool:
    value = node.meta.get("val")
    if not is_call_to(node, *MASKINGS) or not isinstance(value, torch.Tensor):
        return False
    if not value.is_floating_point() or not same_shape(value.shape, like.shape):
        return False
    arguments = arguments_of(node)
    if is_call_to(node, aten.where.self):
        return any(arguments[name] in (*above, *reached) for name in ("self", "other"))
    if is_call_to(node, aten.index_put.default):
        first = arguments["indices"][0]
        by_mask = isinstance(first, Node) and first.meta["val"].dtype == torch.bool
        return by_mask and arguments["self"] in (*above, *reached)
    source = arguments.get("src")
    if arguments["self"] in above or not isinstance(source, Node):
        return arguments["self"] in above
    # All in sorted order, or what a topk returns, put back.
    is_whole = source in reached and same_shape(source.meta["val"].shape, like.shape)
    if is_call_to(source, aten.gather.default):
        return arguments_of(source)["self"] in above and source in reached
    return is_whole or (is_getitem(source) and source.args[0] is sort)
