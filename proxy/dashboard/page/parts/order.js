// Members of an object that is keyed by names, in the order people expect: chat.9 before chat.10.

const NAMES = new Intl.Collator("en", { numeric: true });

export function byName(members) {
  return Object.entries(members)
    .sort(([first], [second]) => NAMES.compare(first, second))
    .map(([name, member]) => ({ name, ...member }));
}

export function byAge(members) {
  return Object.entries(members)
    .map(([id, member]) => ({ id, ...member }))
    .sort((first, second) => first.began_at_s - second.began_at_s);
}
