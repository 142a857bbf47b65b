"""Recognise the choice of a token among the maxima of the vocabulary blocks.

    block_max, block_argmax = <block op>(...)                   # [B, K] each
    best  = argmax(block_max, -1)                               # or max(block_max, -1)'s indices
    token = gather(block_argmax, -1, best as [B, 1])            # [B, 1]

Both fusions end in it. Every argument of every node is looked at; what differs is a reason.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_passes.base import LeftAlone, readers, same_shape, stream_of, value_of
from inductor_passes.calls import Call, arguments_of, find_call_nodes, is_call_to, is_getitem
from inductor_passes.source_lines import described
from inductor_passes.storage import is_view

aten = torch.ops.aten

BLOCK_OPS = (
    torch.ops.dspark.gumbel_block_argmax.default,
    torch.ops.dspark.gumbel_block_argmax_cache.default,
)
_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.clone.default,
)


@dataclass(frozen=True)
class Choice:
    """``gather`` holds the token, [B, 1]; ``nodes`` are all between the block op and it."""

    gather: Node
    nodes: list[Node]

    @property
    def launches(self) -> int:
        """Kernels of the eager program: argmax, gather, and the wrap of take_along_dim."""
        launching = (aten.argmax.default, aten.max.dim, aten.remainder.Scalar)
        return 1 + sum(is_call_to(node, *launching) for node in self.nodes)

    def token_nodes(self) -> list[Node]:
        """The readers of ``gather`` that are the token as [B], in the order of the graph."""
        num_rows = self.gather.meta["val"].shape[:1]
        return sorted(
            user
            for user in self.gather.users
            if (
                is_call_to(user, *_RESHAPES)
                or (is_call_to(user, aten.select.int) and arguments_of(user)["dim"] in (1, -1))
            )
            and isinstance(user.meta.get("val"), torch.Tensor)
            and same_shape(user.meta["val"].shape, num_rows)
        )

    def replace(self, token: Node) -> list[Node]:
        """Let every reader read ``token`` [B]; return what nobody needs any more."""
        nodes = [*self.nodes, self.gather]
        for node in self.token_nodes():
            node.replace_all_uses_with(token)
            nodes.append(node)
        if any(user not in nodes for user in self.gather.users):
            with self.gather.graph.inserting_after(token):
                column = self.gather.graph.call_function(aten.unsqueeze.default, (token, -1))
            column.meta = {k: v for k, v in self.gather.meta.items() if k != "eager_input_vals"}
            self.gather.replace_all_uses_with(column, delete_user_cb=lambda user: user not in nodes)
        return nodes


def is_last_dim(dim: object) -> bool:
    return dim is not None and dim in (1, -1)


def index_source(index: Node, num_blocks: object) -> tuple[Node, list[Node]]:
    """The node that chose the block, and the shape changes between it and ``index`` [B, 1]."""
    between: list[Node] = []
    while True:
        keeps_order = is_call_to(index, *_RESHAPES)
        # take_along_dim wraps its index, which is in [0, K) already.
        wraps = is_call_to(index, aten.remainder.Scalar) and statically_known_true(
            index.args[1] == num_blocks  # type: ignore[arg-type]
        )
        if not (keeps_order or wraps):
            return index, between
        between.append(index)
        index = index.args[0]  # type: ignore[assignment]


def _only_reader(node: Node, allowed: Node | None, what: str) -> None:
    for reader in readers(node):
        if reader is not allowed:
            raise LeftAlone(f"{what} also read by {described(reader)}")


def find_gather(call: Call) -> tuple[Node, list[Node]]:
    """The gather that reads ``block_argmax``, and what is between."""
    for result in call.results(1):
        for reader in readers(result):
            through = []
            if is_call_to(reader, aten.expand.default):
                through = [reader]
                following = readers(reader)
                if len(following) != 1:
                    break
                reader = following[0]
            if is_call_to(reader, aten.gather.default):
                source = arguments_of(reader)["self"]
                if source is result or source in through:
                    return reader, [result, *through]
    other = _gather_by_the_maxima(call)
    if other is not None:
        source = arguments_of(other)["self"]
        while is_call_to(source, *_RESHAPES):
            source = source.args[0]
        if is_getitem(source) and source.args[0] in find_call_nodes(call.node.graph, BLOCK_OPS):
            raise LeftAlone(
                f"two block ops share {described(other)}: it reads the other one's block_argmax"
            )
        raise LeftAlone(f"{described(other)} reads {described(source)}, not block_argmax")
    others = [described(reader) for result in call.results(1) for reader in readers(result)]
    raise LeftAlone(
        f"block_argmax is not read by a gather, but by {' and '.join(others) or 'nothing'}"
    )


def _gather_by_the_maxima(call: Call) -> Node | None:
    """A gather whose index is chosen among the maxima of ``call``."""
    reached = [reader for result in call.results(0) for reader in readers(result)]
    for node in reached:
        if is_call_to(node, aten.gather.default):
            return node
        if is_getitem(node) or is_call_to(node, *_RESHAPES, aten.argmax.default, aten.max.dim):
            reached += readers(node)
    return None


def find_choice(call: Call, block_max_readers: bool) -> Choice:
    """The choice among the maxima of ``call``, where block_max may have other readers or not."""
    if not call.has_only_getitems():
        raise LeftAlone("the results of the block op are used as a tuple")
    gather, from_argmax = find_gather(call)
    arguments = arguments_of(gather)
    block_max = call.results(0)
    if not block_max:
        raise LeftAlone("block_max is never read: the index of the gather comes from elsewhere")
    shape = value_of(block_max[0], "block_max").shape
    value_of(gather, "the token")
    if not is_last_dim(arguments["dim"]):
        raise LeftAlone(f"{described(gather)} gathers along dim {arguments['dim']}, not the last")
    index = arguments["index"]
    if not same_shape(value_of(index, "the index of the gather").shape, (shape[0], 1)):
        raise LeftAlone(f"{described(gather)} does not take one block a row")
    if not same_shape(value_of(gather.args[0], "block_argmax").shape, shape):
        raise LeftAlone(f"{described(gather)} reads an expanded block_argmax")

    chooser, between = index_source(index, shape[1])
    between = [*between, chooser]
    if is_getitem(chooser) and is_call_to(chooser.args[0], aten.max.dim):
        if chooser.args[1] != 1:
            raise LeftAlone(f"the index of {described(gather)} is a maximum, not where it is")
        chooser = chooser.args[0]  # type: ignore[assignment]
        between.append(chooser)
    if not is_call_to(chooser, aten.argmax.default, aten.max.dim):
        raise LeftAlone(
            f"the index of {described(gather)} comes from {described(chooser)}, "
            "not from the argmax of block_max"
        )
    chosen = arguments_of(chooser)
    if chosen["self"] not in block_max:
        source = chosen["self"]
        if is_getitem(source) and (other := Call.of(source.args[0])) and other.op in BLOCK_OPS:
            raise LeftAlone(
                f"two block ops share {described(gather)}: its index is chosen among the maxima of "
                "the other one"
            )
        raise LeftAlone(
            f"{described(chooser)} reads {described(source)}, not block_max: "
            "the index comes from elsewhere"
        )
    if not is_last_dim(chosen["dim"]):
        raise LeftAlone(
            f"{described(chooser)} runs over dim {chosen['dim']}, not over the blocks of a row"
        )

    if len(block_max) > 1 or len(call.results(1)) > 1:
        raise LeftAlone("block_max or block_argmax is taken from the block op twice")
    if not block_max_readers:
        _only_reader(block_max[0], chooser, "the block maxima (block_max) are")
    for node in from_argmax:
        following = from_argmax[1:] + [gather]
        _only_reader(node, following[from_argmax.index(node)], "block_argmax is")
    for node in between:
        for reader in readers(node):
            if reader is not gather and reader not in between:
                if is_getitem(reader):
                    raise LeftAlone(
                        f"the largest block maximum ({described(chooser)}) is also read by "
                        f"{described(next(iter(reader.users), reader))}"
                    )
                raise LeftAlone(
                    f"the index of the best block ({described(chooser)}) is also read by "
                    f"{described(reader)}"
                )
    nodes = [*from_argmax, *between]
    if not block_max_readers:
        nodes.append(block_max[0])
    for node in (*nodes, gather):
        if stream_of(node) != stream_of(call.node):
            raise LeftAlone(f"{described(node)} runs on another stream than the block op")
    return Choice(gather, nodes)


def choice_is_near(node: Node) -> bool:
    """Whether anybody chooses among the results of the block op ``node``."""
    choosers = (aten.argmax.default, aten.max.dim, aten.gather.default)
    reads = [read for result in node.users for read in result.users]
    reads += [after for read in reads if is_view(read) for after in read.users]
    return any(is_call_to(read, *choosers) for read in reads)
