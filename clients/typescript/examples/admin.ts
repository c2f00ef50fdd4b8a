/** What an operator asks: load, live generations, adapters.   node dist/examples/admin.js [TARGET] [TOKEN] */

import { AdminService, connect } from "mlx-stream-client";

const client = connect(process.argv[2], { token: process.argv[3] });
const admin = AdminService.method;

const load = await client.call(admin.getLoad, {});
console.log(`${load.running} running, ${load.queued} of ${load.queueLimit} queued, ${load.decodeTps.toFixed(1)} tokens per second`);
for (const one of (await client.call(admin.listGenerations, { pageSize: 100 })).generations) {
  console.log(`${one.generationId}: ${one.generatedTokens} tokens`);
}
for (const { id, rank } of (await client.call(admin.listAdapters, {})).adapters) console.log(`adapter ${id} of rank ${rank}`);
await client.close();
