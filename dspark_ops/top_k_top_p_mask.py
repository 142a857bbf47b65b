"""Last kernel of top_k_top_p_: writes the mask below each row's cut."""

from dspark_ops._launch import unaligned
from dspark_ops._triton import tl, triton
from dspark_ops.ordered import ordered_key
from dspark_ops.top_k_top_p_state import CUT_ID, CUT_KEY, FILTERED, within_cut


@triton.jit(
    do_not_specialize=["num_chunks", "chunk_tiles"],
)
def _top_k_top_p_mask_kernel(
    out_ptr,
    logits_ptr,
    state_ptr,
    V,
    mask_value,
    num_chunks,
    chunk_tiles,
    stride_out_b,
    stride_logits_b,
    IN_PLACE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    CHUNK_V: tl.constexpr,
    TILE_V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // num_chunks
    # A multiple of the tile that the compiler can see, for loads of 16 bytes.
    first = (program % num_chunks).to(tl.int32) * chunk_tiles * CHUNK_V
    last = tl.minimum(first + chunk_tiles * CHUNK_V, V)
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    state = state_ptr + row * NUM_WORDS
    filtered = tl.load(state + FILTERED) != 0
    if filtered | (not IN_PLACE):
        cut_key = tl.load(state + CUT_KEY)
        cut_id = tl.load(state + CUT_ID)
        row_ptr = logits_ptr + row * stride_logits_b
        out_row_ptr = out_ptr + row * stride_out_b
        for start in tl.range(first, last, TILE_V):
            offs_v = start + tl.arange(0, TILE_V)
            mask_v = offs_v < V
            x = tl.load(row_ptr + offs_v, mask=mask_v, other=float("-inf"))
            kept = within_cut(ordered_key(x), offs_v, cut_key, cut_id) | (x == float("-inf"))
            if not IN_PLACE:
                kept |= not filtered
            out = tl.where(kept, x, mask_value)
            tl.store(out_row_ptr + offs_v, out, mask=mask_v)


_top_k_top_p_mask_unaligned_kernel = unaligned(_top_k_top_p_mask_kernel)
