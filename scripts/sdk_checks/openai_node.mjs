// What of the Responses API works with openai-node; OPENAI_BASE_URL names the server.
import assert from 'node:assert'
import OpenAI from 'openai'
import { zodTextFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI({ maxRetries: 0 })
const COLD = { model: 'smollm2', temperature: 0, max_output_tokens: 60 }
const CAPITAL = 'What is the capital of France?'
const TOOL = {
  type: 'function',
  name: 'get_weather',
  strict: true,
  parameters: {
    type: 'object',
    properties: { city: { type: 'string', enum: ['Paris'] } },
    required: ['city'],
    additionalProperties: false,
  },
}

const features = {
  async whole() {
    const response = await client.responses.create({ ...COLD, input: CAPITAL })
    assert.match(response.output_text, /Paris/)
  },
  async stream() {
    let text = ''
    const stream = client.responses.stream({ ...COLD, input: CAPITAL })
    stream.on('response.output_text.delta', (event) => { text += event.delta })
    const response = await stream.finalResponse()
    assert.match(text, /Paris/)
    assert.equal(response.output_text, text)
  },
  async parse() {
    const format = zodTextFormat(z.object({ name: z.string() }), 'city')
    const whole = await client.responses.parse({ ...COLD, input: CAPITAL, text: { format } })
    const streamed = client.responses.stream({ ...COLD, input: CAPITAL, text: { format } })
    assert.ok(whole.output_parsed.name)
    assert.ok((await streamed.finalResponse()).output_parsed.name)
  },
  async tools() {
    const input = [{ role: 'user', content: 'Weather in Paris?' }]
    const stream = client.responses.stream({ ...COLD, input, tools: [TOOL], tool_choice: 'required' })
    const { output } = await stream.finalResponse()
    const call = output.find((item) => item.type === 'function_call')
    assert.deepEqual(JSON.parse(call.arguments), { city: 'Paris' })
    const result = { type: 'function_call_output', call_id: call.call_id, output: 'warm' }
    input.push(call, result)
    const answer = await client.responses.create({ ...COLD, input, tools: [TOOL] })
    assert.equal(answer.output_text, 'It is warm in Paris.')
  },
  // With tools and a format, the model calls the tool, then answers in the format.
  async combined() {
    const format = zodTextFormat(z.object({ sky: z.enum(['cold', 'warm']) }), 'weather')
    const input = [{ role: 'user', content: 'Weather in Paris?' }]
    const options = { ...COLD, input, tools: [TOOL], text: { format } }
    const [call] = (await client.responses.parse(options)).output
    assert.equal(call.type, 'function_call')
    const [streamed] = (await client.responses.stream(options).finalResponse()).output
    assert.equal(streamed.arguments, call.arguments)
    input.push({ type: 'function_call', call_id: call.call_id, name: call.name, arguments: call.arguments })
    input.push({ type: 'function_call_output', call_id: call.call_id, output: 'warm' })
    const whole = await client.responses.parse(options)
    assert.deepEqual(whole.output_parsed, { sky: 'warm' })
    const answer = await client.responses.stream(options).finalResponse()
    assert.deepEqual(answer.output_parsed, { sky: 'warm' })
  },
  async turns() {
    const input = [{ role: 'user', content: CAPITAL }]
    const first = await client.responses.create({ ...COLD, input, store: false })
    input.push(...first.output, { role: 'user', content: 'And of Spain?' })
    assert.ok((await client.responses.create({ ...COLD, input, store: false })).output_text)
  },
  async stored() {
    const first = await client.responses.create({ ...COLD, input: CAPITAL })
    const more = { ...COLD, input: 'And of Spain?', previous_response_id: first.id }
    const second = await client.responses.stream(more).finalResponse()
    const found = await client.responses.retrieve(second.id)
    assert.equal(found.output_text, second.output_text)
    await client.responses.delete(second.id)
  },
}

for (const [feature, check] of Object.entries(features)) {
  const result = await check().then(() => 'ok', (error) => `${error.name}: ${error.message}`)
  console.log(JSON.stringify({ feature, result }))
}
