"""A tokenizer of the `tokenizers` library, made here or a pretrained one's, as episodes need it."""

from collections.abc import Iterable, Sequence
from typing import Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["TextCodec"]


class TextCodec:
    """A `Codec`. `rules` is what `Tokenizer.to_str` gives."""

    def __init__(self, rules: str) -> None:
        self._tokenizer = Tokenizer.from_str(rules)
        self._plain = Tokenizer.from_str(rules)
        self._plain.encode_special_tokens = True
        for tokenizer in (self._tokenizer, self._plain):
            tokenizer.no_padding()
            tokenizer.no_truncation()

    @classmethod
    def trained(cls, texts: Iterable[str], size: int, control: Sequence[str]) -> Self:
        """A byte-level BPE of `size` tokens, those of `control` first, learnt from `texts`."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(control),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    @property
    def rules(self) -> str:
        """All of it as text, from which it can be made again."""
        return str(self._tokenizer.to_str())

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self._tokenizer.get_vocab_size())

    def token(self, text: str) -> int | None:
        """The id of a token by its own text; None where there is none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of our own text, in which control tokens count."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """See `Codec`."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Codec`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def vocabulary(self) -> Sequence[str]:
        """See `Codec`."""
        return self._tokenizer.decode_batch(
            [[i] for i in range(self.size)], skip_special_tokens=False
        )
