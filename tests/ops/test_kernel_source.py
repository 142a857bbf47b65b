"""Static checks of the kernels: launch limits, specialization, names of Triton that are public."""

import ast
import re
from pathlib import Path

import dspark_ops

from .conftest import op_module

PACKAGE = Path(dspark_ops.__file__).parent
SOURCES = {path.name: path.read_text() for path in sorted(PACKAGE.glob("*.py"))}

# What changes from call to call: batch, counts, positions, steps. A constexpr among them would
# compile a kernel for each value (B6-10).
RUN_TIME = re.compile(
    r"num_rows|num_slots|num_cols|num_chunks|num_blocks|num_partials|tiles_per_chunk|pos|col|step"
    r"|num_tokens|num_positions|num_programs|offset|key_offset|seed|temperature|.*stride.*"
)


def kernels() -> dict[str, ast.FunctionDef]:
    """Launched kernels by name; device functions have other names."""
    found = {}
    for text in SOURCES.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[node.name] = node
    return found


def constexprs(node: ast.FunctionDef) -> set[str]:
    return {
        a.arg
        for a in node.args.args
        if a.annotation is not None and ast.unparse(a.annotation) == "tl.constexpr"
    }


def not_specialized(node: ast.FunctionDef, option: str = "do_not_specialize") -> set[str]:
    names: set[str] = set()
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            for keyword in decorator.keywords:
                if keyword.arg == option:
                    names |= {
                        c.value for c in ast.walk(keyword.value) if isinstance(c, ast.Constant)
                    }
    return names


def test_kernels_are_found() -> None:
    assert {
        "_gumbel_block_argmax_kernel",
        "_gumbel_combine_kernel",
        "_gumbel_sample_kernel",
        "_gumbel_sample_finish_kernel",
        "_prepare_positions_kernel",
        "_prepare_dflash_inputs_kernel",
    } <= set(kernels())


def test_b6_10_no_run_time_value_is_a_constexpr() -> None:
    for name, node in kernels().items():
        assert not [c for c in constexprs(node) if RUN_TIME.fullmatch(c.lower())], name


def test_b6_10_no_constexpr_is_listed_as_not_specialized() -> None:
    for name, node in kernels().items():
        assert not constexprs(node) & not_specialized(node), name
        assert not_specialized(node) <= {a.arg for a in node.args.args}, name


def test_b6_01_counts_and_columns_are_not_specialized() -> None:
    """A value of 1 or a multiple of 16 must not compile another variant."""
    for name, node in kernels().items():
        arguments = {a.arg for a in node.args.args}
        varying = arguments & {"num_slots", "num_cols", "num_chunks", "num_blocks", "num_partials"}
        varying |= arguments & {"tiles_per_chunk", "col", "offset"}
        varying |= arguments & {"stride_idx_b", "stride_pos_b", "stride_col_b", "stride_draft_b"}
        assert varying <= not_specialized(node), name


def test_b6_01_the_preparing_kernels_specialize_on_nothing() -> None:
    """Not on one size, stride or address: what they are given is new at every step."""
    for name in ("_prepare_positions_kernel", "_prepare_dflash_inputs_kernel"):
        node = kernels()[name]
        arguments = {a.arg for a in node.args.args} - constexprs(node)
        pointers = {a for a in arguments if a.endswith("_ptr")}
        assert not_specialized(node) == arguments - pointers
        assert not_specialized(node, "do_not_specialize_on_alignment") == pointers


def test_b6_02_what_specializes_has_an_unaligned_twin() -> None:
    """Two variants, not one for each combination of what is divisible by 16 and what is not."""
    source = "\n".join(SOURCES.values())
    for name, node in kernels().items():
        pointers = {a.arg for a in node.args.args if a.arg.endswith("_ptr")}
        numbers = {a.arg for a in node.args.args} - constexprs(node) - pointers
        specialized = pointers - not_specialized(node, "do_not_specialize_on_alignment")
        specialized |= numbers - not_specialized(node)
        twin = name.replace("_kernel", "_unaligned_kernel")
        has_twin = f"\n{twin} = unaligned({name})\n" in source
        assert has_twin == bool(specialized), (name, specialized)


def test_b6_08_threads_fit_a_block_on_every_warp_size() -> None:
    """At most 1024 threads with warps of 64, as some AMD GPUs have them."""
    module = op_module("gumbel_sample")
    used = [module.NUM_WARPS, module.FINISH_WARPS, op_module("gumbel_combine").NUM_WARPS]
    used += [op_module(f).NUM_WARPS for f in ("prepare_positions", "prepare_dflash_inputs")]
    for text in SOURCES.values():
        used += [int(n) for n in re.findall(r"num_warps\"?\s*[=:]\s*(\d+)", text)]
    assert used
    assert max(used) * 64 <= 1024


def test_b6_07_grids_have_one_axis() -> None:
    """Only axis 0 may be larger than 65535."""
    for name, node in kernels().items():
        assert "program_id(1)" not in ast.unparse(node), name
        assert "program_id(2)" not in ast.unparse(node), name


def test_b6_11_only_public_triton_names_are_imported() -> None:
    private = re.compile(r"triton\.(compiler|backends|runtime|knobs|_)|from triton\._")
    for name, text in SOURCES.items():
        imports = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [line for line in imports if private.search(line)], name
        if name != "_triton.py":
            assert not [
                line
                for line in imports
                if re.search(r"\btriton\b", line.split("import")[0]) and "dspark_ops" not in line
            ], name


def test_no_autotuning_in_ops() -> None:
    """Autotuning asks for a driver at import and cannot be captured (B7-01, B3-14)."""
    for name, text in SOURCES.items():
        assert "autotune(" not in text, name
