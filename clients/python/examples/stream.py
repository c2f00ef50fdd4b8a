"""Stream an answer, then look at its account.   python stream.py [TARGET]"""

import sys

import mlxstream

with mlxstream.Client(*sys.argv[1:2]) as client:
    stream = client.stream([{"role": "user", "content": "Name three rivers."}], max_tokens=60, temperature=0.7, seed=1)
    for text in stream:
        print(text, end="", flush=True)
    print()
    print(f"{stream.finish_reason}: {stream.usage.generated_tokens} tokens, {stream.stats.decode_tps:.1f} per second")
