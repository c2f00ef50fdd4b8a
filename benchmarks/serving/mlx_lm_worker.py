"""mlx-lm's own `stream_generate` without a network, one request at a time: JSON lines in, timelines out.

Run by the peer's interpreter through `launch_peer`, with the model's folder as its argument.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Answer until the input ends."""
    from mlx_lm import load, stream_generate
    from mlx_lm.sample_utils import make_sampler

    model, tokenizer = load(sys.argv[1])[:2]
    greedy = make_sampler(temp=0.0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        timelines = []
        for prompt in request["prompts"]:
            sent_at = time.monotonic()
            stream = stream_generate(model, tokenizer, prompt, max_tokens=request["max_tokens"], sampler=greedy)
            timelines.append({"sent_at": sent_at, "arrivals": [(time.monotonic(), 1) for _ in stream]})
        sys.stdout.write(json.dumps(timelines) + "\n")
        sys.stdout.flush()
