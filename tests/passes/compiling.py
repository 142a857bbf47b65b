"""How tests compile: by ``backend="dspark"``, or by all of it but the generation of kernels.

Most spellings differ only in the graph, and code for a CPU takes seconds to compile. `rewritten`
runs Dynamo, AOTAutograd and every graph pass of Inductor with ours, then the final graph as it is.
"""

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

import inductor_passes
from inductor_passes.sites import Site

SLOT = "post_grad_custom_pre_pass"
SAMPLER, COMBINE = "sampler_fusion", "combine_fusion"


class Recorder(CustomGraphPass):
    """The user's own pass: keeps what the graphs look like after ours."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: Graph) -> None:
        graph.lint()
        self.graphs.append(lines_of(graph))

    def uuid(self) -> None:
        return None


class Compiled:
    """``function`` compiled with the passes; ``graphs`` and ``sites`` tell what they did."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        backend: Any = None,
        dynamic: bool | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._recorder = Recorder()
        self._before = len(inductor_passes.report().sites)
        options = {SLOT: self._recorder, **(options or {})}
        self._call = torch.compile(
            function,
            backend=backend or rewritten,
            dynamic=dynamic,
            fullgraph=True,
            options=options,
        )

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    @property
    def graphs(self) -> list[list[str]]:
        return self._recorder.graphs

    @property
    def sites(self) -> list[Site]:
        return inductor_passes.report().sites[self._before :]

    def fused(self, pass_name: str) -> int:
        return sum(site.fused for site in self.sites if site.pass_name == pass_name)

    def reasons(self, pass_name: str) -> list[str]:
        sites = [site for site in self.sites if site.pass_name == pass_name and not site.fused]
        return [site.reason for site in sites]


def rewritten(
    gm: GraphModule, example_inputs: Sequence[Tensor], *, options: dict[str, Any]
) -> Callable[..., Any]:
    """Inductor without its code generation: the graph after all passes, run as it is."""
    return compile_fx.compile_fx(
        gm,
        example_inputs,
        inner_compile=_run_graph,
        config_patches=inductor_passes.options(options),
    )


def _run_graph(gm: GraphModule, example_inputs: Sequence[Tensor], **kwargs: Any) -> Any:
    view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(gm, example_inputs)
    with V.set_fake_mode(fake_mode):
        compile_fx._recursive_post_grad_passes(gm, is_inference=kwargs.get("is_inference", False))
    gm.recompile()

    def run(args: list[Any]) -> Any:
        call_args = list(args)
        args.clear()
        return gm(*call_args)

    run._boxed_call = True
    return run


def lines_of(graph: Graph) -> list[str]:
    """Each call as ``name = op(arguments)``, without namespaces, overloads and placeholders."""
    return [_line(node) for node in graph.nodes if node.op in ("call_function", "output")]


def _line(node: Any) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    name = target or getattr(node.target, "__name__", str(node.target))
    name = name.removesuffix(".default").removeprefix("aten.")
    arguments = [str(a) for a in node.args]
    arguments += [f"{key}={value}" for key, value in node.kwargs.items()]
    return f"{node.name} = {name}({', '.join(arguments)})"


def renamed(lines: Sequence[str]) -> str:
    """The lines, wrapped, with inputs called arg0, arg1, ... and sizes s0, s1, ... in order."""
    text = re.sub(r"device=cuda(:\d+)?", "device=cpu", "\n".join(lines))
    for pattern, stem in ((r"\barg\d+_\d+\b", "arg"), (r"\b[suz]\d+\b", "s")):
        seen: dict[str, str] = {}
        for name in re.findall(pattern, text):
            seen.setdefault(name, f"{stem}{len(seen)}")
        text = re.sub(pattern, lambda match, seen=seen: seen[match.group()], text)
    wrap = textwrap.TextWrapper(96, subsequent_indent="    ", break_long_words=False)
    return "\n".join(line for long in text.splitlines() for line in wrap.wrap(long))


def ops_in(lines: Sequence[str]) -> set[str]:
    """Names of all ops called, those wrapped by auto_functionalized as well."""
    return set(re.findall(r"[\w.]+(?=\()", "\n".join(lines))) | set(
        re.findall(r"dspark\.\w+", "\n".join(lines))
    )


def generated_code_of(compiled: Callable[..., Any], *args: Any) -> list[str]:
    from torch._inductor.utils import run_and_get_code

    with inductor_config.patch(force_disable_caches=True):
        return run_and_get_code(compiled, *args)[1]
