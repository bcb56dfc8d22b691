// A part of the page that reads `path` when it appears, and after a failure again every `pause_ms`. `take` gets
// the answer, and calls `wait` if the part is to be read again.

import { get } from "../api.js";
import { Component } from "../html.js";

export class Polling extends Component {
  componentDidMount() {
    this.poll();
  }

  componentWillUnmount() {
    this._isGone = true;
    clearTimeout(this._timer);
  }

  poll() {
    get(this.path).then((found) => this.take(found)).catch(() => this.wait());
  }

  wait() {
    clearTimeout(this._timer);
    if (!this._isGone) this._timer = setTimeout(() => this.poll(), this.pause_ms);
  }
}
