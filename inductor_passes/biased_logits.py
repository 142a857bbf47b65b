"""Recognise ``base + bias`` in front of a sampler.

    logits = add(base, bias)           # base [B, V]; bias [B, V], [1, V] or [V]; in either order
    logits = convert(logits, float32)  # only where nothing is cached: sampling upcasts anyway

The fused op rounds the sum as the add does, so it must be exactly the sum that is sampled from, and
nobody else may need it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from inductor_passes.base import LeftAlone, readers, same_shape, stream_of, value_of
from inductor_passes.calls import Call, arguments_of, is_call_to
from inductor_passes.source_lines import described
from inductor_passes.storage import is_view

aten = torch.ops.aten
prims = torch.ops.prims

CONVERTS = (prims.convert_element_type.default, aten._to_copy.default)
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCATTERS = (
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.index_put.default,
    aten.index_copy.default,
    aten.scatter.src,
    aten.as_strided_scatter.default,
)


@dataclass(frozen=True)
class BiasedLogits:
    base: Node  # [B, V]
    bias: Node  # [B, V], [1, V] or [V]
    nodes: list[Node]  # the add and what follows it


def find_biased_logits(call: Call) -> BiasedLogits:
    logits = call.arguments["logits"]
    after_add = []
    if is_call_to(logits, *CONVERTS):
        _check_convert(call, logits)
        after_add = [logits]
        logits = logits.args[0]
    if not is_call_to(logits, aten.add.Tensor):
        raise LeftAlone(_why_no_add(logits))
    add = logits
    for node, reader in zip([add, *after_add], [*after_add, call.node], strict=True):
        for other in readers(node):
            if other is not reader:
                raise LeftAlone(
                    f"the biased logits ({described(add)}) are also read by {described(other)}"
                )
        if stream_of(node) != stream_of(call.node):
            raise LeftAlone(f"{described(node)} runs on another stream than the block op")
    base, bias = _operands(add)
    return BiasedLogits(base, bias, [add, *after_add])


def _check_convert(call: Call, convert: Node) -> None:
    source = value_of(convert.args[0], "the logits")
    target = value_of(convert, "the logits")
    if call.mutated:
        raise LeftAlone(
            f"the logits are converted to {target.dtype} ({described(convert)}) before the "
            "sampler, and the cache must hold what the add gives"
        )
    if target.dtype != torch.float32 or source.dtype not in LOGITS_DTYPES:
        raise LeftAlone(
            f"the logits are converted from {source.dtype} to {target.dtype} "
            f"({described(convert)}) before the sampler"
        )


def _operands(add: Node) -> tuple[Node, Node]:
    """(base, bias): the one of full shape and the other."""
    arguments = arguments_of(add)
    if arguments["alpha"] != 1:
        raise LeftAlone(f"{described(add)} scales the bias by alpha={arguments['alpha']}")
    operands = [arguments["self"], arguments["other"]]
    for operand in operands:
        value = operand.meta.get("val") if isinstance(operand, Node) else operand
        if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
            raise LeftAlone(f"{described(add)} adds the scalar {operand}, not a bias tensor")
        value_of(operand, "an operand of the add")
    total = value_of(add, "the biased logits")
    shapes = [operand.meta["val"].shape for operand in operands]
    if same_shape(shapes[0], total.shape):
        base, bias = operands
    elif same_shape(shapes[1], total.shape):
        bias, base = operands
    else:
        raise LeftAlone(
            f"no operand of {described(add)} has the full shape {_shown(total.shape)}: "
            f"{_shown(shapes[0])} and {_shown(shapes[1])} are broadcast"
        )
    _check_operand("base", base, add)
    _check_operand("bias", bias, add)
    shape = bias.meta["val"].shape
    rows_fit = len(shape) == 1 or (
        len(shape) == 2
        and (same_shape(shape[:1], total.shape[:1]) or statically_known_true(shape[0] == 1))
    )
    if not (rows_fit and same_shape(shape[-1:], total.shape[-1:])):
        raise LeftAlone(
            f"the bias of {described(add)} has shape {_shown(shape)}, not [B, V], [1, V] or [V]"
        )
    return base, bias


def _check_operand(what: str, operand: Node, add: Node) -> None:
    value = operand.meta["val"]
    if value.dtype not in LOGITS_DTYPES:
        raise LeftAlone(
            f"the {what} of {described(add)} is {value.dtype}, not a float of 16 or 32 bit"
        )
    if value.device != add.meta["val"].device:
        raise LeftAlone(f"the {what} of {described(add)} is on {value.device}")
    if value.dim() and not statically_known_true(value.shape[-1] <= 1):
        if not statically_known_true(value.stride(-1) == 1):
            raise LeftAlone(
                f"the {what} of {described(add)} is not contiguous in the vocabulary dimension: "
                f"strides {_shown(value.stride())}"
            )


def _shown(numbers: Any) -> str:
    return "[" + ", ".join(str(n) for n in numbers) + "]"


def _why_no_add(logits: Any) -> str:
    """What stands where the add should be."""
    if not isinstance(logits, Node) or logits.op == "placeholder":
        return "there is no add in front of the sampler: the logits are an input of the graph"
    source = logits
    while is_view(source) and isinstance(source.args[0], Node):
        source = source.args[0]
    if source is not logits and is_call_to(source, *_SCATTERS):
        return (
            f"the logits are read back from {described(source)}, where they are stored as well: "
            "the fused op would not store them there"
        )
    add = _add_above(logits)
    if add is not None:
        return f"{described(logits)} stands between the add ({described(add)}) and the sampler"
    return f"there is no add in front of the sampler: the logits come from {described(logits)}"


def _add_above(logits: Node) -> Node | None:
    """An add of two matrices that ``logits`` are computed from, few steps up."""
    above = [logits]
    for node in above:
        if is_call_to(node, aten.add.Tensor) and all(isinstance(a, Node) for a in node.args):
            return node
        for source in node.all_input_nodes if len(above) < 16 else ():
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dim() == 2 and source not in above:
                above.append(source)
    return None
