// Server-sent events of a response's body. Source: HTML Standard, 9.2.6; `event` and `data` of one line are read.

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "message";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") name = "message";
      else if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ") && line !== "data: [DONE]") {
        yield { name, data: JSON.parse(line.slice(6)) };
      }
    }
  }
}
