"""Recognise that the token is written into an integer buffer: the sampler can do that itself.

    draft_tokens[:, i] = token     value   = copy(select(draft_tokens, 1, i), convert(token))
                                   updated = select_scatter(draft_tokens, value, 1, i)
    draft_tokens[:n, i] = token    part    = select_scatter(slice(draft_tokens, ...), value, 1, i)
                                   updated = slice_scatter(draft_tokens, part, 0, 0, n)
    tokens.copy_(token)            copy_(tokens, token)

The update is one view of one tensor, which becomes a mutated argument of the op. What is refused
would cost a copy of the buffer or race with another argument; the write then stays as it is.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_passes.base import readers, same_shape
from inductor_passes.biased_logits import CONVERTS
from inductor_passes.calls import Call, arguments_of, is_call_to
from inductor_passes.source_lines import described
from inductor_passes.storage import hoistable, is_view, storage_root, write_between
from inductor_passes.symbols import size_read

log = logging.getLogger("inductor_passes")
aten = torch.ops.aten

_VIEW_OF_SCATTER = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
}
_ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ColumnWrite:
    base: Node  # the buffer before the update
    view: dict[
        str, Any
    ]  # the written view as arguments of auto_functionalized_v2; empty: all of it
    updated: Node  # holds the buffer after the update; a ``copy_`` writes it back
    hoist: list[Node]  # what must move in front of the op
    nodes: list[Node]  # what is gone afterwards
    launches: int

    @property
    def value(self) -> torch.Tensor | None:
        """The fake value of the buffer after the update, if it has the layout of the buffer."""
        before, after = self.base.meta["val"], self.updated.meta.get("val")
        if is_call_to(self.updated, aten.copy_.default) or not isinstance(after, torch.Tensor):
            return None
        return after if same_shape(before.stride(), after.stride()) else None

    def redirect(self, new_base: Node) -> list[Node]:
        """Let readers of the updated buffer read ``new_base``; return what nobody needs now."""
        if is_call_to(self.updated, aten.copy_.default):
            self.updated.update_arg(1, new_base)
        else:
            self.updated.replace_all_uses_with(new_base)
        return self.nodes


def find_column_write(call: Call, tokens: list[Node], arguments: list[Node]) -> ColumnWrite | None:
    """The write of one of ``tokens``, [B] each, that the op can do next to its ``arguments``."""
    for token in tokens:
        for values in _values(token, []):
            write = _whole_buffer(call, values) or _scattered(call, values)
            if write is None:
                continue
            why = _obstacle(call, write, arguments)
            if why is None:
                return write
            log.debug("the write at %s stays: %s", described(write.updated), why)
    return None


def _values(token: Node, through: list[Node]) -> Iterator[list[Node]]:
    """Chains token, convert*, copy? that carry the ids unchanged."""
    yield [*through, token]
    for user in token.users:
        value = user.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if is_call_to(user, *CONVERTS) and value.dtype in _ID_DTYPES:
            yield from _values(user, [*through, token])
        elif is_call_to(user, aten.copy.default) and user.args[1] is token:
            if same_shape(value.shape, token.meta["val"].shape) and value.dtype in _ID_DTYPES:
                yield [*through, token, user]


def _views_above(node: Any) -> list[Node]:
    above = []
    while is_view(node):
        above.append(node)
        node = node.args[0]
    return above


def _carriers(values: list[Node]) -> tuple[list[Node], int]:
    """The nodes of the chain that belong to the write alone, and their launches."""
    nodes = list(values[1:])
    launches = sum(is_call_to(node, *CONVERTS) for node in nodes)
    if is_call_to(values[-1], aten.copy.default):
        nodes += _views_above(values[-1].args[0])
    return nodes, launches


def _whole_buffer(call: Call, values: list[Node]) -> ColumnWrite | None:
    """``copy_(buffer, value)`` into an input of shape [B]."""
    value = values[-1]
    for user in value.users:
        if not (is_call_to(user, aten.copy_.default) and user.args[1] is value):
            continue
        buffer = user.args[0]
        if not (isinstance(buffer, Node) and buffer.op == "placeholder"):
            continue
        target = buffer.meta.get("val")
        if (
            isinstance(target, torch.Tensor)
            and target.dtype in _ID_DTYPES
            and same_shape(target.shape, values[0].meta["val"].shape)
        ):
            nodes, launches = _carriers(values)
            return ColumnWrite(buffer, {}, user, [], nodes, launches + 1)
    return None


def _scattered(call: Call, values: list[Node]) -> ColumnWrite | None:
    """Scatters into a view of a view of ... the buffer, innermost first."""
    scatters: list[Node] = []
    inner = values[-1]
    while True:
        following = [
            user
            for user in inner.users
            if user.target in _VIEW_OF_SCATTER and arguments_of(user)["src"] is inner
        ]
        if not following or (
            scatters and not _takes_what_is_put(scatters[-1].args[0], following[0])
        ):
            break
        if len(readers(inner)) > 1 and inner is not values[0]:
            return None
        scatters.append(following[0])
        inner = following[0]
    if not scatters:
        return None
    base = scatters[-1].args[0]
    if not isinstance(base, Node) or not isinstance(base.meta.get("val"), torch.Tensor):
        return None
    column = _written_view(scatters[0], values[-1])
    if column is None or not same_shape(column.shape, values[0].meta["val"].shape):
        return None
    sizes = [size_read(n, [call.arguments["idx_mapping"], base]) for n in column.shape]
    strides = [size_read(n, [base]) for n in column.stride()]
    offset = size_read(column.storage_offset(), [base])
    if column.dtype not in _ID_DTYPES or None in (*sizes, *strides, offset):
        return None
    view = {"_size": sizes, "_stride": strides, "_storage_offset": offset}
    nodes, launches = _carriers(values)
    nodes += scatters
    for scatter in scatters[:-1]:
        nodes += _views_above(scatter.args[0])
    return ColumnWrite(base, view, scatters[-1], [], nodes, launches + 1)


def _written_view(scatter: Node, value: Node) -> torch.Tensor | None:
    """The fake value of the part of the buffer that the innermost ``scatter`` updates."""
    if is_call_to(value, aten.copy.default) and _takes_what_is_put(value.args[0], scatter):
        written = value.args[0].meta.get("val")  # type: ignore[union-attr]
        if isinstance(written, torch.Tensor):
            return written
    options = {k: v for k, v in arguments_of(scatter).items() if k not in ("self", "src")}
    target = scatter.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(target, torch.Tensor) or any(isinstance(v, Node) for v in options.values()):
        return None
    with target.fake_mode:  # type: ignore[attr-defined]
        return _VIEW_OF_SCATTER[scatter.target](target, **options)  # type: ignore[index]


def _takes_what_is_put(view: Any, scatter: Node) -> bool:
    """Whether ``view`` is the very part of the very tensor that ``scatter`` updates."""
    if not is_call_to(view, _VIEW_OF_SCATTER[scatter.target]):  # type: ignore[index]
        return False
    taken, put = arguments_of(view), arguments_of(scatter)
    put.pop("src")
    return taken == put


def _obstacle(call: Call, write: ColumnWrite, arguments: list[Node]) -> str | None:
    # Inductor adds the offset of a view to that of an input, though it contains it already.
    if not statically_known_true(write.base.meta["val"].storage_offset() == 0):
        return "its buffer starts at an offset in its memory"
    hoist = hoistable(write.base, call.node)
    if hoist is None:
        return "its buffer depends on the sampler"
    write.hoist.extend(hoist)
    root = storage_root(write.base)
    if any(storage_root(node) is root for node in arguments):
        return "its buffer shares memory with another argument of the sampler"
    if write_between(call.node, write.updated, {root}):
        return "something else writes into its buffer in between"
    aliases = [write.base]
    for alias in aliases:
        for reader in readers(alias):
            if is_view(reader):
                aliases.append(reader)
                continue
            if reader < call.node or reader in write.nodes or reader is write.updated:
                continue
            if is_call_to(reader, aten.copy.default, aten.copy_.default) and (
                reader.args[0] is alias and reader.args[1] is not alias
            ):
                continue
            return f"the old contents are read by {described(reader)}"
    return None
