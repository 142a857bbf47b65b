"""Every spelling of the fill of a padding buffer is fused, and leaves what eager leaves."""

import re

import pytest
from expecttest import assert_expected_inline

from .compiling import Compiled, ops_in, renamed
from .inputs import assert_as_eager
from .padding_inputs import PADDING, make_batch
from .padding_spellings import FUSED

STRICT = {"dspark.strict": True}
# Of these the fill itself is read, or its ops are called for something else.
KEPT = {
    "half_filled_read",
    "half_filled_copied",
    "read_before_the_op",
    "mask_used_elsewhere",
    "another_buffer_cleared",
    "length_read",
    "read_after_the_op",
    "returned",
}


def needed(graph: list[str]) -> list[str]:
    """The lines that a result or a write needs: Inductor generates no code for others."""
    lines: list[str] = []
    for line in reversed(graph):
        name = line.split(" = ")[0]
        if line.startswith("return") or "copy_(" in line or re.search(rf"\b{name}\b", str(lines)):
            lines.append(line)
    return lines


def assert_fused(compiled: Compiled, name: str) -> None:
    assert compiled.reasons(PADDING) == []
    assert compiled.fused(PADDING) == len(compiled.graphs) == len(compiled.sites)
    for graph in compiled.graphs:
        assert "dspark.prepare_positions_padding.default" in "\n".join(graph)
        assert "dspark.prepare_positions.default" not in "\n".join(graph)
        if name not in KEPT:
            assert not ops_in(needed(graph)) & {
                "full",
                "slice_scatter",
                "select_scatter",
                "copy",
                "clone",
            }


@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    """The first number of tokens is compiled as it is, the second as a symbol."""
    spelling = FUSED[name]
    compiled = Compiled(spelling.function, options=STRICT)
    for seed, n in enumerate(spelling.numbers):
        assert_as_eager(compiled, spelling.function, make_batch(n, seed=seed), n)
    assert_fused(compiled, name)
    assert compiled.sites[0].launches_saved == spelling.launches


@pytest.mark.parametrize("name", FUSED)
def test_fused_with_symbolic_sizes(name: str) -> None:
    spelling = FUSED[name]
    compiled = Compiled(spelling.function, dynamic=True, options=STRICT)
    for seed, (n, length) in enumerate(((6, 16), (spelling.numbers[:2][-1], 24))):
        assert_as_eager(compiled, spelling.function, make_batch(n, seed, length), n)
    assert_fused(compiled, name)


# The graphs as a reader of the docs expects them


def graph_of(name: str, dynamic: bool = True, **options: object) -> str:
    compiled = Compiled(FUSED[name].function, options=options, dynamic=dynamic)
    compiled(make_batch(), 6)
    (graph,) = compiled.graphs
    return renamed(graph)


def test_expected_before() -> None:
    options = {"dspark.padding_fusion": False}
    assert_expected_inline(
        graph_of("fills", False, **options),
        """\
full_default = full([6], False, dtype=torch.bool, layout=torch.strided, device=cpu,
    pin_memory=False)
slice_scatter = slice_scatter(arg0, full_default, 0, 0, 6)
full_default_1 = full([10], True, dtype=torch.bool, layout=torch.strided, device=cpu,
    pin_memory=False)
slice_scatter_1 = slice_scatter(slice_scatter, full_default_1, 0, 6, 9223372036854775807)
auto_functionalized_v2 = auto_functionalized_v2(dspark.prepare_positions.default,
    idx_mapping=arg1, query_start_loc=arg2, num_computed_tokens=arg3, _positions_base_index=0,
    _seq_lens_base_index=1, _all_bases=[arg4, arg5])
getitem_1 = getitem(auto_functionalized_v2, 1)
getitem_2 = getitem(auto_functionalized_v2, 2)
copy_ = copy_(arg0, slice_scatter_1)
copy__1 = copy_(arg4, getitem_1)
copy__2 = copy_(arg5, getitem_2)
return ()""",
    )


def test_expected_padding() -> None:
    assert_expected_inline(
        graph_of("fills"),
        """\
auto_functionalized_v2_1 = auto_functionalized_v2(dspark.prepare_positions_padding.default,
    idx_mapping=arg0, query_start_loc=arg1, num_computed_tokens=arg2, num_tokens=arg3,
    _positions_base_index=0, _seq_lens_base_index=1, _is_padding_base_index=2, _all_bases=[arg4,
    arg5, arg6])
getitem_4 = getitem(auto_functionalized_v2_1, 1)
getitem_5 = getitem(auto_functionalized_v2_1, 2)
getitem_6 = getitem(auto_functionalized_v2_1, 3)
copy_ = copy_(arg6, getitem_6)
copy__1 = copy_(arg4, getitem_4)
copy__2 = copy_(arg5, getitem_5)
return ()""",
    )


def test_expected_padding_of_a_part() -> None:
    assert_expected_inline(
        graph_of("first_entries"),
        """\
auto_functionalized_v2_1 = auto_functionalized_v2(dspark.prepare_positions_padding.default,
    idx_mapping=arg0, query_start_loc=arg1, num_computed_tokens=arg2, num_tokens=arg3,
    _positions_base_index=0, _seq_lens_base_index=1, _is_padding_base_index=2,
    _is_padding_slice_dim=0, _is_padding_slice_start=0, _is_padding_slice_end=12,
    _all_bases=[arg4, arg5, arg6])
getitem_4 = getitem(auto_functionalized_v2_1, 1)
getitem_5 = getitem(auto_functionalized_v2_1, 2)
getitem_6 = getitem(auto_functionalized_v2_1, 3)
copy_ = copy_(arg6, getitem_6)
copy__1 = copy_(arg4, getitem_4)
copy__2 = copy_(arg5, getitem_5)
return ()""",
    )
