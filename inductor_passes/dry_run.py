"""``explain(f, *args)``: what the passes would do to ``f``, without running it.

Dynamo traces ``f`` and a backend of our own compiles the graph up to the point where kernels would
be generated, then raises. Dynamo installs nothing after an error, so ``f``'s compiled code, its
caches and the caller's tensors stay as they were. ``fullgraph`` makes a graph break an error too:
the code after it needs the values before it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph, GraphModule

from inductor_passes.backend import SLOT, inductor_with_passes
from inductor_passes.passes import as_tuple
from inductor_passes.sites import Report, collecting


class _Stop(Exception):
    """Everything that was asked for is known."""


def _stop(nodes: Any) -> Any:
    raise _Stop


def _uncached(graph: Graph) -> None:
    """A pass without a uuid: no cache is asked or filled."""


def explain(
    fn: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Print and return which sites of ``fn(*args, **kwargs)`` are fused, and why others are not.

    ``options`` as for ``torch.compile(fn, backend="dspark", options=options)``.
    """
    inductor = inductor_with_passes(options, mode=None)
    passes = inductor.config[SLOT]
    wrapped = (*as_tuple(passes.wrapped), _uncached)
    inductor.config[SLOT] = dataclasses.replace(passes, wrapped=wrapped)
    reached = False

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal reached
        reached = True
        with inductor_config.patch(_pre_fusion_custom_pass=_stop):
            inductor(gm, example_inputs)
        raise _Stop

    fn = getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))
    with collecting() as seen, torch._dynamo.config.patch(suppress_errors=False):
        seen.pass_names = tuple(fusion.name for fusion in passes.enabled())
        try:
            torch.compile(fn, backend=backend, fullgraph=True)(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as unsupported:
            seen.pass_names = ()  # without a graph "no candidate" would be a verdict
            seen.notes.append(
                f"not one graph, so nothing was looked at: {_in_one_line(unsupported)}"
            )
        except Exception as error:
            if not (reached and _is_stop(error)):
                raise
    print(seen)
    return seen


def _in_one_line(unsupported: Exception) -> str:
    """The reason and the line of the user's program that it is about."""
    lines = str(unsupported).strip().splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith('File "')]
    return lines[0] + (f" ({frames[-1]})" if frames else "")


def _is_stop(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _Stop):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False
