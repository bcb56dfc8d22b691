// Whether everything is well, and the cure of each problem.

const TROUBLED = new Set(["backoff", "unhealthy", "degraded", "failed"]);

// `tone` is that of a state; each problem has a `subject`, a `message`, and maybe a `hint`, the `model` to load again,
// the `log` that tells more, and `again_at_s`, when the daemon tries again by itself.
export function health({ server, models, instances, nodes = {} }) {
  const problems = [...modelProblems(models, instances), ...instanceProblems(models, instances), ...nodeProblems(nodes)];
  const tone = server.state === "stopping" ? "busy" : worst(problems);
  return { tone, problems, sentence: sentence(server, models, problems) };
}

function modelProblems(models, instances) {
  const failed = Object.entries(models).filter(([, model]) => model.state === "failed");
  return failed.map(([name, { cause, is_local }]) => {
    const instance = Object.values(instances).find((found) => found.model === name && found.error);
    return { tone: "bad", subject: name, message: instance?.error.message ?? cause ?? "failed",
      hint: instance?.error.hint, model: is_local ? name : null, log: instance?.run ? logOf(name, instances) : null };
  });
}

function instanceProblems(models, instances) {
  return Object.entries(instances).flatMap(([name, { model, state, error, warnings, retry_at_s }]) => {
    const warned = (warnings ?? []).map((message) => ({ tone: "warn", subject: name, message, log: name }));
    if (!TROUBLED.has(state) || models[model]?.state === "failed") return warned;
    return [{ tone: "warn", subject: name, message: error?.message ?? `is ${state}`, hint: error?.hint, log: name,
      again_at_s: retry_at_s }, ...warned];
  });
}

function nodeProblems(nodes) {
  return Object.entries(nodes)
    .filter(([, { reason }]) => reason)
    .map(([name, { reason }]) => ({ tone: "warn", subject: `node ${name}`, message: reason }));
}

function logOf(model, instances) {
  return Object.keys(instances).find((name) => instances[name].model === model);
}

function worst(problems) {
  if (problems.some((problem) => problem.tone === "bad")) return "bad";
  return problems.length ? "warn" : "good";
}

function sentence(server, models, problems) {
  if (server.state === "stopping") return "The daemon is stopping";
  const failed = problems.filter((problem) => problem.tone === "bad").length;
  if (failed) return `${failed} of ${Object.keys(models).length} models failed`;
  if (problems.length) return problems.length === 1 ? "1 warning" : `${problems.length} warnings`;
  return "All is well";
}
