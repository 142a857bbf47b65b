"""The target of the example pair: a small causal transformer.

Pre-norm blocks of rotary attention and a gated MLP; the embedding is also the language model head.
Shape letters: B rows, T tokens, L context tokens, Q queries, K keys, H hidden size, V vocabulary.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TransformerConfig:
    """What both models of the pair have in common; read from and written to `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    intermediate_size: int = 344
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    dropout: float = 0.0

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the fields this class knows; other keys of the file are left to other readers."""
        values = json.loads(path.read_text())
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class TargetConfig(TransformerConfig):
    model_type: str = "dspark_example_target"
    tie_word_embeddings: bool = True
    eos_token_id: int = 0


def rotary_angles(positions: Tensor, head_size: int, theta: float) -> Tensor:
    """Angles fp32 [..., 1, T, D/2] of integer positions [..., T], broadcast over heads."""
    frequency = theta ** (
        -torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    )
    return (positions.unsqueeze(-1).float() * frequency).unsqueeze(-3)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the halves of x [B, heads, T, D] by angles [B or 1, 1, T, D/2], computed in fp32."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Multi-head attention whose keys may come from elsewhere than its queries."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def keys_values(self, memory: Tensor, angles: Tensor) -> KeysValues:
        """Keys and values [B, heads, K, D] of memory [B, K, H]."""
        return rotate(self._heads(self.k_proj(memory)), angles), self._heads(self.v_proj(memory))

    def forward(
        self, x: Tensor, angles: Tensor, keys_values: KeysValues, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from x [B, Q, H]. mask: bool [B or 1, 1, Q, K], True where a query may look;
        None is causal for equally many queries and keys and sees every key otherwise."""
        q = rotate(self._heads(self.q_proj(x)), angles)
        k, v = keys_values
        causal = mask is None and q.shape[2] == k.shape[2]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The modules of one pre-norm block; each model wires them up to its own attention pattern."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)
        self.dropout = nn.Dropout(config.dropout)


class Target(nn.Module):
    """Causal language model that also hands out the hidden states its draft reads."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def hidden_states(
        self, tokens: Tensor, cache: list[KeysValues] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Normed output [B, T, H] and the output [B, T, H] of every layer.

        tokens: i64 [B, T]. cache: keys and values of earlier tokens, one pair a layer or empty at
        the first call, extended in place; a later call takes one token a row.
        """
        start = cache[0][0].shape[2] if cache else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        head_size = self.config.hidden_size // self.config.num_attention_heads
        angles = rotary_angles(positions, head_size, self.config.rope_theta)
        x = self.dropout(self.embedding(tokens))
        outputs = []
        for i, layer in enumerate(self.layers):
            normed = layer.input_norm(x)
            k, v = layer.attention.keys_values(normed, angles)
            if cache is not None:
                if start:
                    k, v = torch.cat((cache[i][0], k), dim=2), torch.cat((cache[i][1], v), dim=2)
                    cache[i] = k, v
                else:
                    cache.append((k, v))
            x = x + layer.dropout(layer.attention(normed, angles, (k, v)))
            x = x + layer.dropout(layer.mlp(layer.mlp_norm(x)))
            outputs.append(x)
        return self.norm(x), outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """Language model head: [..., H] -> [..., V]."""
        return F.linear(hidden, self.embedding.weight)

    def forward(self, tokens: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """tokens i64 [B, T] -> logits [B, T, V], outputs of layer_ids side by side [B, T, F]."""
        hidden, outputs = self.hidden_states(tokens)
        return self.logits(hidden), torch.cat([outputs[i] for i in layer_ids], dim=-1)
