"""The hook that counts what Triton compiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernel variants that Triton compiles, or loads from its disk cache, inside.

    Each by its name, its options, and the type and divisibility of each argument.
    """
    import triton

    runtime = triton.knobs.runtime
    seen: list[str] = []

    def hook(*args: Any, **kwargs: Any) -> None:
        name = str(kwargs.get("repr")).split("](")[0]
        seen.append(f"{name}] {kwargs.get('key')}")

    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = hook
    try:
        yield seen
    finally:
        runtime.jit_post_compile_hook = before
