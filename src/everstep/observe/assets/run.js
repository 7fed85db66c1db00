// The page of one run.
const BADGES = { running: "▶ running", finished: "✓ finished", failed: "✕ failed", stopped: "■ stopped", interrupted: "◌ interrupted" };
const badge = (state) => make("span", { class: `badge ${Object.hasOwn(BADGES, state) ? state : ""}` }, BADGES[state] || state);

class RunPage {
  constructor(live) {
    this.head = make("div");
    this.ledger = make("div", { class: "ledger" });
    this.timeline = new Timeline((at, from) => this.incidents.open(at, from));
    this.incidents = new Incidents((at) => this.timeline.select(at));
    this.metrics = new Metrics();
    this.checkpoints = make("div");
    this.usage = make("section", { "aria-label": "Workers now", hidden: "" });
    const part = (title, ...content) => make("section", { "aria-label": title }, make("h2", null, title), ...content);
    this.root = make("div", null, live, this.head,
      part("Timeline", this.timeline.root), this.usage, part("Incidents", this.incidents.root),
      part("Metrics", this.metrics.note, this.metrics.root), part("Where the time went", this.ledger), part("Checkpoints", this.checkpoints));
  }

  update(run) {
    this.state = run.state;
    if (run.state !== "running") this.usage.hidden = true;
    document.title = `${run.name} · Everstep`;
    this.fillHead(run);
    this.fillLedger(run.ledger);
    this.timeline.update(run);
    this.incidents.update(run);
    this.metrics.update(run.metrics);
    this.fillCheckpoints(run);
  }

  fillHead(run) {
    const [least, most] = run.workers, end = run.state === "running" ? run.read : run.ended;
    const facts = [
      ["goodput", percent(run.goodput)], ["workers", least === most ? number(most) : `${number(least)} to ${number(most)}`],
      ["attempts", number(run.attempts)], ["recoveries", number(run.recoveries)], ["drivers", number(run.drivers)],
      ["reports", number(run.reports)], ["took", duration(end - run.began)],
      ...run.budgets.map(([name, spent, limit]) => [name, `${spent}${limit === null ? "" : limit < 0 ? ", no limit" : ` of ${limit}`}`]),
    ];
    const parts = [
      make("div", { class: "head" }, make("h1", null, run.name), badge(run.state), make("span", { class: "muted" }, `${run.address} · began ${date(run.began)} · last written ${date(run.written)}`)),
      make("dl", { class: "facts" }, facts.map(([name, value]) => make("div", null, make("dt", null, name), make("dd", null, value)))),
    ];
    if (run.message) parts.push(make("p", { class: "alert" }, run.state === "failed" ? `First cause: ${run.message}` : run.message));
    if (run.state === "interrupted") parts.push(make("p", { class: "alert" }, `Its driver, ${run.owner}, is gone: the same script again resumes the run.`));
    if (run.damage.length) parts.push(make("p", { class: "alert" }, `The journal is damaged, and what it has lost is missing here: ${run.damage.join("; ")}`));
    this.head.replaceChildren(...parts);
  }

  fillLedger(ledger) {
    const entries = Object.entries(ledger.seconds).filter(([, seconds]) => seconds > 0), whole = entries.reduce((sum, [, seconds]) => sum + seconds, 0);
    const paint = (node, name) => { node.style.background = `var(--${LEDGER[name] || "away"})`; return node; };
    const bar = make("div", { class: "bar", "aria-hidden": "true" }, entries.map(([name, seconds]) => {
      const part = paint(make("span", { title: `${name}: ${percent(seconds / whole)}` }), name);
      part.style.flex = `${seconds} 0 0`;
      return part;
    }));
    const rows = entries.map(([name, seconds]) => [make("span", null, paint(make("span", { class: "swatch" }), name), name), percent(seconds / whole), duration(seconds)]);
    this.ledger.replaceChildren(bar, table([["category"], ["share", "number"], ["time, summed over workers", "number"]], rows, "Where the time went"));
  }

  // Only what runs on the machine of the server is known; a page in a file has none.
  fillUsage({ workers, elsewhere }) {
    this.usage.hidden = !workers.length || this.state !== "running";
    const heads = [["rank", "number"], ["slice"], ["host"], ["doing"], ["reports", "number"], ["reports a second", "number"], ["processors", "number"], ["memory", "number"]];
    const size = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`, or = (value, text) => isNumber(value) ? text(value) : "?";
    const rows = workers.map((each) => [each.rank, each.slice, each.host, each.doing, number(each.reports), each.rate.toFixed(1), percent(each.processors), size(each.memory)]);
    if (workers.some((each) => each.gpus)) {
      heads.push(["GPUs", "number"], ["GPU memory", "number"]);
      workers.forEach(({ gpus }, at) => rows[at].push(gpus ? or(gpus.busy, percent) : "", gpus ? or(gpus.memory, size) : ""));
    }
    const more = elsewhere ? [make("p", { class: "muted" }, `${plural(elsewhere, "worker")} on other machines, or just gone.`)] : [];
    this.usage.replaceChildren(make("h2", null, "Workers now"), make("div", { class: "workers" }, table(heads, rows, "What each worker does and uses")), ...more);
  }

  fillCheckpoints(run) {
    const { kept, deleted, shown } = run.checkpoints;
    const metrics = (found) => Object.entries(found).map(([name, value]) => `${name}=${typeof value === "object" ? "…" : number(value)}`).join(", ").slice(0, 200);
    const status = (each) => each.status === "damaged" ? `✕ damaged: ${each.why}` : each.status === "kept" ? (each.folder === run.newest ? "● newest" : "● kept") : `○ deleted ${date(each.gone)}`;
    const rows = [...shown].reverse().map((each) => [date(each.when), each.folder, each.attempt, each.report, each.holds, each.at || "in the run's folder", metrics(each.metrics), status(each)]);
    const heads = [["committed"], ["folder"], ["attempt", "number"], ["report", "number"], ["holds"], ["where"], ["metrics"], ["status"]];
    const note = make("p", { class: "muted" }, kept + deleted ? `${plural(kept, "checkpoint")}; ${number(deleted)} deleted by retention.` : "There is none so far.");
    this.checkpoints.replaceChildren(note, ...(rows.length ? [table(heads, rows, "Checkpoints")] : []));
  }
}
