"""Fuse argmax + gather over block maxima into dspark::gumbel_combine.

Why: two launches become one where the sampler as a whole can't be fused. Hook: post-grad pre, after
`sampler_fusion`, which takes the same nodes with it.

    Before                                          After
    best  = argmax(block_max, -1, True)             token = gumbel_combine(block_max, block_argmax)
    token = gather(block_argmax, -1, best)          column = unsqueeze(token, -1)

Not matched: an index that comes from elsewhere, another dim, an index or a block_argmax that has
another reader. Other readers of block_max are fine.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.base import Fusion, erase_unread, value_of
from inductor_passes.block_choice import BLOCK_OPS, Choice, choice_is_near, find_choice
from inductor_passes.calls import HANDED_ON, Call, find_call_nodes
from inductor_passes.symbols import SizeReaders, find_size_readers


@dataclass(frozen=True)
class Plan:
    block_max: Node
    block_argmax: Node
    choice: Choice
    sizes: SizeReaders
    token: torch.Tensor  # fake


class CombineFusion(Fusion):
    name = "combine_fusion"

    def candidates(self, graph: Graph) -> list[Node]:
        return [node for node in find_call_nodes(graph, BLOCK_OPS) if choice_is_near(node)]

    def decide(self, call: Call) -> Plan:
        choice = find_choice(call, block_max_readers=True)
        block_argmax = call.results(1)[0]
        value = value_of(block_argmax, "block_argmax")
        with value.fake_mode:  # type: ignore[attr-defined]
            token = value.new_empty(value.shape[0])
        erased = [*choice.nodes, choice.gather, *choice.token_nodes()]
        erased = [node for node in erased if node is not block_argmax]
        sizes = find_size_readers(erased, [block_argmax])
        return Plan(call.results(0)[0], block_argmax, choice, sizes, token)

    def edit(self, plan: Any) -> int:
        gather = plan.choice.gather
        with gather.graph.inserting_before(gather):
            token = gather.graph.call_function(
                torch.ops.dspark.gumbel_combine.default, (plan.block_max, plan.block_argmax)
            )
        token.meta.update({key: gather.meta[key] for key in HANDED_ON if key in gather.meta})
        token.meta["val"] = plan.token
        erase_unread([*plan.sizes.replace(token), *plan.choice.replace(token)])
        return 1
