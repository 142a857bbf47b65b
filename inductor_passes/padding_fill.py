"""Recognise that a bool buffer is filled with what padding looks like, however it is spelled.

    m[:n].fill_(False)     m_1 = slice_scatter(m, full([n], False), 0, 0, n)
    m[n:].fill_(True)      m_2 = slice_scatter(m_1, full([16 - n], True), 0, n, ...)
                           copy_(m, m_2)

Only what the buffer holds in the end counts: False up to a boundary and True from it on, in all of
it or in one part outside of which it keeps what it held.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.base import LeftAlone
from inductor_passes.calls import is_call_to, is_getitem
from inductor_passes.contents import contents_of
from inductor_passes.contents_of_writes import Known
from inductor_passes.segments import Contents, Counting, Kept, Unknown, at_least, equal
from inductor_passes.source_lines import described, where
from inductor_passes.storage import is_view, storage_root

aten = torch.ops.aten
prims = torch.ops.prims

SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)
WRITES = (*SCATTERS, aten.copy.default)

_FURTHEST = 16  # tensors looked at above a buffer


@dataclass(frozen=True)
class Fill:
    value: Node  # what the buffer holds in the end
    buffer: Node | None  # an input; None: a tensor made inside the graph
    write_back: Node | None  # copy_(buffer, value)

    @property
    def name(self) -> str:
        buffer = f" {self.buffer.name}" if self.buffer is not None else ""
        return f"the buffer{where(self.value).replace(' at ', ' written at ') or buffer}"


@dataclass(frozen=True)
class Mask:
    """False in ``[start, boundary)``, True in ``[boundary, end)`` and as before elsewhere."""

    start: Any
    boundary: Any
    end: Any
    is_whole: bool
    known: Known

    @property
    def is_constant(self) -> bool:
        return equal(self.start, self.boundary) or equal(self.boundary, self.end)


def find_fills(graph: Graph) -> list[Fill]:
    """Everything that looks like the fill of a padding buffer, whether or not it is one."""
    return [*_filled_inputs(graph), *_filled_tensors(graph)]


def _filled_inputs(graph: Graph) -> Iterator[Fill]:
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        buffer, value = copy.args[:2]
        if not (isinstance(buffer, Node) and isinstance(value, Node)):
            continue
        tensor = buffer.meta.get("val")
        if buffer.op not in ("placeholder", "get_attr") or not isinstance(tensor, torch.Tensor):
            continue
        fill = Fill(value, buffer, copy)
        if tensor.dim() == 1 and tensor.dtype is torch.bool:
            looks_like_it = _is_filled(value)
        elif tensor.dim() == 1 and tensor.dtype is torch.uint8:
            looks_like_it = _constants(contents_of(value).get(value)) == {False, True}
        else:
            looks_like_it = tensor.dtype is torch.bool and _has_both_constants(value)
        if looks_like_it:
            yield fill


def _constants(contents: Contents | None) -> set[bool]:
    runs = contents.runs if contents is not None else ()
    return {run.value for run in runs if isinstance(run.value, bool)}


def _is_filled(value: Node) -> bool:
    """Whether constants are written, or what is computed from the indices is."""
    pending = [value]
    for node in pending:
        if len(pending) > _FURTHEST:
            break
        contents = contents_of(node).get(node)
        if contents is None:
            pending += [x for x in _put_together(node) if x not in pending]
        for run in contents.runs if contents is not None else ():
            if isinstance(run.value, (bool, Counting)):
                return True
            if isinstance(run.value, Unknown):
                if is_call_to(run.value.node, aten.full.default, prims.iota.default):
                    return True
                pending += [x for x in _put_together(run.value.node) if x not in pending]
    return False


def _put_together(node: Node) -> list[Node]:
    """What ``node`` takes its elements from. A scalar tells nothing of where it is put."""
    sources = []
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if value.dim() == 1 or is_view(node) or is_call_to(node, *WRITES):
            sources.append(source)
    return sources


def _has_both_constants(value: Node) -> bool:
    """Of a tensor with other than one dim, whose contents are not followed."""
    pending, constants = [value], set()
    for node in pending:
        if is_call_to(node, aten.full.default):
            constants.add(node.args[1])
        elif is_call_to(node, *WRITES, aten.slice.Tensor, aten.select.int, aten.expand.default):
            pending += [source for source in node.all_input_nodes if source not in pending]
    return constants >= {False, True}


def _filled_tensors(graph: Graph) -> Iterator[Fill]:
    """Tensors that start their life in the graph."""
    for target in SCATTERS:
        for node in graph.find_nodes(op="call_function", target=target):
            tensor = node.meta.get("val")
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.bool:
                continue
            goes_on = (aten.copy_.default, aten.slice.Tensor, *SCATTERS)
            if tensor.dim() != 1 or not node.users:
                continue
            if any(is_call_to(user, *goes_on) for user in node.users):
                continue
            if storage_root(node).op != "call_function":
                continue  # an input that is half filled
            values = [run.value for run in contents_of(node)[node].runs]
            if len(values) == 2 and values[0] is False and values[1] is True:
                yield Fill(node, None, None)


def find_mask(fill: Fill) -> Mask:
    """Prove what the buffer holds."""
    if fill.buffer is None:
        raise LeftAlone(f"{fill.name} is made inside the graph: it is no input that is written")
    tensor = fill.buffer.meta["val"]
    if tensor.dtype is not torch.bool:
        raise LeftAlone(f"{fill.name} is {tensor.dtype}, not bool")
    if tensor.dim() != 1:
        raise LeftAlone(f"{fill.name} has {tensor.dim()} dims, not one")
    known = contents_of(fill.value)
    if fill.value not in known:
        raise LeftAlone(f"the shape of {fill.name} is not known to the compiler here")
    runs = known[fill.value].runs
    kinds = "".join(_kind(run.value, fill) for run in runs)
    if not re.fullmatch("k?(f|t|ft)k?", kinds):
        raise LeftAlone(f"{fill.name} " + _why_no_padding(kinds))
    length = tensor.shape[0]
    ends = [run.end for run in runs]
    start = ends[0] if kinds.startswith("k") else 0
    boundary = ends[kinds.index("f")] if "f" in kinds else start
    boundary = at_least(boundary, start)
    end = length
    if kinds.endswith("k"):
        end = at_least(ends[-2], boundary)
    is_whole = "k" not in kinds
    return Mask(start, boundary, end, is_whole, known)


def _kind(value: Any, fill: Fill) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, Kept) and value.source is fill.buffer and equal(value.offset, 0):
        return "k"
    if isinstance(value, Kept):
        raise LeftAlone(f"{fill.name} holds what is copied from {described(value.source)}")
    if isinstance(value, Unknown):
        if is_call_to(value.node, aten.as_strided_scatter.default):
            raise LeftAlone(f"{fill.name} shares its memory with another input")
        node = value.node.args[0] if is_getitem(value.node) else value.node
        assert isinstance(node, Node)
        raise LeftAlone(f"what {fill.name} holds can't be proven: it comes from {described(node)}")
    raise LeftAlone(f"what {fill.name} holds can't be proven")


def _why_no_padding(kinds: str) -> str:
    if kinds.strip("k") == "tf":
        return "is True below the boundary and False from it on, the opposite of padding"
    if "fkt" in kinds:
        return "keeps what it held between the False and the True part"
    return "changes between False and True more than once"
