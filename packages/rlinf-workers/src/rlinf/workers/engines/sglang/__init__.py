"""SGLang as a rollout engine: its server over HTTP, or its `Engine` in this process.

Needs the extra `rlinf-workers[sglang]`; only the in-process engine imports sglang.
"""
