// One lane a worker, grouped by slice. Only what is in sight is drawn. A lane shows what its replica group did, so the strip
// of a group is painted once for all of its workers; where a pixel stands for several states, it shows the share of each.
const STATES = ["training", "ending", "starting", "restarting", "waiting", "driver away", "hang", "slow"];
const COLOURS = { "driver away": "away" };
const LANE = 14, HEAD = 20, AXIS = 44, LEFT = 160, BAND = 46;
const LEDGER = { step: "training", "checkpoint stall": "ending", detect: "failed", restart: "restarting", restore: "starting", redo: "lost", hang: "hang", validation: "slow", "waiting for capacity": "waiting", "driver away": "away" };

function patterns(context) {
  const found = {};
  for (const state of STATES) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const ink = tile.getContext("2d");
    ink.fillStyle = colour(COLOURS[state] || state);
    ink.fillRect(0, 0, 6, 6);
    ink.strokeStyle = ink.fillStyle = colour("ink");
    ink.lineWidth = 1.2;
    ink.beginPath();
    if (state === "restarting") { ink.moveTo(-1, 7); ink.lineTo(7, -1); ink.moveTo(-1, 1); ink.lineTo(1, -1); ink.moveTo(5, 7); ink.lineTo(7, 5); }
    if (state === "waiting") { ink.fillRect(1, 1, 2, 2); ink.fillRect(4, 4, 2, 2); }
    if (state === "starting") { ink.moveTo(0, 3); ink.lineTo(6, 3); }
    if (state === "driver away") { ink.moveTo(3, 0); ink.lineTo(3, 6); }
    if (state === "slow") { ink.moveTo(0, 5); ink.lineTo(3, 1); ink.lineTo(6, 5); }
    if (state === "hang") { ink.moveTo(0, 0); ink.lineTo(6, 6); ink.moveTo(0, 6); ink.lineTo(6, 0); }
    ink.stroke();
    found[state] = context.createPattern(tile, "repeat");
  }
  return found;
}

// What a replica group did: its own states where it has some, else the run's.
function merged(run, own) {
  if (!own || !own.length) return run;
  const found = [];
  let i = 0, j = 0, theirs = "", ours = "";
  while (i < run.length || j < own.length) {
    const at = Math.min(i < run.length ? run[i][0] : Infinity, j < own.length ? own[j][0] : Infinity);
    while (i < run.length && run[i][0] <= at) theirs = run[i++][1];
    while (j < own.length && own[j][0] <= at) ours = own[j++][1];
    found.push([at, theirs === "training" && ours ? ours : theirs]);
  }
  return found;
}

class Timeline {
  constructor(open) {
    this.open = open;
    this.axis = make("canvas", { class: "axis", height: AXIS, "aria-hidden": "true" });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.band = make("canvas", { class: "band", height: BAND, role: "img", "aria-label": "Where the time went, over time: the shares of the table below, slice by slice" });
    this.space = make("div");
    this.lanes = make("div", { class: "lanes", tabindex: "0", role: "group", "aria-label": "Timeline: a lane for each worker. Left and right arrow go from incident to incident, Enter opens one, plus and minus zoom, zero shows everything, shift with an arrow moves in time." }, this.space);
    this.space.append(this.canvas);
    const button = (text, label, act) => make("button", { type: "button", "aria-label": label, onclick: act }, text);
    this.range = make("span", { class: "muted" });
    this.tools = make("div", { class: "tools" },
      button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)),
      button("All", "Show everything", () => this.fit()), this.range);
    this.legend = make("ul", { class: "legend" });
    this.root = make("div", null, this.tools, make("div", { class: "timeline" }, this.axis, this.lanes, this.band), this.legend);
    this.lanes.addEventListener("scroll", () => this.later());
    this.lanes.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("click", (event) => this.click(event.offsetX, event.offsetY));
    this.axis.addEventListener("click", (event) => this.clickAxis(event.offsetX));
    for (const canvas of [this.canvas, this.axis, this.band]) {
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
      }, { passive: false });
    }
    new ResizeObserver(() => this.repaint()).observe(this.lanes);
    dark.addEventListener("change", () => { this.legends(); this.repaint(); });
    this.selected = -1;
  }

  update(run) {
    const first = !this.run, all = first || (this.from === this.begin && this.to === this.end);
    this.run = run;
    const track = run.timeline.run, live = run.state === "running";
    const times = [run.began, run.ended, track.length ? track[track.length - 1][0] : null, live ? run.read : null].filter(isNumber);
    this.begin = Math.min(...times);
    this.end = Math.max(...times, this.begin + 1);
    if (all) { this.from = this.begin; this.to = this.end; }
    this.rows = [];
    let slice = null, top = 0;
    for (const lane of run.timeline.lanes) {
      if (lane.slice !== slice) {
        slice = lane.slice;
        if (slice) { this.rows.push({ slice, top, height: HEAD }); top += HEAD; }
      }
      this.rows.push({ lane, top, height: LANE });
      top += LANE;
    }
    this.height = top;
    this.index();
    this.legends();
    this.repaint();
  }

  index() {
    this.byRank = new Map(); this.byHost = new Map(); this.bySlice = new Map();
    const add = (map, key, at) => { const known = map.get(key); if (known) known.push(at); else map.set(key, [at]); };
    this.run.incidents.forEach((incident, at) => {
      for (const rank of incident.ranks) add(this.byRank, rank, at);
      if (!incident.ranks.length && incident.cause && incident.cause.host !== undefined) add(this.byHost, incident.cause.host, at);
      if (incident.slice) add(this.bySlice, incident.slice, at);
    });
  }

  legends() {
    const seen = new Set(this.run.timeline.run.map(([, state]) => state));
    for (const track of Object.values(this.run.timeline.groups)) for (const [, state] of track) seen.add(state);
    if (this.run.incidents.some((incident) => incident.kind === "hang")) seen.add("hang");
    if (this.run.incidents.some((incident) => incident.kind === "straggler")) seen.add("slow");
    const swatch = (state) => {
      const box = make("canvas", { class: "swatch", width: 36, height: 24, "aria-hidden": "true" }), ink = box.getContext("2d");
      ink.fillStyle = patterns(ink)[state];
      ink.fillRect(0, 0, 36, 24);
      return box;
    };
    const mark = (kind) => {
      const box = make("canvas", { class: "swatch", width: 36, height: 24, "aria-hidden": "true" }), ink = box.getContext("2d");
      ink.scale(2, 2);
      drawMark(ink, kind, 9, 6);
      return box;
    };
    const kinds = new Set(this.run.incidents.map((incident) => shapeOf(incident.kind)));
    this.legend.replaceChildren(
      ...STATES.filter((state) => seen.has(state)).map((state) => make("li", null, swatch(state), state)),
      ...[...kinds].map((shape) => make("li", null, mark(shape), SHAPES[shape])));
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }
  repaint() { this.strips = new Map(); this.later(); }

  x(time) { return LEFT + (time - this.from) / (this.to - this.from) * this.width; }
  time(x) { return this.from + (Math.max(LEFT, x) - LEFT) / this.width * (this.to - this.from); }

  fit() { this.from = this.begin; this.to = this.end; this.repaint(); }
  zoom(factor, around) {
    const middle = around ?? (this.selected >= 0 ? this.run.incidents[this.selected].began : (this.from + this.to) / 2);
    const whole = this.end - this.begin, span = Math.min(whole, Math.max(whole / 1e6, 0.05, (this.to - this.from) * factor));
    const share = Math.min(1, Math.max(0, (middle - this.from) / (this.to - this.from)));
    this.show(middle - share * span, span);
  }
  show(from, span) {
    this.from = Math.min(Math.max(this.begin, from), this.end - span);
    this.to = this.from + span;
    this.repaint();
  }

  key(event) {
    const span = this.to - this.from, pan = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
    if (event.shiftKey && pan) this.show(this.from + pan * span, span);
    else if (pan) this.step(Math.sign(pan));
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.selected >= 0) this.open(this.selected, this.lanes);
    else return;
    event.preventDefault();
  }
  step(by) {
    const count = this.run.incidents.length;
    if (!count) return;
    this.select(this.selected < 0 ? (by > 0 ? 0 : count - 1) : Math.min(count - 1, Math.max(0, this.selected + by)));
    const incident = this.run.incidents[this.selected];
    say(`Incident ${this.selected + 1} of ${count}: ${incident.kind}, ${this.run.texts[incident.text]}`);
  }
  select(at) {
    this.selected = at;
    const incident = this.run.incidents[at];
    if (incident && (incident.began < this.from || incident.began > this.to)) {
      const span = this.to - this.from;
      this.show(incident.began - span / 2, span);
    }
    const row = incident && this.rows.find(({ lane }) => lane && incident.ranks.includes(lane.rank));
    if (row && (row.top < this.lanes.scrollTop || row.top > this.lanes.scrollTop + this.lanes.clientHeight - LANE)) {
      this.lanes.scrollTop = row.top - this.lanes.clientHeight / 2;
    }
    this.later();
  }

  click(x, y) {
    const top = y + this.lanes.scrollTop, row = this.rows[firstFrom(this.rows, top + 0.001, (each) => each.top) - 1];
    if (!row) return;
    const near = this.marks(row).filter((at) => Math.abs(this.x(this.run.incidents[at].began) - x) <= 9);
    if (near.length) this.open(this.nearest(near, x), this.lanes);
  }
  clickAxis(x) {
    const from = firstFrom(this.run.incidents, this.time(x - 9), (each) => each.began), near = [];
    for (let at = from; at < this.run.incidents.length && this.x(this.run.incidents[at].began) <= x + 9; at++) near.push(at);
    if (near.length) this.open(this.nearest(near, x), this.lanes);
  }
  nearest(found, x) {
    const distance = (at) => Math.abs(this.x(this.run.incidents[at].began) - x);
    return found.reduce((best, at) => (distance(at) < distance(best) ? at : best));
  }
  marks(row) {
    if (!row.lane) return this.bySlice.get(row.slice) || [];
    // A rank that moved has lanes in several places: an incident belongs to where it was when that was noticed.
    const was = (at) => row.lane.spans.some(([since, until]) => since <= this.run.incidents[at].seen && (until === null || this.run.incidents[at].seen <= until));
    return [...(this.byRank.get(row.lane.rank) || []), ...(this.byHost.get(row.lane.host) || [])].filter(was);
  }

  draw() {
    if (!this.run || !this.lanes.clientWidth) return;
    const sharp = window.devicePixelRatio || 1, wide = this.lanes.clientWidth, high = Math.max(LANE, Math.min(this.height, this.lanes.clientHeight || 460, 460));
    this.width = wide - LEFT - 14;
    this.space.style.height = `${this.height}px`;
    const size = (canvas, height) => {
      canvas.width = wide * sharp; canvas.height = height * sharp;
      canvas.style.width = `${wide}px`; canvas.style.height = `${height}px`;
      const ink = canvas.getContext("2d");
      ink.scale(sharp, sharp);
      ink.font = "11px system-ui, sans-serif";
      ink.textBaseline = "middle";
      return ink;
    };
    this.drawAxis(size(this.axis, AXIS));
    this.drawLanes(size(this.canvas, high), high);
    this.drawBand(size(this.band, BAND));
    this.range.textContent = `${date(this.from)} to ${date(this.to)} (${duration(this.to - this.from)})`;
  }

  drawAxis(ink) {
    const text = colour("muted"), span = this.to - this.from;
    const steps = [0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];
    const step = steps.find((each) => span / each <= 9) || span / 8;
    ink.fillStyle = text;
    ink.fillText("incidents", 8, 32);
    const begin = Math.ceil((this.from - this.begin) / step) * step;
    for (let at = begin; at <= this.to - this.begin; at += step) {
      const x = this.x(this.begin + at);
      ink.fillStyle = text;
      ink.fillText(step < 1 ? `${at.toFixed(2)} s` : clock(at), x + 3, 11);
      ink.fillRect(x, 4, 1, 14);
    }
    let last = -Infinity, drawn = 0;
    const all = this.run.incidents;
    for (let at = firstFrom(all, this.from, (each) => each.began); at < all.length && all[at].began <= this.to; at++) {
      const x = this.x(all[at].began);
      if (x - last < 3) continue;
      last = x; drawn += 1;
      drawMark(ink, shapeOf(all[at].kind), x, 32);
    }
    this.drawSelected(ink, AXIS);
  }

  // Of each slice of time, which share went where. Slices that are narrower than a pixel are drawn together.
  drawBand(ink) {
    const { began, width, slices } = this.run.ledger, high = BAND - 10;
    ink.fillStyle = colour("muted");
    ink.fillText("time by category", 8, BAND / 2);
    if (began === null) return;
    const at = (time) => Math.min(slices.length, Math.max(0, Math.floor((time - began) / width)));
    const wide = Math.max(1, Math.floor(this.width)), second = (this.to - this.from) / this.width;
    for (let x = 0; x < wide; x++) {
      const from = this.from + x * second, shares = {};
      if (from + second <= began) continue;
      let whole = 0;
      for (let i = at(from); i <= at(from + second) && i < slices.length; i++) {
        for (const [name, spent] of Object.entries(slices[i])) { shares[name] = (shares[name] || 0) + spent; whole += spent; }
      }
      let y = 5 + high;
      for (const [name, paint] of Object.entries(LEDGER)) {
        if (!shares[name]) continue;
        const tall = shares[name] / whole * high;
        ink.fillStyle = colour(paint);
        ink.fillRect(LEFT + x, y - tall, 1, tall);
        y -= tall;
      }
    }
  }

  drawSelected(ink, height) {
    const incident = this.run.incidents[this.selected];
    if (!incident) return;
    ink.strokeStyle = colour("focus");
    ink.lineWidth = 1.5;
    ink.strokeRect(this.x(incident.began) - 7, -2, 14, height + 4);
  }

  drawLanes(ink, high) {
    const top = this.lanes.scrollTop, muted = colour("muted"), text = colour("text"), line = colour("line");
    ink.clearRect(0, 0, this.lanes.clientWidth, high);
    this.paints = patterns(ink);
    for (let i = Math.max(0, firstFrom(this.rows, top, (row) => row.top) - 1); i < this.rows.length; i++) {
      const row = this.rows[i], y = row.top - top;
      if (y > high) break;
      if (!row.lane) {
        ink.fillStyle = line; ink.fillRect(0, y, this.lanes.clientWidth, 1);
        ink.fillStyle = text; ink.font = "600 11px system-ui, sans-serif";
        ink.fillText(row.slice, 8, y + HEAD / 2);
        ink.font = "11px system-ui, sans-serif";
      } else {
        ink.fillStyle = muted;
        const { rank, host, slice } = row.lane;
        ink.fillText(`rank ${rank}  ${slice && host.startsWith(`${slice}-`) ? host.slice(slice.length + 1) : host}`, 16, y + LANE / 2);
        ink.clearRect(LEFT - 6, y, this.lanes.clientWidth, LANE);
        this.drawLane(ink, row.lane, y);
      }
      this.drawMarks(ink, row, y + row.height / 2);
    }
    this.drawSelected(ink, high);
  }

  drawLane(ink, lane, y) {
    const strip = this.strip(lane.group);
    const sharp = window.devicePixelRatio || 1;
    for (const [since, until] of lane.spans) {
      const from = Math.max(LEFT, this.x(since)), to = Math.min(LEFT + this.width, until === null ? Infinity : this.x(until));
      if (to <= from) continue;
      const wide = Math.max(1, to - from);
      ink.drawImage(strip, (from - LEFT) * sharp, 0, wide * sharp, (LANE - 3) * sharp, from, y + 1.5, wide, LANE - 3);
    }
  }

  strip(group) {
    const known = this.strips.get(group);
    if (known) return known;
    const sharp = window.devicePixelRatio || 1, wide = Math.max(1, Math.floor(this.width)), high = LANE - 3;
    const canvas = document.createElement("canvas");
    canvas.width = (wide + 1) * sharp; canvas.height = high * sharp;
    const ink = canvas.getContext("2d");
    ink.scale(sharp, sharp);
    const paints = patterns(ink), track = merged(this.run.timeline.run, this.run.timeline.groups[group]);
    const second = (this.to - this.from) / this.width;
    let at = Math.max(0, firstFrom(track, this.from, (each) => each[0]) - 1);
    for (let x = 0; x < wide; x++) {
      const begin = this.from + x * second, end = begin + second;
      while (at + 1 < track.length && track[at + 1][0] <= begin) at += 1;
      const shares = new Map();
      for (let i = at; i < track.length && track[i][0] < end; i++) {
        const until = i + 1 < track.length ? track[i + 1][0] : this.end;
        const seconds = Math.min(end, until) - Math.max(begin, track[i][0]);
        if (track[i][1] && seconds > 0) shares.set(track[i][1], (shares.get(track[i][1]) || 0) + seconds);
      }
      let y = high;
      for (const state of STATES) {
        const share = shares.get(state);
        if (!share) continue;
        const tall = Math.max(state === "training" ? 0 : 2, share / second * high);
        ink.fillStyle = paints[state];
        ink.fillRect(x, Math.max(0, y - tall), 1, Math.min(tall, y));
        y = Math.max(2, y - tall);
      }
    }
    this.strips.set(group, canvas);
    return canvas;
  }

  drawMarks(ink, row, y) {
    let last = -Infinity;
    for (const at of this.marks(row)) {
      const incident = this.run.incidents[at];
      if (incident.until !== null && incident.until < this.from) continue;
      if (incident.began > this.to) break;
      const x = this.x(incident.began);
      if (incident.kind === "hang" && row.lane) {
        const from = Math.max(LEFT, x), to = Math.min(LEFT + this.width, this.x(incident.seen));
        ink.fillStyle = this.paints.hang;
        if (to > from) ink.fillRect(from, y - LANE / 2 + 1.5, to - from, LANE - 3);
      }
      if (incident.kind === "straggler" && row.lane) {
        const from = Math.max(LEFT, x), to = Math.min(LEFT + this.width, this.x(incident.until === null ? this.end : incident.until));
        ink.fillStyle = this.paints.slow;
        if (to > from) ink.fillRect(from, y, to - from, LANE / 2 - 1.5);
      }
      if (x < LEFT - 4 || x - last < 3) continue;
      last = x;
      drawMark(ink, shapeOf(incident.kind), x, y);
    }
  }
}

const SHAPES = { failure: "failure", hang: "a hang begins", slow: "a rank becomes slow", notice: "notice", planned: "planned restart" };
function shapeOf(kind) {
  return { hang: "hang", straggler: "slow", "planned restart": "planned", "preemption notice": "notice", "set aside": "notice", damaged: "notice" }[kind] || "failure";
}
// Each kind has a shape of its own, so that colour isn't needed to tell them apart.
function drawMark(ink, shape, x, y) {
  const path = () => {
    ink.beginPath();
    if (shape === "failure") { ink.moveTo(x - 4, y - 4); ink.lineTo(x + 4, y + 4); ink.moveTo(x - 4, y + 4); ink.lineTo(x + 4, y - 4); }
    else if (shape === "hang") { ink.rect(x - 4, y - 4, 8, 8); }
    else if (shape === "slow") { ink.arc(x, y, 4, 0, 2 * Math.PI); }
    else if (shape === "notice") { ink.moveTo(x, y - 5); ink.lineTo(x + 5, y + 4); ink.lineTo(x - 5, y + 4); ink.closePath(); }
    else { ink.moveTo(x, y - 5); ink.lineTo(x + 5, y); ink.lineTo(x, y + 5); ink.lineTo(x - 5, y); ink.closePath(); }
  };
  path();
  ink.strokeStyle = colour("back"); ink.lineWidth = 4.5; ink.stroke();
  path();
  if (shape === "failure") { ink.strokeStyle = colour("failed"); ink.lineWidth = 2.2; ink.stroke(); return; }
  ink.fillStyle = colour({ hang: "hang", slow: "slow", notice: "waiting", planned: "ending" }[shape]);
  ink.fill();
  ink.strokeStyle = colour("text"); ink.lineWidth = 1; ink.stroke();
}
