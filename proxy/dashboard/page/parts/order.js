// Members of an object that is keyed by names, in the order people expect: chat.9 before chat.10.

const NAMES = new Intl.Collator("en", { numeric: true });

export function byName(members) {
  return Object.entries(members)
    .sort(([one], [other]) => NAMES.compare(one, other))
    .map(([name, member]) => ({ name, ...member }));
}

export function byAge(members) {
  return Object.entries(members)
    .map(([id, member]) => ({ id, ...member }))
    .sort((one, other) => one.began_at_s - other.began_at_s);
}
