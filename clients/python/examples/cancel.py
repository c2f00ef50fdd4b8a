"""Three ways to end a generation early; each frees the server at once.   python cancel.py [TARGET]"""

import asyncio
import sys

import mlxstream

QUESTION = [{"role": "user", "content": "Tell a story that never ends."}]


async def read(stream: mlxstream.AsyncTextStream) -> None:
    async for _ in stream:
        pass


async def main() -> None:
    async with mlxstream.AsyncClient(*sys.argv[1:2]) as client:
        # 1. Leave the loop.
        async for text in client.stream(QUESTION):
            print(f"left after {text!r}")
            break

        # 2. Cancel the task that reads; a timeout does just that.
        try:
            async with asyncio.timeout(0.5):
                await read(client.stream(QUESTION))
        except TimeoutError:
            print("gave up after half a second")

        # 3. Cancel the stream from somewhere else: its reader stops without an error.
        stream = client.stream(QUESTION)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0.5)
        stream.cancel()
        await reading
        print(f"cancelled after {stream.usage.generated_tokens} tokens")


asyncio.run(main())
