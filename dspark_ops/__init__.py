"""Triton kernels for the draft step of speculative decoding, as ``torch.ops.dspark`` ops.

``warmup`` compiles them before a server serves; ``health`` counts what they tolerate.
"""

import torch

_NEEDED = (2, 11)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _NEEDED:
    raise ImportError(
        f"dspark_ops needs torch {_NEEDED[0]}.{_NEEDED[1]} or newer, found {torch.__version__}"
    )

from dspark_ops._version import VERSION as __version__  # noqa: E402
from dspark_ops.gumbel_block_argmax import gumbel_block_argmax  # noqa: E402
from dspark_ops.gumbel_combine import gumbel_combine  # noqa: E402
from dspark_ops.gumbel_sample import gumbel_sample  # noqa: E402
from dspark_ops.health import health  # noqa: E402
from dspark_ops.markov_loop import markov_loop  # noqa: E402
from dspark_ops.markov_step import markov_step  # noqa: E402
from dspark_ops.prepare_dflash_inputs import prepare_dflash_inputs  # noqa: E402
from dspark_ops.prepare_positions import prepare_positions  # noqa: E402
from dspark_ops.rejection_sample import rejection_sample  # noqa: E402
from dspark_ops.top_k_top_p import top_k_top_p_  # noqa: E402
from dspark_ops.warmup import warmup  # noqa: E402

__all__ = [
    "__version__",
    "gumbel_block_argmax",
    "gumbel_combine",
    "gumbel_sample",
    "health",
    "markov_loop",
    "markov_step",
    "prepare_dflash_inputs",
    "prepare_positions",
    "rejection_sample",
    "top_k_top_p_",
    "warmup",
]
