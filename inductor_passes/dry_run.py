"""``explain(f, *args)``: what the passes would do to ``f``, without running it.

Dynamo traces ``f`` and a backend of our own compiles the graph up to the point where kernels would be
generated, then raises. Dynamo installs nothing after an error, so ``f``'s compiled code, its caches and
the caller's tensors stay as they were. ``fullgraph`` makes a graph break an error too, instead of a first
half that would have to run.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import GraphModule

from inductor_passes.backend import dspark
from inductor_passes.sites import Report, collecting


class _Stop(Exception):
    """Everything that was asked for is known."""


def _stop(nodes: Any) -> Any:
    raise _Stop


def explain(
    fn: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Print and return which sites of ``fn(*args, **kwargs)`` are fused, and why others are not.

    ``options`` as for ``torch.compile(fn, backend="dspark", options=options)``.
    """
    reached = False

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal reached
        uncached = torch.compiler.config.patch(force_disable_caches=True)
        with uncached, inductor_config.patch(_pre_fusion_custom_pass=_stop):
            try:
                dspark(gm, example_inputs, options=options)
            finally:
                reached = True
        raise _Stop

    fn = getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))
    with collecting() as seen, torch._dynamo.config.patch(suppress_errors=False):
        try:
            torch.compile(fn, backend=backend, fullgraph=True)(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as unsupported:
            seen.notes.append(f"not traced as one graph, so nothing was looked at: {unsupported}")
        except Exception as error:
            if not (reached and _is_stop(error)):
                raise
    print(seen)
    return seen


def _is_stop(error: BaseException | None) -> bool:
    while error is not None:
        inner = getattr(error, "inner_exception", None)
        if isinstance(error, _Stop) or isinstance(inner, _Stop):
            return True
        error = error.__cause__ or inner
    return False
