/** Three ways to end a generation early; each frees the server at once.   node dist/examples/cancel.js [TARGET] */

import { connect } from "mlx-stream-client";

const QUESTION = [{ role: "user", content: "Tell a story that never ends." }];
const client = connect(process.argv[2]);

// 1. Leave the loop.
for await (const text of client.stream(QUESTION)) {
  console.log(`left after ${JSON.stringify(text)}`);
  break;
}

// 2. Abort a signal, such as one with a time limit: the reader gets the signal's reason, as with fetch.
try {
  for await (const _ of client.stream(QUESTION, { signal: AbortSignal.timeout(500) }));
} catch (error) {
  console.log(`gave up: ${error}`);
}

// 3. Cancel the stream from somewhere else: its reader stops without an error.
const stream = client.stream(QUESTION);
setTimeout(() => stream.cancel(), 500);
for await (const _ of stream);
console.log(`cancelled after ${stream.usage.generatedTokens} tokens`);
await client.close();
