/** A conversation: the client keeps the turns, the model's template makes the prompt.   node dist/examples/chat.js [TARGET] */

import { type ChatMessage, connect, MlxStreamError } from "mlx-stream-client";

const client = connect(process.argv[2]);
const turns: ChatMessage[] = [{ role: "system", content: "Answer in one sentence." }];

for (const question of ["What is the capital of France?", "And which river runs through it?"]) {
  turns.push({ role: "user", content: question });
  const { text } = await client.generate(turns, { maxTokens: 60 });
  turns.push({ role: "assistant", content: text });
  console.log(`> ${question}\n${text}`);
}

try {
  await client.generate(turns, { temperature: -1 });
} catch (error) {
  if (!(error instanceof MlxStreamError)) throw error;
  for (const { field, description } of error.violations) console.log(`${field} ${description}`);
}
await client.close();
