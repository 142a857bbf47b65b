"""``torch.compile(f, backend="dspark")``: Inductor with the passes of this package.

    torch.compile(f, backend="dspark", mode=... or options={...})
    torch.compile(f, options=inductor_passes.options())       # the stock backend, the same passes
    with inductor_passes.enabled(): torch.compile(f)(x)       # what is compiled inside has them

``dspark.*`` options are ours, all others Inductor's, with its own validation. A pass that the user
put into the same slot, by option or by config, keeps running.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch.fx import GraphModule

from inductor_passes.passes import DsparkPasses, split_options

SLOT = "post_grad_custom_pre_pass"


def options(options: dict[str, Any] | None = None, *, mode: str | None = None) -> dict[str, Any]:
    """Options for the stock backend: ``mode``, Inductor's and ours, with the passes in their slot.

    Equal options give equal passes, so that calling this again recompiles nothing.

    Raises:
        ValueError: unknown ``dspark.*`` option. RuntimeError: unknown option or mode of Inductor.
    """
    return inductor_with_passes(options, mode).config


def inductor_with_passes(options: dict[str, Any] | None, mode: str | None) -> Any:
    """torch.compile's own wrapper of Inductor: it validates options and knows the modes."""
    ours, inductor_options = split_options(options)
    present = inductor_options.pop(SLOT, getattr(inductor_config, SLOT))
    wrapper = torch._TorchCompileInductorWrapper(mode, inductor_options, None)
    wrapper.config[SLOT] = DsparkPasses.around(present, ours)
    return wrapper


def dspark(
    gm: GraphModule,
    example_inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: compile ``gm`` by Inductor with the passes."""
    return inductor_with_passes(options, mode)(gm, example_inputs)


def _reset() -> None:
    """Drop recorded CUDA graphs, as ``torch.compiler.reset`` asks of Inductor's own wrapper."""
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


dspark.reset = _reset  # type: ignore[attr-defined]


@contextmanager
def enabled(options: dict[str, Any] | None = None, *, mode: str | None = None) -> Iterator[None]:
    """Have the passes in everything that this thread compiles by Inductor inside the block.

    Binds when code is compiled, which is at the first call and at each recompilation.
    """
    with inductor_config.patch(inductor_with_passes(options, mode).config):
        yield


def register() -> None:
    """Make the name known where no installed distribution does: a source checkout.

    torch refuses a name that is registered twice, and loads entry points by itself.
    """
    if entry_points(group="torch_dynamo_backends", name="dspark"):
        return
    from torch._dynamo.backends.registry import register_backend

    # A module that is imported again, by a notebook's reload, finds the name taken by itself.
    with suppress(AssertionError):
        register_backend(dspark, name="dspark")
