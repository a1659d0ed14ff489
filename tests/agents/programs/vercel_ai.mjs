// Holds a conversation with the ai package through each of several providers.

import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createDeepSeek } from "@ai-sdk/deepseek";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const root = process.env.ANTHROPIC_BASE_URL;
const openai = createOpenAI({ baseURL: `${root}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "local", baseURL: `${root}/v1` });
const anthropic = createAnthropic({ baseURL: `${root}/v1`, apiKey: "none" });
const deepseek = createDeepSeek({ baseURL: `${root}/v1`, apiKey: "none" });
const weather = tool({
  description: "The weather at places.",
  inputSchema: z.object({ place: z.string(), days: z.record(z.string(), z.number().int()) }),
  execute: async ({ days }) => `sunny for ${JSON.stringify(days)}`,
});

async function converse(name, model) {
  const messages = [];
  for (let number = 0; number < 5; number++) {
    messages.push({ role: "user", content: `Question ${number}?` });
    const stop = new AbortController();
    const result = streamText({
      model,
      messages,
      system: "Be kind.",
      tools: { weather },
      stopWhen: stepCountIs(3),
      abortSignal: stop.signal,
      onError: ({ error }) => {
        throw error;
      },
    });
    if (number === 2) {
      for await (const part of result.fullStream) {
        if (part.type === "start-step") stop.abort();
      }
      continue;
    }
    await result.consumeStream();
    const steps = await result.steps;
    assert.deepEqual(
      steps.map((step) => step.finishReason),
      ["tool-calls", "stop"],
      name,
    );
    assert.ok(await result.text, name);
    messages.push(...(await result.response).messages);
  }
}

await converse("responses", openai("gpt-5"));
await converse("chat", openai.chat("gpt-5"));
await converse("compatible", compatible("local-model"));
await converse("anthropic", anthropic("claude-opus-4-5"));
await converse("deepseek", deepseek("deepseek-reasoner"));
