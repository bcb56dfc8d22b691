// What of the Responses API works with the AI SDK's default OpenAI provider.
import assert from 'node:assert'
import { createOpenAI } from '@ai-sdk/openai'
import { generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL })
const COLD = { model: openai('smollm2'), temperature: 0, maxOutputTokens: 60, maxRetries: 0 }
const KEEPS_NOTHING = { providerOptions: { openai: { store: false } } }
const CAPITAL = 'What is the capital of France?'
const get_weather = tool({
  description: 'the weather in a city',
  inputSchema: z.object({ city: z.enum(['Paris']) }),
  execute: async () => 'warm',
})

async function talked(options) {
  const messages = [{ role: 'user', content: CAPITAL }]
  const first = await generateText({ ...COLD, ...options, messages })
  messages.push(...first.response.messages, { role: 'user', content: 'And of Spain?' })
  const second = await generateText({ ...COLD, ...options, messages })
  assert.ok(second.text)
  assert.ok(second.usage.inputTokens > first.usage.inputTokens)
}

const features = {
  async whole() {
    assert.match((await generateText({ ...COLD, prompt: CAPITAL })).text, /Paris/)
  },
  async stream() {
    let text = ''
    const onError = ({ error }) => { throw error }
    const stream = streamText({ ...COLD, prompt: CAPITAL, onError })
    for await (const delta of stream.textStream) text += delta
    assert.match(text, /Paris/)
    assert.equal(await stream.finishReason, 'stop')
    assert.ok((await stream.usage).inputTokens > 0)
  },
  async parse() {
    const output = Output.object({ schema: z.object({ name: z.string() }) })
    assert.ok((await generateText({ ...COLD, prompt: CAPITAL, output })).output.name)
  },
  async tools() {
    const options = { tools: { get_weather }, stopWhen: stepCountIs(2) }
    const stream = streamText({ ...COLD, ...options, prompt: 'Weather in Paris?' })
    const steps = await stream.steps
    const whole = await generateText({ ...COLD, ...options, prompt: 'Weather in Paris?' })
    assert.equal(whole.text, 'It is warm in Paris.')
    assert.deepEqual(steps[0].toolCalls[0].input, { city: 'Paris' })
    assert.equal(steps[0].finishReason, 'tool-calls')
    assert.equal(await stream.text, 'It is warm in Paris.')
  },
  // With tools and a format, the model calls the tool, then answers in the format.
  async combined() {
    const output = Output.object({ schema: z.object({ sky: z.enum(['cold', 'warm']) }) })
    const options = { tools: { get_weather }, stopWhen: stepCountIs(2), output }
    const whole = await generateText({ ...COLD, ...options, prompt: 'Weather in Paris?' })
    assert.deepEqual(whole.steps[0].toolCalls[0].input, { city: 'Paris' })
    assert.deepEqual(whole.output, { sky: 'warm' })
    const stream = streamText({ ...COLD, ...options, prompt: 'Weather in Paris?' })
    const steps = await stream.steps
    assert.equal(steps[0].finishReason, 'tool-calls')
    assert.deepEqual(await stream.output, { sky: 'warm' })
  },
  turns: () => talked(KEEPS_NOTHING),
  stored: () => talked({}),
}

for (const [feature, check] of Object.entries(features)) {
  const result = await check().then(() => 'ok', (error) => `${error.name}: ${error.message}`)
  console.log(JSON.stringify({ feature, result }))
}
