"""Spellings of the fill of a padding buffer that are one thing to a user, and must be fused.

Each is a function of `Batch` and the number of tokens. ``FUSED`` has them by name, with the numbers
of tokens that they work for and the launches that are saved with 6 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .padding_inputs import Batch, prepare

BEYOND = 20  # slices clamp it to the length
EVERY = (6, 9, 0, 16, 1, 15, BEYOND)


@dataclass(frozen=True)
class Spelling:
    function: Callable[[Batch, int], Any]
    launches: int
    numbers: tuple[int, ...]


FUSED: dict[str, Spelling] = {}


def fused(launches: int = 2, numbers: tuple[int, ...] = (6, 9, 0, 16)) -> Any:
    def add(function: Callable[[Batch, int], Any]) -> Callable[[Batch, int], Any]:
        FUSED[function.__name__] = Spelling(function, launches, numbers)
        return function

    return add


def indices(x: Batch, **kwargs: Any) -> torch.Tensor:
    return torch.arange(x.is_padding.shape[0], device=x.is_padding.device, **kwargs)


# The order of the fills and the op


@fused(numbers=EVERY)
def fills(x, n):
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    prepare(x)


@fused()
def tail_first(x, n):
    x.is_padding[n:].fill_(True)
    x.is_padding[:n].fill_(False)
    prepare(x)


@fused(numbers=EVERY)
def op_first(x, n):
    prepare(x)
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)


@fused()
def op_between(x, n):
    x.is_padding[n:].fill_(True)
    prepare(x)
    x.is_padding[:n].fill_(False)


@fused()
def op_as_it_is(x, n):
    torch.ops.dspark.prepare_positions(*x[:5])
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)


# Values and how they are written


@fused(numbers=EVERY)
def setitem(x, n):
    x.is_padding[:n] = False
    x.is_padding[n:] = True
    prepare(x)


@fused()
def setitem_after_the_op(x, n):
    prepare(x)
    x.is_padding[n:] = True
    x.is_padding[0:n] = False


@fused()
def numbers(x, n):
    x.is_padding[:n] = 0
    x.is_padding[n:] = 1
    prepare(x)


@fused()
def tensors(x, n):
    x.is_padding[:n] = torch.tensor(False)
    x.is_padding[n:] = torch.tensor(1)
    prepare(x)


@fused()
def slice_objects(x, n):
    x.is_padding[slice(None, n)].zero_()
    x.is_padding[slice(n, None)].fill_(1)
    prepare(x)


@fused(numbers=(6, 9, 0, 16, 1))
def narrow(x, n):
    x.is_padding.narrow(0, 0, n).zero_()
    x.is_padding.narrow(0, n, x.is_padding.shape[0] - n).fill_(True)
    prepare(x)


@fused(numbers=(6, 9, 1))
def split(x, n):
    head, tail = x.is_padding.split([n, x.is_padding.shape[0] - n])
    head.fill_(False)
    tail.fill_(True)
    prepare(x)


@fused(numbers=(6, 9, 0, 16, 1))
def copied_constants(x, n):
    x.is_padding[:n].copy_(torch.zeros(n, dtype=torch.bool, device=x.is_padding.device))
    x.is_padding[n:].copy_(torch.ones((), dtype=torch.bool, device=x.is_padding.device))
    prepare(x)


@fused(launches=3, numbers=(6, 9, 1))
def expanded_constants(x, n):
    x.is_padding[:n].copy_(torch.zeros(1, dtype=torch.bool, device=x.is_padding.device).expand(n))
    x.is_padding[n:] = x.is_padding.new_ones(())
    prepare(x)


@fused(launches=3, numbers=(6, 9, 0, 16, 1))
def concatenated(x, n):
    like = {"dtype": torch.bool, "device": x.is_padding.device}
    head = torch.zeros(n, **like)
    tail = torch.ones(x.is_padding.shape[0] - n, **like)
    x.is_padding[:] = torch.cat([head, tail])
    prepare(x)


# Whole, then a part


@fused(numbers=EVERY)
def whole_then_head(x, n):
    x.is_padding.fill_(True)
    x.is_padding[:n].fill_(False)
    prepare(x)


@fused(numbers=EVERY)
def whole_then_tail(x, n):
    x.is_padding.zero_()
    prepare(x)
    x.is_padding[n:] = True


@fused()
def whole_by_slice(x, n):
    x.is_padding[:] = True
    x.is_padding[:n] = False
    prepare(x)


@fused()
def whole_by_ellipsis(x, n):
    x.is_padding[...] = False
    x.is_padding[n:] = True
    prepare(x)


@fused()
def whole_copied(x, n):
    x.is_padding.copy_(torch.full_like(x.is_padding, True))
    x.is_padding[:n] = False
    prepare(x)


@fused(launches=3)
def negated_tail(x, n):
    x.is_padding.zero_()
    x.is_padding[n:].logical_not_()
    x.is_padding[n:] = x.is_padding[n:]
    prepare(x)


@fused(launches=3)
def written_twice(x, n):
    x.is_padding.copy_(x.other)
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    x.is_padding[n:].fill_(True)
    prepare(x)


@fused(launches=3, numbers=EVERY)
def in_three_parts(x, n):
    x.is_padding[: n // 2] = False
    x.is_padding[n // 2 : n] = False
    x.is_padding[n:] = True
    prepare(x)


@fused(launches=3, numbers=(6, 9, 0, 1))
def overlapping_parts(x, n):
    x.is_padding[n:] = True
    x.is_padding[: n + 2] = True
    x.is_padding[:n] = False
    prepare(x)


@fused(launches=3, numbers=(6, 9, 1, 15))
def one_entry_more(x, n):
    x.is_padding[: n + 1].fill_(False)
    x.is_padding[n + 1 :].fill_(True)
    x.is_padding[n] = True
    prepare(x)


@fused(launches=3, numbers=(6,))
def one_by_one(x, n):
    x.is_padding.fill_(True)
    x.is_padding[0] = False
    x.is_padding[1].zero_()
    prepare(x)


@fused(launches=16, numbers=(6,))
def in_a_loop(x, n):
    for t in range(x.is_padding.shape[0]):
        x.is_padding[t] = t >= 6
    prepare(x)


@fused(numbers=(6,))
def last_three(x, n):
    x.is_padding[:-3].fill_(False)
    x.is_padding[-3:].fill_(True)
    prepare(x)


@fused(numbers=(6, 9, 1))
def counted_from_the_end(x, n):
    num_padding = x.is_padding.shape[0] - n
    x.is_padding[:-num_padding].fill_(False)
    x.is_padding[-num_padding:].fill_(True)
    prepare(x)


@fused(numbers=(6, 9, 0, 16, 1))
def end_beyond(x, n):
    x.is_padding[: n + 100].fill_(True)
    x.is_padding[-100:n].fill_(False)
    prepare(x)


# Masks that are computed


@fused(numbers=EVERY)
def compared(x, n):
    x.is_padding.copy_(indices(x) >= n)
    prepare(x)


@fused()
def compared_out(x, n):
    torch.ge(indices(x), n, out=x.is_padding)
    prepare(x)


@fused(launches=3)
def compared_setitem(x, n):
    x.is_padding[:] = ~(indices(x) < n)
    prepare(x)


@fused(launches=3)
def logical_not_of_below(x, n):
    x.is_padding.copy_((indices(x) < n).logical_not())
    prepare(x)


@fused()
def counted_from_one(x, n):
    length = x.is_padding.shape[0]
    x.is_padding.copy_(torch.arange(1, length + 1, device=x.is_padding.device) > n)
    prepare(x)


@fused()
def number_first(x, n):
    x.is_padding.copy_(n <= indices(x))
    prepare(x)


@fused()
def number_above(x, n):
    prepare(x)
    x.is_padding.copy_(n - 1 < indices(x))


@fused(launches=4)
def as_integers(x, n):
    x.is_padding.copy_((indices(x) >= n).int())
    prepare(x)


@fused(launches=3, numbers=(6, 9, 0, 16))
def compared_tail(x, n):
    x.is_padding[:n] = False
    x.is_padding[n:] = indices(x)[n:] >= 0
    prepare(x)


@fused(launches=4)
def masked_fill(x, n):
    x.is_padding.zero_()
    x.is_padding.masked_fill_(indices(x) >= n, True)
    prepare(x)


@fused(launches=4)
def masked_setitem(x, n):
    x.is_padding.fill_(True)
    x.is_padding[indices(x) < n] = False
    prepare(x)


@fused(launches=3)
def where(x, n):
    x.is_padding.copy_(torch.where(indices(x) < n, False, True))
    prepare(x)


@fused(launches=4)
def logical_or(x, n):
    x.is_padding.zero_()
    x.is_padding.logical_or_(indices(x) >= n)
    prepare(x)


@fused(launches=4)
def bitwise_and(x, n):
    x.is_padding.fill_(True)
    x.is_padding.bitwise_and_(indices(x) >= n)
    prepare(x)


# A part of the buffer, and views of it


@fused(numbers=(6, 9, 0, 12, 1, BEYOND))
def first_entries(x, n):
    padded = x.is_padding[:12]
    padded[:n].fill_(False)
    padded[n:].fill_(True)
    prepare(x)


@fused(numbers=(6, 9, 0, 1))
def first_entries_in_one_slice(x, n):
    x.is_padding[:n] = False
    x.is_padding[n:12] = True
    prepare(x)


@fused(numbers=(6, 9, 0, 15))
def first_entries_symbolic(x, n):
    padded = x.is_padding[: n + 4]
    padded.fill_(True)
    padded[:n].zero_()
    prepare(x)


@fused(numbers=(6, 9, 0, 10, 1))
def middle_entries(x, n):
    middle = x.is_padding[2:][:10]
    middle[:n].fill_(False)
    middle[n:].fill_(True)
    prepare(x)


@fused()
def last_entries(x, n):
    x.is_padding[4:].fill_(True)
    x.is_padding[4:][:n].fill_(False)
    prepare(x)


@fused(launches=1)
def head_alone(x, n):
    x.is_padding[: n + 1].fill_(False)
    prepare(x)


@fused(launches=1, numbers=(6, 9, 0, 1))
def tail_alone(x, n):
    x.is_padding[n:].fill_(True)
    prepare(x)


@fused()
def through_views(x, n):
    x.is_padding.view(-1)[:n].fill_(False)
    x.is_padding.view(4, -1).flatten()[n:].fill_(True)
    prepare(x)


@fused()
def through_a_row(x, n):
    x.is_padding.unsqueeze(0).squeeze(0)[:n] = False
    x.is_padding[None].view(-1)[n:] = True
    prepare(x)


@fused()
def positions_in_part(x, n):
    x.is_padding[:n] = False
    x.is_padding[n:] = True
    prepare(x._replace(positions=x.positions[:8], seq_lens=x.seq_lens[1:]))


# The number of tokens


@fused()
def clamped(x, n):
    n = min(n, x.is_padding.shape[0])
    x.is_padding[:n] = False
    x.is_padding[n:] = True
    prepare(x)


@fused()
def doubled(x, n):
    x.is_padding[: 2 * n].fill_(False)
    x.is_padding[2 * n :].fill_(True)
    prepare(x)


@fused()
def from_a_shape(x, n):
    num_tokens = x.input_ids.shape[0]
    x.is_padding[:num_tokens] = False
    x.is_padding[num_tokens:] = True
    prepare(x)


# Who else reads and writes


@fused(numbers=EVERY)
def half_filled_read(x, n):
    x.is_padding[:n].fill_(False)
    half = x.is_padding.sum()
    x.is_padding[n:].fill_(True)
    prepare(x)
    return half


@fused()
def half_filled_copied(x, n):
    x.is_padding[n:].fill_(True)
    half = x.is_padding.clone()
    x.is_padding[:n].fill_(False)
    prepare(x)
    return half


@fused()
def read_before_the_op(x, n):
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    read = torch.where(x.is_padding, -1, x.positions)
    prepare(x)
    return read, x.positions + 1


@fused()
def read_after_the_op(x, n):
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    prepare(x)
    return torch.where(x.is_padding, 0, x.positions), x.is_padding.sum()


@fused()
def returned(x, n):
    prepare(x)
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    return x.is_padding, x.is_padding[3:], x.positions


@fused()
def old_contents_read_first(x, n):
    old = x.is_padding.sum()
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    prepare(x)
    return old


@fused()
def length_read(x, n):
    x.is_padding[:n].fill_(False)
    tail = x.is_padding[n:]
    tail.fill_(True)
    prepare(x)
    return x.positions.new_ones(tail.shape[0]), tail.shape[0]


@fused()
def mask_used_elsewhere(x, n):
    mask = indices(x) >= n
    x.is_padding.copy_(mask)
    prepare(x)
    return torch.where(mask, 3, x.positions)


@fused(numbers=(6, 9, 1))
def another_buffer_cleared(x, n):
    """All the same: not the padding."""
    x.other.fill_(True)
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    prepare(x)


@fused()
def another_buffer_computed(x, n):
    x.other.copy_(x.positions > 3)
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
    prepare(x)


@fused()
def written_again_by_the_next_op(x, n):
    """The buffer is filled once, at the end; both calls stand before it."""
    prepare(x)
    x.positions.add_(1)
    x.is_padding[:n].fill_(False)
    x.is_padding[n:].fill_(True)
