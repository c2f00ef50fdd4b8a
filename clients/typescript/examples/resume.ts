/** Streams that survive: by themselves, and from where another process stopped.   node dist/examples/resume.js [TARGET] */

import { connect } from "mlx-stream-client";

const client = connect(process.argv[2]);
const QUESTION = [{ role: "user", content: "Tell a story that never ends." }];

// A durable stream goes on by itself when its connection is lost or its server restarts; no token is lost or doubled.
const stream = client.stream(QUESTION, { maxTokens: 100, delivery: { durable: true } });
let received = 0;
for await (const { event } of stream.events()) {
  if (event.case === "chunk") process.stdout.write(event.value.text);
  received += 1;
  if (received === 20) break; // this frees the row; what was computed is kept for a while
}

// Whoever knows these two can go on, in another process too.
const [generationId, afterSequence] = [stream.started?.generationId ?? "", stream.sequence];
console.log(`\nresume ${generationId} after ${afterSequence}`);
for await (const text of client.resume(generationId, afterSequence)) process.stdout.write(text);
console.log();
await client.close();
