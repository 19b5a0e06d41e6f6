/* Vercel's AI SDK: a `ToolLoopAgent` with three tools, asked one thing after the other.

node ai_sdk.mjs URL '["a request", "another"]'
*/

import { execSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ToolLoopAgent, tool } from "ai";
import { z } from "zod";

const [URL, asked] = process.argv.slice(2);

const read_file = tool({
  description: "Read a file.",
  inputSchema: z.object({ path: z.string() }),
  execute: ({ path }) => readFileSync(path, "utf8"),
});

const edit_file = tool({
  description: "Replace a text in a file by another.",
  inputSchema: z.object({ path: z.string(), old: z.string(), new: z.string() }),
  execute: ({ path, old, new: text }) => {
    const before = readFileSync(path, "utf8");
    writeFileSync(path, before.replace(old, () => text));
    return before.includes(old) ? "done" : "the old text is not there";
  },
});

const run_command = tool({
  description: "Run a command and return what it prints.",
  inputSchema: z.object({ command: z.string() }),
  execute: ({ command }) => execSync(command, { encoding: "utf8" }),
});

const kvcellar = createOpenAICompatible({ name: "kvcellar", baseURL: `${URL}/v1`, apiKey: "none" });
const agent = new ToolLoopAgent({
  model: kvcellar("local"),
  instructions: "You change programs.",
  tools: { read_file, edit_file, run_command },
});
const messages = [];
for (const request of JSON.parse(asked)) {
  messages.push({ role: "user", content: request });
  const result = await agent.stream({ messages });
  for await (const text of result.textStream) process.stdout.write(text);
  messages.push(...(await result.responseMessages));
}
