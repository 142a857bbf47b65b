"""The pass object that Inductor runs: every rewrite, in order, then the pass that was there before.

It sits in ``post_grad_custom_pre_pass``: there the graph is functional and the add is still an
``add``. `uuid` covers all that the result depends on and that no cache key of torch sees: our
sources, the sources and schemas of the ops, and the options.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import dspark_ops
from inductor_passes.base import Fusion
from inductor_passes.combine_fusion import CombineFusion
from inductor_passes.eager_rounding import keep_adds_apart
from inductor_passes.masking_fusion import MaskingFusion
from inductor_passes.padding_fusion import PaddingFusion
from inductor_passes.sampler_fusion import SamplerFusion
from inductor_passes.sites import Report, record

FUSIONS: tuple[Fusion, ...] = (SamplerFusion(), CombineFusion(), PaddingFusion(), MaskingFusion())
DEFAULTS: dict[str, Any] = {
    "dspark.numerics": "bitwise",
    "dspark.strict": False,
    **{f"dspark.{fusion.name}": True for fusion in FUSIONS},
}


def split_options(options: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, Inductor's); unknown ``dspark.*`` options and values raise ``ValueError``."""
    ours, inductor = dict(DEFAULTS), {}
    for key, value in (options or {}).items():
        if not key.startswith("dspark."):
            inductor[key] = value
            continue
        if key not in DEFAULTS:
            raise ValueError(f"unknown option {key!r}; known are {', '.join(sorted(DEFAULTS))}")
        known: tuple[Any, ...] = (True, False)
        if key == "dspark.numerics":
            known = ("bitwise", "lossless")
        if not any(
            value is choice or (isinstance(value, str) and value == choice) for choice in known
        ):
            raise ValueError(f"option {key!r} must be one of {known}; got {value!r}")
        ours[key] = value
    return ours, inductor


@dataclass(frozen=True)
class DsparkPasses(CustomGraphPass):
    """Run the enabled rewrites, then ``wrapped``, the pass that was configured before.

    options: sorted (name, value) pairs. wrapped: a callable or `CustomGraphPass`, or a tuple of
    them. Holds no state: it is pickled, compared by Dynamo and entered from several threads.
    """

    options: tuple[tuple[str, Any], ...] = tuple(sorted(DEFAULTS.items()))
    wrapped: Any = None

    @classmethod
    def around(cls, present: Any, options: dict[str, Any]) -> "DsparkPasses":
        """Passes with ``options`` that keep running ``present``."""
        if isinstance(present, DsparkPasses):
            present = present.wrapped
        elif isinstance(present, list):
            present = tuple(present)
        return cls(tuple(sorted(options.items())), present)

    def enabled(self) -> list[Fusion]:
        options = dict(self.options)
        return [fusion for fusion in FUSIONS if options[f"dspark.{fusion.name}"]]

    def __call__(self, graph: Graph) -> None:
        options = dict(self.options)
        enabled = self.enabled()
        seen = Report(graphs=1, pass_names=tuple(fusion.name for fusion in enabled))
        for fusion in FUSIONS:
            if fusion in enabled:
                seen.sites += fusion.apply(
                    graph, options["dspark.strict"], options["dspark.numerics"]
                )
            else:
                seen.notes.append(f"{fusion.name} is switched off")
        keep_adds_apart(graph)
        if options["dspark.strict"]:
            graph.lint()
        record(seen)
        for present in as_tuple(self.wrapped):
            present(graph)

    def uuid(self) -> str | None:
        """Changes with all that changes the result; None, for no caching, if a wrapped one is."""
        parts = [source_digest(), torch.__version__, *op_schemas(), repr(self.options)]
        for present in as_tuple(self.wrapped):
            wrapped_uuid = present.uuid() if isinstance(present, CustomGraphPass) else None
            if not wrapped_uuid:
                return None
            parts.append(repr(wrapped_uuid))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def as_tuple(present: Any) -> tuple[Callable[[Graph], None], ...]:
    if present is None:
        return ()
    return present if isinstance(present, tuple) else (present,)


@lru_cache(1)
def source_digest() -> str:
    """Over every source file of both packages; read once, as imported code does not change."""
    digest = hashlib.sha256()
    for package in (Path(__file__).parent, Path(dspark_ops.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package.parent)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@lru_cache(1)
def op_schemas() -> tuple[str, ...]:
    """Schema and tags of every ``dspark`` op: torch's cache keys have neither.

    Read once: torch refuses to define an op twice, and rewrites only use what was there on import.
    """
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("dspark::"))
    schemas = []
    for name in names:
        base, _, overload = name.removeprefix("dspark::").partition(".")
        op = getattr(getattr(torch.ops.dspark, base), overload or "default")
        schemas.append(f"{op._schema} {sorted(str(tag) for tag in op.tags)}")
    return tuple(schemas)
