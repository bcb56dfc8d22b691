// Announcements for screen readers: changes of state, never of figures.

export function changes(before, after) {
  if (!before) return [];
  return [
    ...stateChanges("Model", before.models, after.models),
    ...stateChanges("Instance", before.instances, after.instances),
  ];
}

function stateChanges(kind, before = {}, after = {}) {
  return Object.entries(after)
    .filter(([name, item]) => before[name] && before[name].state !== item.state)
    .map(([name, item]) => `${kind} ${name} is ${item.state}${item.cause ? `: ${item.cause}` : ""}`);
}
