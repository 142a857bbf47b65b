"""The draft of the example pair: a block backbone in DFlash's manner and a vanilla Markov head.

One parallel forward reads the target's hidden states of the context and gives base logits for N
steps at once; the Markov head then makes step i depend on the token drawn at step i - 1:

    logits_i = base_i + W2 @ W1[token_{i-1}]

The query of the anchor, the token that the target drew last, predicts draft token 1, so a block of
N queries [anchor, mask, ..., mask] drafts N tokens.
Shape letters: B rows, A anchors a row, N draft steps, L context tokens, H hidden size, V
vocabulary, R Markov rank, F = H * number of target layers read.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from target_model import Layer, RMSNorm, Target, TargetConfig, TransformerConfig, rotary_angles


@dataclass(frozen=True)
class DraftConfig(TransformerConfig):
    """target_layer_ids: the target's layers, from 0, whose outputs the draft reads side by side."""

    num_hidden_layers: int = 2
    model_type: str = "dspark_example_draft"
    block_size: int = 7
    mask_token_id: int = 1
    sample_from_anchor: bool = True
    target_layer_ids: tuple[int, ...] = (1, 2, 3)
    draft_vocab_size: int = 4096
    markov_head_type: str = "vanilla"
    markov_rank: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if self.markov_head_type != "vanilla":
            raise ValueError(f"markov_head_type must be 'vanilla', got {self.markov_head_type!r}")
        if not self.sample_from_anchor:
            raise ValueError("sample_from_anchor must be true: N queries draft N tokens here")
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must equal vocab_size, got {self.draft_vocab_size} "
                f"and {self.vocab_size}"
            )


class Draft(nn.Module):
    """Block backbone and Markov head. Embedding and language model head are the target's."""

    lm_head: Tensor

    def __init__(self, config: DraftConfig, lm_head: Tensor) -> None:
        """lm_head: the target's tied embedding [V, H], shared and so not in the state dict."""
        super().__init__()
        self.config = config
        self.register_buffer("lm_head", lm_head, persistent=False)
        features = config.hidden_size * len(config.target_layer_ids)
        self.context_proj = nn.Linear(features, config.hidden_size, bias=False)
        self.context_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_w1 = nn.Parameter(torch.empty(config.vocab_size, config.markov_rank))
        self.markov_w2 = nn.Parameter(torch.empty(config.draft_vocab_size, config.markov_rank))

    def backbone(self, anchor: Tensor, position: Tensor, context_hidden: Tensor) -> Tensor:
        """Base logits [B, A, N, V] of one block for each anchor.

        anchor: i64 [B, A], token ids. position: i64 [B, A], where the anchors stand in their rows.
        context_hidden: [B, L, F], the target's hidden states of positions 0..L-1; a block reads
        those before its anchor, so later ones may hold anything finite. A is 1 when drafting;
        training packs many anchors of a text into one row, each blind to the others.
        """
        config = self.config
        rows, anchors = anchor.shape
        n, length, device = config.block_size, context_hidden.shape[1], anchor.device

        block = torch.full((rows, anchors, n), config.mask_token_id, device=device)
        block[:, :, 0] = anchor
        x = F.embedding(block.flatten(1), self.lm_head)  # [B, A*N, H]
        context = self.context_norm(self.context_proj(context_hidden))  # [B, L, H]

        context_positions = torch.arange(length, device=device)
        positions = (position.unsqueeze(-1) + torch.arange(n, device=device)).flatten(1)  # [B, A*N]
        memory_positions = torch.cat((context_positions.expand(rows, -1), positions), dim=1)
        head_size = config.hidden_size // config.num_attention_heads
        angles = rotary_angles(positions, head_size, config.rope_theta)
        memory_angles = rotary_angles(memory_positions, head_size, config.rope_theta)

        block_ids = torch.arange(anchors, device=device).repeat_interleave(n)
        same_block = (block_ids[:, None] == block_ids).expand(rows, -1, -1)
        before_anchor = context_positions < position.repeat_interleave(n, dim=1).unsqueeze(-1)
        mask = torch.cat((before_anchor, same_block), dim=-1).unsqueeze(1)  # [B, 1, A*N, L + A*N]

        for layer in self.layers:
            normed = layer.input_norm(x)
            memory = torch.cat((context, normed), dim=1)
            keys_values = layer.attention.keys_values(memory, memory_angles)
            x = x + layer.dropout(layer.attention(normed, angles, keys_values, mask))
            x = x + layer.dropout(layer.mlp(layer.mlp_norm(x)))
        return F.linear(self.norm(x), self.lm_head).unflatten(1, (anchors, n))

    def markov_bias(self, prev: Tensor) -> Tensor:
        """Bias [..., V] that follows the previous tokens prev, i64 [...]."""
        return F.linear(F.embedding(prev, self.markov_w1), self.markov_w2)


@dataclass(frozen=True)
class Pair:
    target: Target
    draft: Draft
    folder: Path


def load_pair(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Pair:
    """Read target and draft from a checkpoint folder, ready for inference."""
    folder = Path(folder)
    target = Target(TargetConfig.load(folder / "target/config.json"))
    target.load_state_dict(load_file(folder / "target/model.safetensors"))
    target.to(device, dtype).eval().requires_grad_(False)
    config = DraftConfig.load(folder / "draft/config.json")
    draft = Draft(config, target.embedding.weight.detach())
    draft.load_state_dict(load_file(folder / "draft/model.safetensors"))
    draft.to(device, dtype).eval().requires_grad_(False)
    return Pair(target, draft, folder)
