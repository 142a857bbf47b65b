"""Spellings of a draft step that are one thing to a user, and must be fused.

Each is a function of `Inputs`. ``FUSED`` has them by name, with the number of their sites.
"""

from .spellings_of_logits import view
from .spellings_of_state import column_write
from .spellings_of_steps import draft_loop, next_embedding
from .step import FUSED, block_op, block_op_uncached, choose, sample

__all__ = [
    "FUSED",
    "block_op",
    "block_op_uncached",
    "choose",
    "column_write",
    "draft_loop",
    "next_embedding",
    "sample",
    "view",
]
