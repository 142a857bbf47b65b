"""The draft step as a user writes it: one parallel forward, then N small steps.

`DraftStep` is what gets compiled; `DraftStep.markov_loop` alone can be compiled as well. Nothing
here is fused by hand: finding the loop and fusing it is the compiler pass's job.
Shape letters: B rows, N draft steps, L context tokens, V vocabulary, S request slots.
"""

import torch.nn.functional as F
from torch import Tensor, nn

import dspark_ops
from draft_model import Draft


class DraftStep(nn.Module):
    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(
        self,
        anchor: Tensor,
        context_hidden: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        pos: Tensor,
        logits_cache: Tensor,
        draft_tokens: Tensor,
    ) -> Tensor:
        """Draft N tokens for every row.

        anchor: i64 [B], the token the target drew last. context_hidden: [B, L, F], the target's
        hidden states of positions 0..L-1; a row reads those before its anchor. idx_mapping: int
        [B, N], the slot of each row in every step, negative for an inert row. temperature f32 [S],
        seeds i64 [S]: by slot. pos: i64 [B, N], the position of each token to be drafted, so the
        anchor stands at pos[:, 0] - 1. logits_cache: [S, N, V] of the logits' dtype, written.
        draft_tokens: i64 [B, N], written and returned.
        """
        base = self.draft.backbone(anchor[:, None], pos[:, :1] - 1, context_hidden)[:, 0]
        return self.markov_loop(
            base, anchor, idx_mapping, temperature, seeds, pos, logits_cache, draft_tokens
        )

    def markov_loop(
        self,
        base: Tensor,
        anchor: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        pos: Tensor,
        logits_cache: Tensor,
        draft_tokens: Tensor,
        biases: list[Tensor] | None = None,
    ) -> Tensor:
        """Sample the N tokens one after the other from base [B, N, V]; the rest as in forward.

        biases, if given, collects the bias [B, V] of every step, for a look at sampler inputs.
        """
        prev = anchor
        for i in range(base.shape[1]):
            bias = F.linear(F.embedding(prev, self.draft.markov_w1), self.draft.markov_w2)
            if biases is not None:
                biases.append(bias)
            logits = base[:, i] + bias
            block_max, block_argmax = dspark_ops.gumbel_block_argmax(
                logits,
                idx_mapping[:, i],
                temperature,
                seeds,
                pos[:, i] - 1,
                logits_cache=logits_cache,
                cache_col=i,
                is_drafting=True,
            )
            best = block_max.argmax(-1, keepdim=True)
            token = block_argmax.gather(-1, best).view(-1)
            draft_tokens[:, i] = token
            prev = token
        return draft_tokens
