"""What a run needs of an SGLang server, over a model that finds all tokens equally likely: it starts in no time.

Run as a program with a port; it serves until it is killed.
"""

from __future__ import annotations

import json
import math
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIRST_PRINTABLE, VOCABULARY = 8, 104
"""Of the tests' tokenizer."""
INFO = {
    "dp_size": 1, "speculative_algorithm": None, "dtype": "float32", "max_req_input_len": 512, "version": "uniform",
    "disable_overlap_schedule": True, "disable_radix_cache": True, "enable_custom_logit_processor": False,
    "enable_fp32_lm_head": False, "sampling_mask_max_tokens": 0, "tp_size": 1, "chunked_prefill_size": None,
}  # fmt: skip
LOGPROB = -math.log(VOCABULARY)


class Weights:
    label = "-1"
    going = threading.Event()


def answer(tokens: list[int], wanted: dict[str, Any]) -> dict[str, Any]:
    count = wanted["sampling_params"]["max_new_tokens"]
    said = [random.randrange(FIRST_PRINTABLE, VOCABULARY) for _ in range(count)]
    spans = [{"version": Weights.label, "start": 0, "end": count}] if count else []
    meta = {
        "finish_reason": {"type": "length"}, "output_token_logprobs": [[LOGPROB, token, None] for token in said],
        "weight_versions": spans, "prompt_tokens": len(tokens), "cached_tokens": 0, "num_retractions": 0,
        "input_token_logprobs": [[LOGPROB, token, None] for token in tokens],
        "output_token_ids_logprobs": [[[LOGPROB, 0, None]]],
    }  # fmt: skip
    return {"output_ids": said, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(INFO if self.path == "/server_info" else {"loads": [{"token_usage": 0.0}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.path:
            case "/generate":
                Weights.going.wait()
                tokens = body["input_ids"]
                self.reply(
                    answer(tokens, body) if isinstance(tokens[0], int) else [answer(row, body) for row in tokens]
                )
            case "/pause_generation":
                Weights.going.clear()
                self.reply({})
            case "/continue_generation":
                Weights.going.set()
                self.reply({})
            case "/update_weights_from_tensor":
                Weights.label = body.get("weight_version", Weights.label)
                self.reply({})
            case _:
                self.reply({})

    def reply(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    Weights.going.set()
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
