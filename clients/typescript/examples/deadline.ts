/** Every call has a deadline: fail at it, or take what there is by then.   node dist/examples/deadline.js [TARGET] */

import { connect, MlxStreamError } from "mlx-stream-client";
import { DeadlinePolicy } from "mlx-stream-client/v1/delivery";

const QUESTION = [{ role: "user", content: "Tell a story that never ends." }];
const client = connect(process.argv[2]);

try {
  await client.generate(QUESTION, { timeoutSeconds: 1 });
} catch (error) {
  if (!(error instanceof MlxStreamError && error.kind === "deadline_exceeded")) throw error;
  console.log(error.message);
}

const partial = { deadlinePolicy: DeadlinePolicy.PARTIAL_RESULT };
const result = await client.generate(QUESTION, { timeoutSeconds: 1, delivery: partial });
console.log(`${result.finishReason}: ${result.text.length} characters in one second`);
await client.close();
