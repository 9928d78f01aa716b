"""What tests of episodes share: a small vocabulary, and a model that writes tags now and then."""

import numpy as np
import torch

from rlinf.workers.engines.models import ModelSpec, build_model
from rlinf.workers.episodes.codec import TextCodec
from rlinf.workers.episodes.episode import Language
from rlinf.workers.episodes.turn_format import TurnFormat
from rlinf.workers.roles import GenerationRequest, Sampling

FORMAT = TurnFormat(["search"])
CODEC = TextCodec.trained(
    ["who wrote it? Paris is the capital of France."], 300, ["<pad>", "<end>", *FORMAT.tags]
)
LANGUAGE = Language(CODEC, FORMAT)
PAD, END = 0, 1


def token(text):
    found = CODEC.token(text)
    assert found is not None
    return found


SPOKEN = [token(t) for t in ("<search>", "</search>", "<answer>", "</answer>")]
SPOKEN += CODEC.encode("who wrote Paris")
SAMPLING = Sampling(
    temperature=4.0,
    stop_ids=(END,),
    banned_ids=tuple(i for i in range(CODEC.size) if i not in SPOKEN),
)
"""Of a few tokens only, so that random weights write a call or an answer now and then."""


def request(uid, n=1, max_new_tokens=60, prompt="who wrote it?"):
    ids = np.array(CODEC.encode(prompt), np.int32)
    return GenerationRequest(uid, ids, n, max_new_tokens, SAMPLING)


def random_model(seed=0):
    model = build_model(ModelSpec(vocab_size=CODEC.size, hidden_size=32, seed=seed))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
