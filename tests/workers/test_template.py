"""Prompts from chat templates, which are only ever appended to."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlinf.workers.episodes.template import generation_prompt
from rlinf.workers.errors import ConfigError

ASKED = [{"role": "user", "content": "who?"}]
PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS_THOUGHTS = PLAIN.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
NUMBERS = PLAIN.replace("<|{{ m['role'] }}|>", "<|{{ m['role'] }} of {{ messages|length }}|>")


def tokenizer(template):
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    made.chat_template = template
    return made


def test_the_prompt_ends_where_the_assistant_begins():
    assert generation_prompt(tokenizer(PLAIN), ASKED) == "<|user|>who?<|end|><|assistant|>"


@pytest.mark.parametrize("template", [FORGETS_THOUGHTS, NUMBERS])
def test_a_template_that_rewrites_what_was_said_is_refused(template):
    with pytest.raises(ConfigError, match="not a prefix of itself"):
        generation_prompt(tokenizer(template), ASKED)


def test_no_template_is_an_error():
    with pytest.raises(ConfigError, match="no chat template"):
        generation_prompt(tokenizer(None), ASKED)
