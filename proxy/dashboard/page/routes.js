// The views, and which one an address means: #requests, #requests/ID.

import { Caches } from "./views/caches.js";
import { ChatView } from "./views/chat.js";
import { Clients } from "./views/clients.js";
import { Events } from "./views/events.js";
import { Logs } from "./views/logs.js";
import { Overview } from "./views/overview.js";
import { Requests } from "./views/requests.js";
import { Usage } from "./views/usage.js";

export const VIEWS = [
  { name: "overview", title: "Overview", key: "1", view: Overview },
  { name: "requests", title: "Requests", key: "2", view: Requests },
  { name: "usage", title: "Usage", key: "3", view: Usage },
  { name: "caches", title: "Caches", key: "4", view: Caches },
  { name: "logs", title: "Logs", key: "5", view: Logs },
  { name: "events", title: "Events", key: "6", view: Events },
  { name: "chat", title: "Chat", key: "7", view: ChatView },
  { name: "clients", title: "Clients", key: "8", view: Clients },
];

export function route(hash) {
  const [name, detail] = hash.replace(/^#\/?/, "").split("/", 2);
  const found = VIEWS.find((view) => view.name === name) ?? VIEWS[0];
  return { ...found, detail: detail ? decodeURIComponent(detail) : null };
}
