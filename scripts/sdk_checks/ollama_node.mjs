// What of Ollama's API works with ollama-js; OLLAMA_HOST names the server.
import assert from 'node:assert'
import { Ollama } from 'ollama'

const client = new Ollama({ host: process.env.OLLAMA_HOST })
const options = { temperature: 0, num_predict: 60, num_ctx: 8192 }
const COLD = { model: 'smollm2', options }
const CAPITAL = [{ role: 'user', content: 'What is the capital of France?' }]
const TOOL = {
  type: 'function',
  function: {
    name: 'get_weather',
    description: 'the weather in a city',
    parameters: {
      type: 'object',
      properties: { city: { type: 'string', enum: ['Paris'] } },
      required: ['city'],
    },
  },
}

async function textOf(stream, read) {
  let text = ''
  let last
  for await (const part of stream) {
    text += read(part)
    last = part
  }
  assert.equal(last.done, true)
  assert.ok(last.eval_count > 0)
  return text
}

const features = {
  async whole() {
    const answer = await client.chat({ ...COLD, messages: CAPITAL })
    assert.match(answer.message.content, /Paris/)
    assert.equal(answer.done_reason, 'stop')
  },
  async stream() {
    const stream = await client.chat({ ...COLD, messages: CAPITAL, stream: true })
    assert.match(await textOf(stream, (part) => part.message.content), /Paris/)
  },
  async parse() {
    const format = { type: 'object', properties: { name: { type: 'string' } }, required: ['name'] }
    const answer = await client.chat({ ...COLD, messages: CAPITAL, format })
    assert.ok(JSON.parse(answer.message.content).name)
  },
  async tools() {
    const messages = [{ role: 'user', content: 'Weather in Paris?' }]
    const { message } = await client.chat({ ...COLD, messages, tools: [TOOL] })
    assert.deepEqual(message.tool_calls[0].function.arguments, { city: 'Paris' })
    messages.push(message, { role: 'tool', tool_name: 'get_weather', content: 'warm' })
    const answer = await client.chat({ ...COLD, messages, tools: [TOOL] })
    assert.equal(answer.message.content, 'It is warm in Paris.')
  },
  // With tools and a format, the model calls the tool, then answers in the format.
  async combined() {
    const sky = { type: 'string', enum: ['cold', 'warm'] }
    const format = { type: 'object', properties: { sky }, required: ['sky'] }
    const messages = [{ role: 'user', content: 'Weather in Paris?' }]
    const { message } = await client.chat({ ...COLD, messages, tools: [TOOL], format })
    assert.deepEqual(message.tool_calls[0].function.arguments, { city: 'Paris' })
    messages.push(message, { role: 'tool', tool_name: 'get_weather', content: 'warm' })
    const whole = await client.chat({ ...COLD, messages, tools: [TOOL], format })
    assert.deepEqual(JSON.parse(whole.message.content), { sky: 'warm' })
    const stream = await client.chat({ ...COLD, messages, tools: [TOOL], format, stream: true })
    const text = await textOf(stream, (part) => part.message.content)
    assert.deepEqual(JSON.parse(text), { sky: 'warm' })
  },
  async turns() {
    const { message } = await client.chat({ ...COLD, messages: CAPITAL })
    const messages = [...CAPITAL, message, { role: 'user', content: 'And of Spain?' }]
    assert.ok((await client.chat({ ...COLD, messages })).message.content)
  },
  async generate() {
    const stream = await client.generate({ ...COLD, prompt: CAPITAL[0].content, stream: true })
    assert.match(await textOf(stream, (part) => part.response), /Paris/)
  },
  async embed() {
    const { embeddings } = await client.embed({ model: 'vectors', input: ['abc', 'xyz'] })
    assert.equal(embeddings.length, 2)
    assert.ok(embeddings[0].length > 100)
  },
  async models() {
    const { models } = await client.list()
    assert.deepEqual(models.map((one) => one.name), ['smollm2:latest', 'vectors:latest'])
    assert.ok((await client.show({ model: 'smollm2' })).capabilities.includes('tools'))
    assert.ok((await client.ps()).models.length)
    assert.equal((await client.pull({ model: 'smollm2' })).status, 'success')
  },
}

for (const [feature, check] of Object.entries(features)) {
  let result = 'ok'
  try {
    await check()
  } catch (error) {
    result = String(error).split('\n')[0]
  }
  console.log(JSON.stringify({ feature, result }))
}
