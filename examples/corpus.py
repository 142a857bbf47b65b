"""The text of the example pair: checked, split and tokenised."""

import hashlib
import json
import lzma
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PAIR = Path(__file__).parent / "pair"
END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"

HELD_OUT = 0.1
MIN_SPLIT_CHARS = 2000


def read_corpus(folder: Path = PAIR) -> list[str]:
    """The documents of the shipped text; ValueError if it is not the recorded one."""
    record = json.loads((folder / "corpus.json").read_text())
    data = lzma.decompress((folder / record["file"]).read_bytes())
    digest = hashlib.sha256(data).hexdigest()
    if digest != record["sha256"]:
        raise ValueError(f"corpus has SHA-256 {digest}, recorded is {record['sha256']}")
    return data.decode().split("\f")


def split_corpus(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out texts: the last tenth of every document, cut between paragraphs.

    Short documents stay whole, as their last tenth would be no more than a sentence.
    """
    train, held_out = [], []
    for document in documents:
        cut = len(document)
        if cut >= MIN_SPLIT_CHARS:
            cut = document.rfind("\n\n", 0, int(cut * (1 - HELD_OUT)))
            held_out.append(document[cut:].strip("\n"))
        train.append(document[:cut])
    return train, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; the end of a text is token 0, the mask of a draft block token 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tensor]:
    """One i64 [T] tensor for each text, without special tokens."""
    return [torch.tensor(e.ids, dtype=torch.int64) for e in tokenizer.encode_batch(texts)]
