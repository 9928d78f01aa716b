"""Chat templates, for prompts that are only ever appended to."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.workers.errors import ConfigError

__all__ = ["generation_prompt"]

Message = Mapping[str, str]


def generation_prompt(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The text after which the assistant writes, of a transformers tokenizer's template.

    What an episode adds follows it token by token, and the template is not asked again. That is
    right only where the template itself would leave what was said as it is.

    Raises:
        ConfigError: There is no template, or with a reply it writes something else before it.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"the tokenizer {type(tokenizer).__name__} has no chat template")

    def rendered(said: Sequence[Message], *, begin: bool) -> str:
        return str(
            tokenizer.apply_chat_template(list(said), tokenize=False, add_generation_prompt=begin)
        )

    prompt = rendered(messages, begin=True)
    reply = {"role": "assistant", "content": "<think>a</think><answer>b</answer>"}
    following = [reply, {"role": "user", "content": "c"}]
    for more in ([reply], [reply, *following[1:]]):
        whole = rendered([*messages, *more], begin=False)
        if not whole.startswith(prompt + reply["content"]):
            raise ConfigError(
                "the chat template is not a prefix of itself: with a reply it writes "
                f"{_difference(prompt, whole)}; what was said would not be what is trained on"
            )
    return prompt


def _difference(prompt: str, whole: str) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt)
    )
    return f"{whole[same : same + 40]!r} where it wrote {prompt[same : same + 40]!r}"
