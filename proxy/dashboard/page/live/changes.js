// What a screen reader is told of: changes of state, never of figures.

export function changes(before, after) {
  if (!before) return [];
  return [
    ...stateChanges("Model", before.models, after.models),
    ...stateChanges("Instance", before.instances, after.instances),
  ];
}

function stateChanges(kind, before = {}, after = {}) {
  return Object.entries(after)
    .filter(([name, one]) => before[name] && before[name].state !== one.state)
    .map(([name, one]) => `${kind} ${name} is ${one.state}${one.cause ? `: ${one.cause}` : ""}`);
}
