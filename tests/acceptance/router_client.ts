// Uses a server in router mode as the pi coding agent does; prints a line of JSON for each check.
import { Server } from "pi-llama-cpp/src/server.ts";

const settings: any = {
  resolveApiKey: () => "none",
  resolveTimeouts: async () => ({ serverTimeout: 3000, pollingTimeout: 20000 }),
};
const url = process.argv[2];
const server = new Server(settings, { baseUrl: url });

async function check(name: string, holds: () => Promise<boolean>): Promise<void> {
  let result: string;
  try {
    result = (await holds()) ? "ok" : "no";
  } catch (error) {
    result = String(error);
  }
  console.log(JSON.stringify({ check: name, result }));
}

async function states(): Promise<string[]> {
  const page: any = await (await fetch(`${url}/v1/models`)).json();
  return page.data.map((one: any) => one.status.value);
}

await check("mode", async () => {
  await server.initialize();
  return server.models.length === 2 && server.models.every((one) => one.mode === "router");
});
await check("looking", async () => {
  for (const model of server.models) {
    await model.getStatus();
    await model.toProviderConfig();
  }
  return (await states()).every((state) => state === "unloaded");
});
const model = server.models[0];
const progress: number[] = [];
await check("load", async () => {
  server.sseManager.subscribeToProgress(model.id, (percent) => progress.push(percent));
  await model.load();
  return (await states())[0] === "loaded";
});
await check("progress", async () => progress.includes(100));
await check("chat", async () => {
  const body = { model: model.id, max_tokens: 4, messages: [{ role: "user", content: "hello" }] };
  const answer: any = await (
    await fetch(`${url}/v1/chat/completions`, { method: "POST", body: JSON.stringify(body) })
  ).json();
  return answer.choices[0].message.content.length > 0;
});
await check("unload", async () => {
  await model.unload();
  while ((await states())[0] !== "unloaded") await new Promise((go) => setTimeout(go, 50));
  return true;
});
server.sseManager.disconnect();
process.exit(0);
