"""One view of an op call, however functionalization spelled it.

A pure op is a plain node. A mutating op is wrapped, and its results are the op's returns followed
by one new value for each mutated base:

    plain   op(*args, **kwargs)
    v1      auto_functionalized(op, **all_arguments)
    v2      auto_functionalized_v2(op, **pure_arguments,
                                   _x_base_index=0, _x_<view>=..., _all_bases=[...])

`Call.of` reads all three, `emit` writes them: a rewrite may change op, arguments and number of
returns without knowing which one it has. The description of a mutated view is carried over unread.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import OpOverload
from torch._prims_common import clone_preserve_strides
from torch.fx import Graph, Node

PLAIN, V1, V2 = "plain", "v1", "v2"
_FORMS = {auto_functionalized: V1, auto_functionalized_v2: V2}
HANDED_ON = ("stack_trace", "custom", "nn_module_stack", "source_fn_stack", "seq_nr")


def bind(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of the schema by name, defaults filled in."""
    bound = {}
    for index, argument in enumerate(op._schema.arguments):
        if index < len(args):
            bound[argument.name] = args[index]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound


def arguments_of(node: Node) -> dict[str, Any]:
    assert isinstance(node.target, OpOverload)
    return bind(node.target, node.args, node.kwargs)


def is_call_to(node: Any, *ops: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in ops


@dataclass(frozen=True)
class Mutated:
    """A mutated argument: a view of ``bases[base]``; ``view`` maps e.g. ``_size`` to its value."""

    base: int
    view: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    node: Node
    op: OpOverload
    form: str
    arguments: dict[str, Any]  # those that are not mutated
    mutated: dict[str, Mutated]
    bases: list[Node]

    @staticmethod
    def of(node: Node) -> "Call | None":
        """The call that ``node`` is, or None if it is no call of an op or one spelled otherwise."""
        if node.op != "call_function":
            return None
        if isinstance(node.target, OpOverload):
            return Call(node, node.target, PLAIN, arguments_of(node), {}, [])
        form = _FORMS.get(node.target)  # type: ignore[call-overload]
        if form is None or not isinstance(node.args[0], OpOverload):
            return None
        op = node.args[0]
        written = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
        pure = {
            a.name: node.kwargs.get(a.name, a.default_value)
            for a in op._schema.arguments
            if a.name not in written
        }
        mutated: dict[str, Mutated] = {}
        bases: list[Any] = []
        if form == V1:
            for name in written:
                base = node.kwargs[name]
                if not isinstance(base, Node):
                    return None
                mutated[name] = Mutated(len(bases))
                bases.append(base)
        else:
            bases = list(node.kwargs["_all_bases"])  # type: ignore[arg-type]
            for name in written:
                prefix = f"_{name}_"
                view: dict[str, Any] = {
                    key.removeprefix(f"_{name}"): value
                    for key, value in node.kwargs.items()
                    if key.startswith(prefix)
                }
                base_index = view.pop("_base_index", None)
                if base_index is None:
                    return None
                mutated[name] = Mutated(base_index, view)
        return Call(node, op, form, pure, mutated, bases)

    @property
    def num_returns(self) -> int:
        return max(1, len(self.op._schema.returns))

    @property
    def is_functional(self) -> bool:
        return self.form != PLAIN or not self.op._schema.is_mutable

    def results(self, index: int) -> list[Node]:
        """The nodes that hold return ``index``."""
        if self.form == PLAIN and len(self.op._schema.returns) == 1:
            return [self.node]
        return [u for u in self.node.users if is_getitem(u) and u.args[1] == index]

    def new_bases(self, base: int) -> list[Node]:
        """The nodes that hold the new value of ``bases[base]``."""
        if self.form == PLAIN:
            return []
        return self.results(self.num_returns + base)

    def has_only_getitems(self) -> bool:
        return all(is_getitem(user) for user in self.node.users)


def is_getitem(node: Node) -> bool:
    return is_call_to(node, operator.getitem)


def find_call_nodes(graph: Graph, ops: Sequence[OpOverload]) -> list[Node]:
    """The nodes that call ``ops``, in the order of the graph."""
    nodes = [node for op in ops for node in graph.find_nodes(op="call_function", target=op)]
    for wrapper in _FORMS:
        wrapped = graph.find_nodes(op="call_function", target=wrapper)
        nodes += [node for node in wrapped if node.args[0] in ops]
    return sorted(nodes)


def _new_value(like: Call, index: int, base: Node) -> torch.Tensor:
    """The fake value of ``base`` after the call: its layout, in storage of its own."""
    known = like.new_bases(index) if index < len(like.bases) else []
    if known and "val" in known[0].meta:
        return known[0].meta["val"]
    value = base.meta["val"]
    with value.fake_mode:
        return clone_preserve_strides(value)


@dataclass(frozen=True)
class Emitted:
    node: Node
    returns: list[Node]
    new_bases: list[Node]


def emit(
    like: Call,
    op: OpOverload,
    arguments: dict[str, Any],
    mutated: dict[str, Mutated],
    bases: list[Node],
    returns: list[Any],
    written: torch.Tensor | None = None,
) -> Emitted:
    """Insert a call of ``op`` before ``like``, of its form where anything is mutated.

    ``returns`` are the fake values of the op's returns, one None if it has none. They and those of
    the bases are set here: not every version of torch traces higher-order ops again. ``written``:
    that of the last base after the call, where it is known.
    """
    graph = like.node.graph
    known = len(bases) if written is None else len(bases) - 1
    base_values = [_new_value(like, index, base) for index, base in enumerate(bases[:known])]
    if written is not None:
        base_values.append(written)
    handed_on = {key: like.node.meta[key] for key in HANDED_ON if key in like.node.meta}

    def node(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
        new = graph.call_function(target, args, kwargs)
        new.meta.update(handed_on)
        new.meta["val"] = value
        return new

    with graph.inserting_before(like.node):
        if not mutated:
            positional = tuple(arguments[a.name] for a in op._schema.arguments if not a.kwarg_only)
            keywords = {
                a.name: arguments[a.name]
                for a in op._schema.arguments
                if a.kwarg_only and arguments[a.name] != a.default_value
            }
            if len(returns) == 1:
                call = node(op, positional, keywords, returns[0])
                return Emitted(call, [call], [])
            call = node(op, positional, keywords, tuple(returns))
        elif like.form == V1:
            wrapped = {name: bases[m.base] for name, m in mutated.items()}
            keywords = {
                a.name: wrapped[a.name] if a.name in wrapped else arguments[a.name]
                for a in op._schema.arguments
            }
            call = node(auto_functionalized, (op,), keywords, (*returns, *base_values))
        else:
            keywords = dict(arguments)
            for name, m in mutated.items():
                keywords[f"_{name}_base_index"] = m.base
                keywords.update({f"_{name}{key}": value for key, value in m.view.items()})
            keywords["_all_bases"] = bases
            call = node(auto_functionalized_v2, (op,), keywords, (*returns, *base_values))
        results = [
            node(operator.getitem, (call, index), {}, value)
            for index, value in enumerate((*returns, *base_values))
        ]
    return Emitted(call, results[: len(returns)], results[len(returns) :])
