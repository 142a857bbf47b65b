"""Without a GPU: the variants that ``warmup`` compiles, and those that random batches launch.

Triton's own binder says which variant a launch asks for; CPU tensors stand for those of a GPU. To
be run as a process of its own, since Triton interprets in that of the tests: a function's name and
its arguments in JSON give what it returns in JSON.
"""

import importlib
import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from dspark_ops._launch import launching_instead
from dspark_ops._library import LIBRARY, _by_position
from dspark_ops._serving import Serving

from ..gpu.compilations import compilations
from ..serving_batches import Batches

module = importlib.import_module("dspark_ops.warmup")
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64

DEFAULTS: dict[str, Any] = {
    "vocab_size": (5008, 1001),
    "num_steps": 7,
    "dtype": (BF16,),
    "target_dtype": (F32,),
    "index_dtype": (I32,),
    "pos_dtype": (I64,),
    "id_dtype": (I64,),
    "cache_col_dtype": (I64,),
    "use_fp64": False,
    "markov_rank": 256,
    "block_size": 16,
    "sample_from_anchor": False,
    "cp_size": 1,
    "cp_interleave": 1,
}
SERVERS: dict[str, dict[str, Any]] = {
    "defaults": DEFAULTS,
    "odd_vocabulary": {**DEFAULTS, "vocab_size": (1001,), "markov_rank": 33},
    "many_dtypes": {
        **DEFAULTS,
        "num_steps": 40,
        "dtype": (F16, BF16),
        "target_dtype": (F32, BF16),
        "index_dtype": (I32, I64),
        "id_dtype": (I32, I64),
        "cache_col_dtype": (),
        "markov_rank": None,
        "sample_from_anchor": True,
        "cp_size": 2,
        "cp_interleave": 4,
    },
    "fp64": {**DEFAULTS, "vocab_size": (5008,), "use_fp64": True},
}


class Recorder:
    """Launches by variant: how many asked for it."""

    def __init__(self) -> None:
        self.binders: dict[Any, Any] = {}
        self.seen: dict[tuple[str, str], int] = {}

    def __call__(self, kernel: Any, options: Any, grid: Any, args: Any, named: Any) -> None:
        assert min(grid) >= 1
        if kernel not in self.binders:
            signature = (kernel.signature, kernel.params, BACKEND)
            self.binders[kernel] = create_function_from_signature(*signature)
        _, specialization, others = self.binders[kernel](*args, **named, **options)
        names = [p.name for p in kernel.params]
        kinds = [f"{n}: {kind}" for n, kind in zip(names, specialization, strict=True)]
        variant = (kernel.__name__, f"{id(kernel)} {', '.join(kinds)} {others}")
        self.seen[variant] = self.seen.get(variant, 0) + 1


def launch_on_cpu() -> None:
    """CPU tensors go to the launchers."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("dspark::"):
            name = name.removeprefix("dspark::")
            names = [a.name for a in getattr(torch.ops.dspark, name).default._schema.arguments]
            op = max((op for op in module.OPS if name.startswith(op)), key=len, default="")
            if not op:  # one that launches others' kernels
                continue
            in_place = "_" if name.endswith("_") else ""
            file = importlib.import_module(f"dspark_ops.{op}")
            launcher = getattr(file, f"_{op}_launch{in_place}")
            LIBRARY.impl(name, _by_position(launcher, names), "CPU", allow_override=True)


def serving_of(warmed: dict[str, Any]) -> Serving:
    plural = {
        name: warmed[name.removesuffix("s")]
        for name in ("vocab_sizes", "dtypes", "target_dtypes", "index_dtypes", "pos_dtypes")
    }
    same = ("num_steps", "markov_rank", "block_size", "sample_from_anchor", "cp_size")
    return Serving(
        device=torch.device("cpu"),
        id_dtypes=warmed["id_dtype"],
        col_dtypes=warmed["cache_col_dtype"],
        use_fp64=(False, True) if warmed["use_fp64"] else (False,),
        cp_interleave=warmed["cp_interleave"],
        **plural,
        **{name: warmed[name] for name in same},
    )


def cover(server: str, num_batches: int, pos_dtype: str | None = None) -> dict[str, Any]:
    """Variants of each op, and those that only serving or only warming asks for."""
    launch_on_cpu()
    warmed = SERVERS[server]
    warming = Recorder()
    counts = {}
    not_warmed: dict[str, str] = {}
    with launching_instead(warming):
        before: set[Any] = set()
        for op in module.OPS:
            for _, call in module._calls(serving_of(warmed), (op,), not_warmed):
                call()
            counts[op] = len(warming.seen) - len(before)
            before = set(warming.seen)
    serving = Recorder()
    met = warmed if pos_dtype is None else {**warmed, "pos_dtype": (getattr(torch, pos_dtype),)}
    with launching_instead(serving):
        batches = Batches("cpu", met, 12)
        for seed in range(num_batches):
            batches.serve(seed)
    return {
        "counts": counts,
        "not warmed": sorted(serving.seen.keys() - warming.seen.keys()),
        "not met": sorted(warming.seen.keys() - serving.seen.keys()),
        "launches": sum(serving.seen.values()),
        "ops without calls": not_warmed,
    }


class Driver:
    """As much of a GPU as compiling takes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_twice(ops: list[str], in_parallel: bool) -> list[dict[str, Any]]:
    """What ``warmup`` compiles of ``ops`` for an H200, and what it then still compiles."""
    launch_on_cpu()
    triton.runtime.driver.set_active(Driver())
    if not in_parallel:
        triton.AsyncCompileMode = None
    found = []
    for _ in range(2):
        bar = module._Bar(False)
        with compilations() as seen:
            serving = serving_of(DEFAULTS)
            variants, not_warmed, num_calls = module._compile(serving, tuple(ops), bar)
        assert not not_warmed
        threads = bar.done, bar.total
        found.append({"variants": variants, "seen": seen, "calls": num_calls, "threads": threads})
    return found


def fail_once() -> dict[str, Any]:
    """A first warmup of gumbel_combine whose compilation fails, and what a second one does."""
    launch_on_cpu()
    triton.runtime.driver.set_active(Driver())
    kernel = importlib.import_module("dspark_ops.gumbel_combine")._gumbel_combine_kernel
    kernel.device_caches[0]  # which gives it what it compiles with
    compile_it = kernel.compile

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    kernel.compile = fail
    error = ""
    arguments = serving_of(DEFAULTS), ("gumbel_combine",), module._Bar(False)
    try:
        module._compile(*arguments)
    except OSError as raised:
        error = repr(raised)
    kernel.compile = compile_it
    with compilations() as seen:
        variants, _, _ = module._compile(*arguments)
    compiled = kernel.device_caches[0][0].values()
    kinds = [type(v).__name__ for v in compiled]
    return {"error": error, "variants": variants, "seen": seen, "kinds": kinds}


FUNCTIONS = {"cover": cover, "compile_twice": compile_twice, "fail_once": fail_once}

if __name__ == "__main__":
    function, arguments = json.loads(sys.argv[1])
    print(json.dumps(FUNCTIONS[function](**arguments)))
