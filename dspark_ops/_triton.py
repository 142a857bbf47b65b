"""Triton where installed; elsewhere a stand-in under which kernels are defined but not run."""

from types import ModuleType
from typing import Any

MISSING = ""

try:
    import triton

    if not hasattr(triton, "jit"):
        # A user's file of the same name shadows the package: say which one was found.
        found = getattr(triton, "__file__", None) or list(getattr(triton, "__path__", []))
        raise ImportError(f"the module imported as 'triton' is {found}, which is not Triton")
    import triton.language as tl
except ImportError as error:
    MISSING = str(error) or "no module named 'triton'"

    class _Absent(ModuleType):
        """Answers every attribute, so that a kernel's decorator and annotations evaluate."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Absent(name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

    triton = _Absent("triton")
    tl = _Absent("triton.language")  # type: ignore[misc]


def require_triton(op: str) -> None:
    """Raise ``RuntimeError`` that says what to install if ``op`` has no kernel to launch."""
    if MISSING:
        raise RuntimeError(
            f"dspark::{op} on a GPU needs Triton 3.5 or newer ({MISSING}); "
            "install it with: pip install 'dspark-ops[triton]'"
        )
