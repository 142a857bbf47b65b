"""The graphs before and after each rewrite, as a reader of the docs expects them."""

from expecttest import assert_expected_inline
from torch import Tensor

from .compiling import Compiled, renamed
from .inputs import Inputs, make_inputs
from .spellings import block_op_uncached, choose, column_write, next_embedding


def graph_of(function, **options: object) -> str:
    compiled = Compiled(function, options=options)
    compiled(make_inputs(4, 1300))
    (graph,) = compiled.graphs
    return renamed(graph)


def uncached(x: Inputs) -> Tensor:
    return choose(*block_op_uncached(x.base[:, 0] + x.bias, x))


def scaled(x: Inputs) -> Tensor:
    return choose(*block_op_uncached((x.base[:, 0] + x.bias) * 2, x))


def test_expected_before() -> None:
    options = {"dspark.sampler_fusion": False, "dspark.combine_fusion": False}
    assert_expected_inline(
        graph_of(uncached, **options),
        """\
select = select.int(arg0, 1, 0)
add = add.Tensor(select, arg1)
select_1 = select.int(arg2, 1, 0)
select_2 = select.int(arg3, 1, 0)
sub = sub.Tensor(select_2, 1)
gumbel_block_argmax = dspark.gumbel_block_argmax(add, select_1, arg4, arg5, sub)
getitem = getitem(gumbel_block_argmax, 0)
getitem_1 = getitem(gumbel_block_argmax, 1)
argmax = argmax(getitem, -1, True)
gather = gather(getitem_1, -1, argmax)
view = reshape(gather, [-1])
return (view,)""",
    )


def test_expected_sampler() -> None:
    assert_expected_inline(
        graph_of(uncached),
        """\
select = select.int(arg0, 1, 0)
select_1 = select.int(arg1, 1, 0)
select_2 = select.int(arg2, 1, 0)
gumbel_sample_default = dspark.gumbel_sample(select, select_1, arg3, arg4, select_2, arg5, -1,
    False, True, False)
return (gumbel_sample_default,)""",
    )


def test_expected_combine() -> None:
    assert_expected_inline(
        graph_of(scaled),
        """\
select = select.int(arg0, 1, 0)
add = add.Tensor(select, arg1)
mul = mul.Tensor(add, 2)
select_1 = select.int(arg2, 1, 0)
select_2 = select.int(arg3, 1, 0)
sub = sub.Tensor(select_2, 1)
gumbel_block_argmax = dspark.gumbel_block_argmax(mul, select_1, arg4, arg5, sub)
getitem = getitem(gumbel_block_argmax, 0)
getitem_1 = getitem(gumbel_block_argmax, 1)
gumbel_combine_default = dspark.gumbel_combine(getitem, getitem_1)
return (gumbel_combine_default,)""",
    )


def test_expected_sampler_with_cache_and_column() -> None:
    assert_expected_inline(
        graph_of(column_write),
        """\
select = select.int(arg0, 1, 1)
select_1 = select.int(arg1, 1, 1)
select_2 = select.int(arg2, 1, 1)
auto_functionalized_v2_1 = auto_functionalized_v2(dspark.gumbel_sample_cache_draft.default,
    logits=select, idx_mapping=select_1, temperature=arg3, seeds=arg4, pos=select_2,
    cache_col=1, cache_cols=None, pos_offset=-1, is_drafting=True, apply_temperature=True,
    use_fp64=False, bias=arg5, _logits_cache_base_index=0, _draft_tokens_base_index=1,
    _draft_tokens_size=[4], _draft_tokens_stride=[3], _draft_tokens_storage_offset=1,
    _all_bases=[arg6, arg7])
getitem_3 = getitem(auto_functionalized_v2_1, 0)
getitem_4 = getitem(auto_functionalized_v2_1, 1)
getitem_5 = getitem(auto_functionalized_v2_1, 2)
copy_ = copy_(arg6, getitem_4)
copy__1 = copy_(arg7, getitem_5)
return ()""",
    )


def test_expected_sampler_with_next_embedding() -> None:
    assert_expected_inline(
        graph_of(next_embedding),
        """\
select = select.int(arg0, 1, 0)
select_1 = select.int(arg1, 1, 0)
select_2 = select.int(arg2, 1, 0)
auto_functionalized_v2_1 = auto_functionalized_v2(dspark.gumbel_sample_embed_cache.default,
    logits=select, idx_mapping=select_1, temperature=arg3, seeds=arg4, pos=select_2,
    cache_col=0, cache_cols=None, pos_offset=-1, is_drafting=True, apply_temperature=True,
    use_fp64=False, bias=arg5, embed_weight=arg6, _logits_cache_base_index=0, _all_bases=[arg7])
getitem_3 = getitem(auto_functionalized_v2_1, 0)
getitem_4 = getitem(auto_functionalized_v2_1, 1)
getitem_5 = getitem(auto_functionalized_v2_1, 2)
copy_ = copy_(arg7, getitem_5)
return (getitem_3, getitem_4)""",
    )
