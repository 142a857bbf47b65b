"""A number as an operand before some node: an int, one that is there, a size, or made of those.

n                    the input n
16 - s0              add(16, mul(-1, sym_size(x, 0)))      # s0 is the size of x
max(0, n)            sym_max(0, n)
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from inductor_passes.storage import reads_only_sizes
from inductor_passes.symbols import SizeRead

aten = torch.ops.aten

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


@dataclass(frozen=True)
class Operation:
    """``function(left, right)``"""

    function: Callable[..., Any]
    left: "Number"
    right: "Number"
    value: Any

    def emit_before(self, anchor: Node) -> Node:
        operands = (emit_number(self.left, anchor), emit_number(self.right, anchor))
        with anchor.graph.inserting_before(anchor):
            node = anchor.graph.call_function(self.function, operands)
        node.meta["val"] = self.value
        return node


Number = int | Node | SizeRead | Operation


def find_number(number: Any, anchor: Node) -> Number | None:
    """``number`` as an operand before ``anchor``, or None if the graph does not have it there."""
    if not isinstance(number, torch.SymInt):
        return number if isinstance(number, int) else None
    numbers: dict[Any, Number] = {}
    sizes: dict[Any, Number] = {}
    for node in anchor.graph.nodes:
        if node is anchor:
            break
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and not reads_only_sizes(node):
            numbers.setdefault(value.node.expr, node)
        elif isinstance(value, torch.Tensor) and node.op in ("placeholder", "get_attr"):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    read = SizeRead(aten.sym_size.int, node, (dim,), size)
                    sizes.setdefault(size.node.expr, read)
    return _find(number.node.expr, {**sizes, **numbers})


def _find(expr: Any, there: dict[Any, Number]) -> Number | None:
    if expr.is_Integer:
        return int(expr)
    if expr in there:
        return there[expr]
    function = _FUNCTIONS.get(type(expr).__name__)
    operands = [_find(argument, there) for argument in expr.args]
    if function is None or any(operand is None for operand in operands):
        return None

    def operation(x: Any, y: Any) -> Operation:
        return Operation(function, x, y, function(_value(x), _value(y)))

    return reduce(operation, operands)  # type: ignore[return-value]


def _value(number: Number) -> Any:
    if isinstance(number, Node):
        return number.meta["val"]
    return number if isinstance(number, int) else number.value


def emit_number(number: Number, anchor: Node) -> int | Node:
    return number if isinstance(number, (int, Node)) else number.emit_before(anchor)
