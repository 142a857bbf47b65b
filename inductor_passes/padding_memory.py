"""Whether the op can write a padding buffer where it stands in the graph, and what is gone then.

The op becomes one more write into the buffer, which Inductor does in place if nobody reads the old
contents afterwards. For those who read the new contents before the op, the fill stays.
"""

from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from inductor_passes.base import LeftAlone, value_of
from inductor_passes.calls import Call, arguments_of, is_call_to
from inductor_passes.contents_of_writes import Known
from inductor_passes.padding_fill import WRITES, Fill, Mask
from inductor_passes.segments import at_most
from inductor_passes.source_lines import described
from inductor_passes.storage import is_view, reads_only_sizes, storage_root

aten = torch.ops.aten


def check_memory(call: Call, fill: Fill, mask: Mask) -> None:
    """That the buffer is one the op can write, and has nothing to do with its other arguments."""
    buffer = fill.buffer
    assert buffer is not None
    tensor = buffer.meta["val"]
    device = value_of(call.bases[0], "the positions").device
    if tensor.device != device:
        raise LeftAlone(f"{fill.name} is on {tensor.device}, the positions are on {device}")
    if not at_most(1, tensor.stride(0)) and not at_most(tensor.shape[0], 1):
        raise LeftAlone(f"{fill.name} has entries that share their memory")
    for node in _arguments(call):
        if storage_root(node) is buffer:
            raise LeftAlone(f"{fill.name} shares its memory with an argument of the op")
    for node in buffer.graph.nodes:
        if node is not fill.write_back and any(storage_root(x) is buffer for x in _written(node)):
            raise LeftAlone(f"{fill.name} is also written by {described(node)}")
    writes = {node for node in mask.known if is_call_to(node, *WRITES)} | {fill.value}
    writes = {node for node in writes if node.all_input_nodes}  # a constant may be anybody's
    above = _ancestors(call.node)
    for write in sorted(writes & above):
        raise LeftAlone(f"an argument of the op depends on {described(write)} in {fill.name}")


def _arguments(call: Call) -> list[Node]:
    return [x for x in (*call.arguments.values(), *call.bases) if isinstance(x, Node)]


def _written(node: Node) -> Iterator[Node]:
    """What ``node`` writes, or will write once its functional form is turned into one in place."""
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        arguments = arguments_of(node)
        for argument in node.target._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = arguments[argument.name]
                values = value if isinstance(value, (list, tuple)) else (value,)
                yield from (x for x in values if isinstance(x, Node))
    elif (call := Call.of(node)) is not None:
        yield from call.bases


def _ancestors(node: Node) -> set[Node]:
    above: set[Node] = set()
    pending = [node]
    while pending:
        sources = [x for x in pending.pop().all_input_nodes if x not in above]
        above.update(sources)
        pending.extend(sources)
    return above


def is_redirected(user: Node, call: Call, fill: Fill) -> bool:
    """Whether ``user`` of the filled buffer reads what the op wrote instead."""
    # A constant that fills all of the buffer is cheaper to read than the buffer.
    is_constant = is_call_to(fill.value, aten.full.default)
    return user is fill.write_back or (call.node < user and not is_constant)


def dead_nodes(graph: Graph) -> set[Node]:
    """Pure ops whose results nobody needs: functionalization leaves views and scatters behind."""
    dead: set[Node] = set()
    for node in reversed(graph.nodes):
        if is_pure(node) and all(user in dead for user in node.users):
            dead.add(node)
    return dead


def is_pure(node: Node) -> bool:
    """Whether ``node`` may be dropped where nobody reads it."""
    return (
        isinstance(node.target, OpOverload)
        and node.target.namespace in ("aten", "prims")
        and not node.target._schema.is_mutable
        and not node.is_impure()
    )


def unread_without(call: Call, fill: Fill, known: Known, dead: set[Node]) -> set[Node]:
    """What nobody reads any more when the op writes the buffer, or reads already."""
    chain = {fill.value} | _ancestors(fill.value)
    gone: set[Node] = set()
    for node in sorted(dead):
        if any(source in chain or source in gone for source in node.all_input_nodes):
            gone.add(node)
    for node in sorted(chain, reverse=True):
        users = [user for user in node.users if user not in gone]
        if node is fill.value:
            users = [user for user in users if not is_redirected(user, call, fill)]
        if not users and _is_erasable(node, known):
            gone.add(node)
    return gone


def _is_erasable(node: Node, known: Known) -> bool:
    """What is known to hold something, a view or a number."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return node in known or is_view(node) or reads_only_sizes(node)
    return isinstance(node.meta.get("val"), torch.SymInt)


def check_readers(call: Call, fill: Fill, gone: set[Node]) -> None:
    """Nobody reads the old contents after the op: Inductor would have to copy them first."""
    assert fill.buffer is not None
    aliases = [fill.buffer]
    for alias in aliases:
        for user in alias.users:
            if user in gone or user is fill.write_back or reads_only_sizes(user):
                continue
            if is_view(user) or is_call_to(user, aten.clone.default):
                if user not in aliases:
                    aliases.append(user)
            if is_view(user) or user < call.node:
                continue
            if is_call_to(user, aten.copy.default) and user.args[1] is not alias:
                continue  # reads the shape of the other argument
            raise LeftAlone(
                f"what {fill.name} held before is read by {described(user)} after the op"
            )
