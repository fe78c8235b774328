"""A llama.cpp server in a process of its own, for tests: python tests/llama_server.py GGUF PORT none|ngram|draft|synthetic KEY."""
from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import xllamacpp
    path, port, mode, key = sys.argv[1:5]
    kinds = xllamacpp.common_speculative_type
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.hostnames, params.port, params.endpoint_metrics = ["127.0.0.1"], int(port), True
    params.model_alias, params.api_keys = {"smol"}, [key]
    if mode == "ngram":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, 8
    elif mode in ("draft", "synthetic"):
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path, params.speculative.draft.n_max = path, 5
        params.speculative.draft.cpuparams.n_threads = params.speculative.draft.cpuparams_batch.n_threads = 1
        if mode == "synthetic":
            params.speculative.synth_rates = [.8, .55, .35, .2, .1]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while os.getppid() != 1:                    # ends with the test that started it
        time.sleep(0.5)
