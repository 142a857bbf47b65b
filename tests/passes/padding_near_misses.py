"""Code that looks like the fill of a padding buffer and must be left as it is.

``LEFT_ALONE`` has, by name, the function of `Batch` and the number of tokens, and the reason that
`padding_fusion` must give at each call of the op.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dspark_ops import prepare_positions

from .padding_inputs import Batch, prepare
from .padding_spellings import indices


@dataclass(frozen=True)
class NearMiss:
    function: Callable[[Batch, int], Any]
    reasons: tuple[str, ...]  # a phrase of each


LEFT_ALONE: dict[str, NearMiss] = {}


def left_alone(*reasons: str) -> Callable[..., Any]:
    def add(function: Callable[[Batch, int], Any]) -> Callable[[Batch, int], Any]:
        LEFT_ALONE[function.__name__] = NearMiss(function, reasons)
        return function

    return add


def fill(buffer: torch.Tensor, n: int) -> None:
    buffer[:n].fill_(False)
    buffer[n:].fill_(True)


# What the buffer holds


@left_alone("True below the boundary and False from it on")
def inverted(x, n):
    x.is_padding[:n].fill_(True)
    x.is_padding[n:].fill_(False)
    prepare(x)


@left_alone("True below the boundary and False from it on")
def inverted_comparison(x, n):
    prepare(x)
    x.is_padding.copy_(indices(x) < n)


@left_alone("True below the boundary and False from it on")
def inverted_part(x, n):
    x.is_padding[:12][:n] = True
    x.is_padding[n:12] = False
    prepare(x)


@left_alone("keeps what it held between the False and the True part")
def gap(x, n):
    x.is_padding[:n].fill_(False)
    x.is_padding[n + 1 :].fill_(True)
    prepare(x)


@left_alone("keeps what it held between the False and the True part")
def gap_from_the_end(x, n):
    x.is_padding[:n] = False
    x.is_padding[-3:] = True
    prepare(x)


@left_alone("more than once")
def hole_in_the_tail(x, n):
    fill(x.is_padding, n)
    x.is_padding[n + 1 : n + 3] = False
    prepare(x)


@left_alone("more than once")
def entry_set_in_the_head(x, n):
    fill(x.is_padding, n)
    x.is_padding[0] = True
    prepare(x)


@left_alone("more than once")
def last_entry_cleared(x, n):
    fill(x.is_padding, n)
    x.is_padding[-1] = False
    prepare(x)


@left_alone("more than once")
def ends_kept(x, n):
    x.is_padding[1:n] = True
    x.is_padding[n:-1] = False
    x.is_padding[n + 2 : -1] = True
    prepare(x)


@left_alone("holds what is copied from the input")
def head_of_another_buffer(x, n):
    x.is_padding[:n] = x.other[:n]
    x.is_padding[n:] = True
    prepare(x)


@left_alone("holds what is copied from the input")
def shifted_in_itself(x, n):
    x.is_padding[2:5] = x.is_padding[:3].clone()
    x.is_padding[n:] = True
    prepare(x)


@left_alone("can't be proven: it comes from gt")
def tail_computed(x, n):
    x.is_padding[:n] = False
    x.is_padding[n:] = x.positions[n:] > 3
    prepare(x)


@left_alone("can't be proven: it comes from slice_scatter")
def every_second_entry(x, n):
    x.is_padding.zero_()
    x.is_padding[n::2] = True
    prepare(x)


@left_alone("can't be proven: it comes from ge")
def number_on_the_device(x, n):
    """The boundary that the op without ``num_tokens`` reads; not proven to be the same."""
    x.is_padding.copy_(indices(x) >= x.query_start_loc[-1])
    prepare(x)


@left_alone("can't be proven: it comes from ge")
def rounded_indices(x, n):
    """Above 2048 float16 has no odd numbers."""
    x.is_padding.copy_(indices(x, dtype=torch.float16) >= n)
    prepare(x)


@left_alone("can't be proven: it comes from ge")
def number_with_a_fraction(x, n):
    x.is_padding.copy_(indices(x) >= n + 0.5)
    prepare(x)


@left_alone("can't be proven: it comes from eq")
def equal_to(x, n):
    x.is_padding.copy_(indices(x) == n)
    prepare(x)


@left_alone("can't be proven: it comes from")
def every_third_index(x, n):
    x.is_padding.copy_(indices(x) * 3 >= n)
    prepare(x)


@left_alone("can't be proven: it comes from")
def indices_backwards(x, n):
    x.is_padding.copy_(torch.arange(15, -1, -1, device=x.is_padding.device) < 16 - n)
    prepare(x)


@left_alone("can't be proven: it comes from")
def flipped(x, n):
    x.is_padding.copy_((indices(x) < 16 - n).flip(0))
    prepare(x)


@left_alone("can't be proven: it comes from")
def padded_by_pad(x, n):
    x.is_padding.copy_(F.pad(x.is_padding.new_zeros(n), (0, 16 - n), value=True))
    prepare(x)


@left_alone("can't be proven: it comes from index_put")
def scattered(x, n):
    x.is_padding.fill_(True)
    x.is_padding[x.input_ids] = False
    prepare(x)


@left_alone("can't be proven: it comes from where")
def masked_by_another_buffer(x, n):
    fill(x.is_padding, n)
    x.is_padding.masked_fill_((indices(x) >= n) & x.other, False)
    prepare(x)


@left_alone("more than once")
def opposite_of_a_fill(x, n):
    fill(x.is_padding, n)
    x.is_padding[:2].logical_not_()
    prepare(x)


# Which buffer it is


def with_buffer(x: Batch, buffer: torch.Tensor, n: int) -> torch.Tensor:
    fill(buffer, n)
    prepare(x)
    return buffer


@left_alone("is torch.uint8, not bool")
def bytes_not_bools(x, n):
    with_buffer(x, x.is_padding.view(torch.uint8), n)


@left_alone("has 2 dims, not one")
def two_dims(x, n):
    rows = x.is_padding
    rows[:, :n].fill_(False)
    rows[:, n:].fill_(True)
    prepare(x)


@left_alone("is made inside the graph")
def made_inside_and_returned(x, n):
    return with_buffer(x, torch.empty(16, dtype=torch.bool, device=x.is_padding.device), n)


@left_alone("is made inside the graph")
def made_inside_and_read(x, n):
    mask = torch.ones_like(x.is_padding)
    mask[:n] = False
    prepare(x)
    return torch.where(mask, 0, x.positions)


@left_alone("several buffers")
def two_buffers(x, n):
    fill(x.is_padding, n)
    fill(x.other, n)
    prepare(x)


@left_alone("several buffers")
def two_buffers_with_two_numbers(x, n):
    fill(x.other, n + 1)
    prepare(x)
    fill(x.is_padding, n)


@left_alone("several buffers", "several buffers")
def two_calls_with_two_buffers(x, n):
    fill(x.is_padding, n)
    prepare(x)
    fill(x.other, n)
    prepare(x._replace(positions=x.input_ids))


@left_alone("several buffers")
def two_buffers_cleared(x, n):
    x.is_padding.zero_()
    x.other.fill_(True)
    prepare(x)


# Who else reads and writes


@left_alone("an argument of the op depends on slice_scatter")
def argument_from_the_fill(x, n):
    fill(x.is_padding, n)
    prepare(x._replace(idx_mapping=x.idx_mapping * x.is_padding[:3]))


@left_alone("an argument of the op depends on slice_scatter")
def argument_from_half_a_fill(x, n):
    x.is_padding[:n].fill_(False)
    computed = x.num_computed_tokens + x.is_padding.sum().int()
    x.is_padding[n:].fill_(True)
    prepare(x._replace(num_computed_tokens=computed))


@left_alone("an argument of the op depends on ge")
def argument_from_the_mask(x, n):
    mask = indices(x) >= n
    x.is_padding.copy_(mask)
    prepare(x._replace(query_start_loc=x.query_start_loc - mask[:4].int()))


@left_alone("held before is read by sum")
def old_contents_read_after_the_op(x, n):
    prepare(x)
    old = x.is_padding.sum()
    fill(x.is_padding, n)
    return old


@left_alone("held before is read by")
def half_filled_read_after_the_op(x, n):
    prepare(x)
    x.is_padding[:n].fill_(False)
    half = x.is_padding.sum() + x.positions.sum()
    x.is_padding[n:].fill_(True)
    return half


@left_alone("held before is read by")
def old_contents_kept(x, n):
    old = x.is_padding.clone()
    fill(x.is_padding, n)
    prepare(x)
    return torch.where(old, x.positions, 0)


@left_alone("is also written by prepare_positions_padding")
def also_the_padding_of_another_call(x, n):
    prepare_positions(*x[:5], is_padding=x.is_padding, num_tokens=3)
    x.is_padding.fill_(True)
    x.is_padding[:n] = False
    prepare(x)


@left_alone("can't be proven: it comes from prepare_positions_padding")
def filled_over_another_call(x, n):
    prepare_positions(*x[:5], is_padding=x.is_padding, num_tokens=3)
    x.is_padding[n:] = True
    prepare(x)


@left_alone("runs on another stream")
def another_stream(x, n):
    with torch.fx.traceback.annotate({"stream": 1}):
        fill(x.is_padding, n)
    prepare(x)


# No reason: nothing could be rewritten


@left_alone()
def padding_given(x, n):
    prepare_positions(*x[:5], is_padding=x.is_padding, num_tokens=n)


@left_alone()
def no_fill(x, n):
    prepare(x)


@left_alone()
def no_op(x, n):
    fill(x.is_padding, n)


@left_alone()
def computed_buffer(x, n):
    x.is_padding.copy_(x.positions > n)
    x.other.logical_or_(x.is_padding)
    prepare(x)


@left_alone()
def copied_buffer(x, n):
    x.is_padding.copy_(x.other)
    prepare(x)


@left_alone()
def mask_of_indices(x, n):
    """Common, and no buffer."""
    mask = indices(x) >= n
    prepare(x)
    return torch.where(mask, 0, x.positions)
