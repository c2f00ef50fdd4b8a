/** Stream an answer, then look at its account.   node dist/examples/stream.js [TARGET] */

import { connect } from "mlx-stream-client";

const client = connect(process.argv[2]);
const stream = client.stream([{ role: "user", content: "Name three rivers." }], { maxTokens: 60, temperature: 0.7, seed: 1n });
for await (const text of stream) process.stdout.write(text);
console.log(`\n${stream.finishReason}: ${stream.usage.generatedTokens} tokens, ${stream.stats?.decodeTps.toFixed(1)} per second`);
await client.close();
