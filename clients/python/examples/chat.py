"""A conversation: the client keeps the turns, the model's template makes the prompt.   python chat.py [TARGET]"""

import sys

import mlxstream

turns = [{"role": "system", "content": "Answer in one sentence."}]

with mlxstream.Client(*sys.argv[1:2]) as client:
    for question in ("What is the capital of France?", "And which river runs through it?"):
        turns.append({"role": "user", "content": question})
        answer = client.generate(turns, max_tokens=60).text
        turns.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")

    try:
        client.generate(turns, temperature=-1)
    except mlxstream.InvalidRequestError as error:
        for violation in error.violations:
            print(f"{violation.field} {violation.description}")
