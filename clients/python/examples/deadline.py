"""Every call has a deadline: fail at it, or take what there is by then.   python deadline.py [TARGET]"""

import sys

import mlxstream

QUESTION = [{"role": "user", "content": "Tell a story that never ends."}]

with mlxstream.Client(*sys.argv[1:2]) as client:
    try:
        client.generate(QUESTION, timeout_seconds=1)
    except mlxstream.DeadlineExceededError as error:
        print(f"failed: {error.code.name}")

    received = []
    try:
        for text in client.stream(QUESTION, timeout_seconds=1):
            received.append(text)  # noqa: PERF402 - what arrived before the deadline is kept
    except mlxstream.DeadlineExceededError:
        print(f"got {len(''.join(received))} characters in one second")
