"""Streams that survive: by themselves, and from where another process stopped.   python resume.py [TARGET]"""

import sys

import mlxstream

QUESTION = [{"role": "user", "content": "Tell a story that never ends."}]

with mlxstream.Client(*sys.argv[1:2]) as client:
    # A durable stream goes on by itself when its connection is lost or its server restarts: every token comes once.
    stream = client.stream(QUESTION, max_tokens=100, durable=True)
    after_sequence = 0
    for event in stream.events():
        print(event.chunk.text, end="", flush=True)
        after_sequence = event.sequence
        if stream.usage.generated_tokens >= 20:
            break  # this frees the row; what was computed is kept for a while

    # Whoever knows these two can go on, in another process too.
    generation_id = stream.started.generation_id
    print(f"\nresume {generation_id} after {after_sequence}")
    for text in client.resume(generation_id, after_sequence=after_sequence):
        print(text, end="", flush=True)
    print()
