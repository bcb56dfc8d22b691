// Events: states, exits, settings; requests only if asked for, because they have a view.

import { Component, html } from "../html.js";
import { isOfRequest } from "../live/store.js";
import { EventTable, LEVELS, isOfModel, modelOptions } from "../parts/event_table.js";
import { Check, Choice, Filter } from "../parts/field.js";

export class Events extends Component {
  state = { filter: "", levels: "", model: "", hasRequests: false };

  isWanted(event) {
    const { filter, levels, model, hasRequests } = this.state;
    return (hasRequests || !isOfRequest(event)) && isOfModel(event, model)
      && (!levels || levels.split(" ").includes(event.level))
      && (!filter || JSON.stringify(event).toLowerCase().includes(filter.toLowerCase()));
  }

  render({ store, live }, { filter, levels, model, hasRequests }) {
    const rows = store.events.filter((event) => this.isWanted(event)).reverse();
    return html`
      <h1>Events</h1>
      <div class="fields">
        <${Filter} label="Filter" value=${filter} onInput=${(value) => this.setState({ filter: value })} />
        <${Choice} label="Level" value=${levels} options=${LEVELS} onChange=${(value) => this.setState({ levels: value })} />
        <${Choice} label="Model" value=${model} options=${modelOptions(live)} onChange=${(value) => this.setState({ model: value })} />
        <${Check} label="Requests" value=${hasRequests} onChange=${(value) => this.setState({ hasRequests: value })} />
        <span class="quiet count">${rows.length} of ${store.events.length} events</span>
      </div>
      <${EventTable} caption="Events, newest first" rows=${rows} />`;
  }
}
