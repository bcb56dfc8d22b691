// The views, and which one an address means: #requests, #requests/ID.

import { Caches } from "./views/caches.js";
import { ChatView } from "./views/chat.js";
import { Clients } from "./views/clients.js";
import { Events } from "./views/events.js";
import { Logs } from "./views/logs.js";
import { Machines } from "./views/machines.js";
import { ModelsView } from "./views/models.js";
import { Overview } from "./views/overview.js";
import { Requests } from "./views/requests.js";
import { Usage } from "./views/usage.js";

export const VIEWS = [
  { name: "overview", title: "Overview", view: Overview },
  { name: "chat", title: "Chat", view: ChatView },
  { name: "models", title: "Models", view: ModelsView },
  { name: "requests", title: "Requests", view: Requests },
  { name: "usage", title: "Usage", view: Usage },
  { name: "caches", title: "Caches", view: Caches },
  { name: "logs", title: "Logs", view: Logs },
  { name: "events", title: "Events", view: Events },
  { name: "clients", title: "Clients", view: Clients },
  { name: "machines", title: "Machines", view: Machines, needs: "nodes" },
].map((view, at) => ({ ...view, key: String((at + 1) % 10) }));

// The views for which there is something to show.
export function viewsOf(live) {
  return VIEWS.filter(({ needs }) => !needs || Object.keys(live?.[needs] ?? {}).length > 0);
}

export function route(hash) {
  const [name, detail] = hash.replace(/^#\/?/, "").split("/", 2);
  const found = VIEWS.find((view) => view.name === name) ?? VIEWS[0];
  return { ...found, detail: detail ? decodeURIComponent(detail) : null };
}
