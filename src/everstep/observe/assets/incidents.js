// The list of incidents, of which only the rows in sight exist; and what is known of one.
const ROW = 28;

class Incidents {
  constructor(opened) {
    this.opened = opened;
    this.filter = make("input", { type: "search", placeholder: "Filter: kind, rank, text", "aria-label": "Filter incidents", oninput: () => this.find() });
    this.count = make("span", { class: "muted" });
    this.list = make("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Incidents, the oldest first", onkeydown: (event) => this.key(event), onscroll: () => this.draw() });
    this.space = make("div");
    this.list.append(this.space);
    this.details = make("div", { class: "details", role: "region", "aria-label": "Incident", tabindex: "-1", onkeydown: (event) => { if (event.key === "Escape") this.leave(); } });
    this.root = make("div", null, make("div", { class: "tools" }, this.filter, this.count), make("div", { class: "split" }, this.list, this.details));
    this.active = -1;
    this.shown = -1;
    new ResizeObserver(() => this.draw()).observe(this.list);
  }

  update(run) {
    const shown = this.run && this.shown >= 0 ? JSON.stringify(this.run.incidents[this.shown]) : null;
    this.run = run;
    this.find();
    if (this.shown < 0) this.empty();
    else if (JSON.stringify(run.incidents[this.shown]) !== shown) this.fill(this.shown);
  }

  find() {
    const wanted = this.filter.value.trim().toLowerCase(), all = this.run.incidents;
    this.found = [];
    all.forEach((incident, at) => {
      const text = wanted && `${incident.kind} ${incident.ranks.map((rank) => `rank ${rank}`).join(" ")} ${this.run.texts[incident.text]}`.toLowerCase();
      if (!wanted || text.includes(wanted)) this.found.push(at);
    });
    this.count.textContent = wanted ? `${number(this.found.length)} of ${plural(all.length, "incident")}` : plural(all.length, "incident");
    this.space.style.height = `${this.found.length * ROW}px`;
    this.draw();
  }

  draw() {
    if (!this.run) return;
    // A list that has become shorter is scrolled back only with the next frame: rows are drawn for where it will be then.
    const scrolled = Math.min(this.list.scrollTop, Math.max(0, this.found.length * ROW - this.list.clientHeight));
    const top = Math.max(0, Math.floor(scrolled / ROW) - 4), until = Math.min(this.found.length, top + Math.ceil(this.list.clientHeight / ROW) + 8);
    const rows = [];
    for (let place = top; place < until; place++) {
      const at = this.found[place], incident = this.run.incidents[at];
      const row = make("div", { class: "row", role: "option", id: `incident-${at}`, "aria-selected": at === this.active ? "true" : "false", "aria-setsize": this.found.length, "aria-posinset": place + 1, onclick: () => { this.active = at; this.open(at, this.list); } },
        make("span", { class: "when" }, clock(incident.began - this.run.began)), make("span", { class: "kind" }, incident.kind), make("span", null, this.run.texts[incident.text]));
      row.style.top = `${place * ROW}px`;
      rows.push(row);
    }
    this.space.replaceChildren(...rows);
    if (this.active >= 0) this.list.setAttribute("aria-activedescendant", `incident-${this.active}`);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1), last = this.found.length - 1;
    const here = this.found.indexOf(this.active);
    const to = { ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + page, PageUp: here - page, Home: 0, End: last }[event.key];
    if (event.key === "Enter" && this.active >= 0) this.open(this.active, this.list);
    else if (to === undefined || last < 0) return;
    else {
      const place = Math.min(last, Math.max(0, to)), top = place * ROW;
      this.active = this.found[place];
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      else if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
      this.draw();
    }
    event.preventDefault();
  }

  open(at, from) {
    this.from = from;
    this.active = at;
    this.draw();
    this.fill(at);
    this.details.focus({ preventScroll: from === this.list });
    this.opened(at);
  }
  leave() { (this.from || this.list).focus(); }

  empty() {
    const text = this.run.incidents.length ? "Choose an incident, in the list or in the timeline, to see what happened." : "Nothing has gone wrong so far.";
    this.details.replaceChildren(make("p", { class: "muted" }, text));
  }

  fill(at) {
    this.shown = at;
    const incident = this.run.incidents[at], text = (index) => this.run.texts[index] || "", cause = incident.cause;
    const [budget, spent, limit, pause] = incident.budget || [];
    const recovery = incident.recovery;
    const parts = [
      make("h3", null, `${incident.kind}: ${text(incident.text)}`),
      pairs([
        ["began", `${date(incident.began)} (${clock(incident.began - this.run.began)})`],
        ["noticed", incident.seen - incident.began >= 0.001 ? `${duration(incident.seen - incident.began)} later` : ""],
        ["training again", incident.until === null ? (this.run.state === "running" ? "not yet" : "no") : incident.until > incident.began ? `after ${duration(incident.until - incident.began)}` : ""],
        ["rank", incident.ranks.length > 12 ? `${incident.ranks.slice(0, 12).join(", ")} …` : incident.ranks.join(", ")],
        ["host", cause && cause.host], ["exit code", cause && cause.exit], ["signal", cause && cause.signal],
        ["slice", incident.slice], ["on_hang", incident.action],
        ["budget", budget && `${budget}: ${spent}${limit < 0 ? ", no limit" : ` of ${limit}`}${pause ? `, after a pause of ${duration(pause)}` : ""}`],
        ["recovery", recovery && recovery.rung], ["attempt", recovery && recovery.attempt],
        ["steps lost", recovery && recovery.steps_lost], ["state from", recovery && text(recovery.from)], ["kept", recovery && text(recovery.kept)],
        ["note", incident.note],
      ]),
    ];
    if (recovery) parts.push(make("h3", null, `Recovered in ${duration(recovery.seconds)}`), ...phaseBars(recovery));
    const block = (title, index) => { if (index) parts.push(make("h3", null, title), make("pre", { tabindex: "0" }, text(index))); };
    if (cause) block("Traceback", cause.traceback);
    if (incident.stacks) block(`Stacks of all ranks (${incident.stacks})`, incident.stacks_text);
    if (cause) block(`Last lines of the log${cause.log_path ? ` (${cause.log_path})` : ""}`, cause.log);
    const others = incident.others || [];
    if (others.length) {
      const more = incident.more ? ` and ${plural(incident.more, "failure")} that this page leaves out` : "";
      parts.push(make("details", null, make("summary", null, `${plural(others.length, "other failure")} with it${more}`), others.map((each) => other(each, text))));
    }
    this.details.replaceChildren(...parts);
    this.details.scrollTop = 0;
  }
}

function phaseBars(recovery) {
  const longest = Math.max(...recovery.phases.map(([, seconds]) => seconds), 1e-9);
  return recovery.phases.filter(([, seconds]) => seconds >= 0.0005).map(([name, seconds]) => {
    const bar = make("span");
    bar.style.width = `${100 * seconds / longest}%`;
    return make("div", { class: "phase" }, make("span", null, name), bar, make("span", null, duration(seconds)));
  });
}

function other(failure, text) {
  const who = failure.rank !== undefined ? `rank ${failure.rank}: ` : failure.host !== undefined ? `host ${failure.host}: ` : "";
  return make("div", null,
    make("p", null, `${who}${failure.kind}: ${text(failure.text)}${failure.echo ? " (as a consequence)" : ""}`),
    failure.traceback ? make("pre", { tabindex: "0" }, text(failure.traceback)) : null);
}
