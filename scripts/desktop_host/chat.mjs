// One answer of a chat, as it is generated.

/** Yield the pieces of an answer; aborting `signal` ends the request, and the engine stops. */
export async function* answer(backend, model, messages, signal) {
  const response = await fetch(`${backend.ready.url}/v1/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${backend.apiKey}` },
    body: JSON.stringify({ model, messages, stream: true }),
    signal,
  });
  if (!response.ok) {
    throw new Error((await response.json()).error.message);
  }
  let text = "";
  for await (const bytes of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (text + bytes).split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) {
        yield piece(JSON.parse(line.slice("data: ".length)));
      }
    }
  }
}

function piece(event) {
  if (event.error) {
    throw new Error(event.error.message);
  }
  return event.choices?.[0]?.delta?.content ?? "";
}
