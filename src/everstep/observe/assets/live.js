// What `everstep ui` serves: a list of runs, and each run, kept up to date while it is looked at.
function live() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("everstep-token", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  const run = new URLSearchParams(location.search).get("run");
  const link = make("span", { class: "muted", role: "status" }, "connecting …");
  if (run === null) {
    const list = make("div");
    byId("main").replaceChildren(make("div", { class: "head" }, make("h1", null, "Runs"), link), list);
    follow("/api/runs", link, (found) => fillRuns(list, found));
  } else {
    const bar = make("div", { class: "tools" }, make("a", { href: "/" }, "← all runs"), link, actionButtons(run));
    const page = new RunPage(bar);
    byId("main").replaceChildren(page.root);
    const events = follow(`/api/run?run=${encodeURIComponent(run)}`, link, (found) => page.update(found));
    // What workers use changes all the time, whether or not their run has news.
    events.addEventListener("usage", (event) => page.fillUsage(JSON.parse(event.data)));
  }
}

// The server says when something is new; what it is, is asked for once the last answer has been drawn.
function follow(address, link, fill) {
  let asking = false, stale = false;
  async function ask() {
    if (asking) { stale = true; return; }
    asking = true;
    try {
      do {
        stale = false;
        const answer = await fetch(address, { cache: "no-store" });
        const found = await answer.json();
        if (answer.ok) { fill(found); link.textContent = "● live"; }
        else link.textContent = `✕ ${found.error}`;
      } while (stale);
    } catch (error) {
      link.textContent = "○ no connection: is everstep ui running?";
    } finally {
      asking = false;
    }
  }
  const events = new EventSource(address.replace(/^\/api\/runs?/, "/api/events"));
  events.addEventListener("changed", ask);
  events.addEventListener("error", () => { link.textContent = "○ no connection: trying again …"; });
  return events;
}

function fillRuns(list, found) {
  document.title = "Runs · Everstep";
  const heads = [["run"], ["state"], ["goodput", "number"], ["workers", "number"], ["attempts", "number"], ["recoveries", "number"], ["reports", "number"], ["newest checkpoint"], ["last written"]];
  const rows = found.runs.map((run) => [
    make("a", { href: `/?run=${encodeURIComponent(run.id)}` }, run.name), run.error ? `✕ ${run.error}` : badge(run.state),
    ...(run.error ? ["", "", "", "", "", "", ""] : [percent(run.goodput), number(run.workers[1]), number(run.attempts), number(run.recoveries), number(run.reports), run.newest || "", date(run.written)]),
  ]);
  list.replaceChildren(make("p", { class: "muted" }, found.address), rows.length ? table(heads, rows, "Runs") : make("p", null, "There is no run yet."));
}

function actionButtons(run) {
  const dialog = make("dialog", { "aria-label": "Confirm" });
  const ask = (title, text, fields, act) => {
    const inputs = fields.map(([name, label, choices]) => {
      const input = choices ? make("select", { name }, choices.map((each) => make("option", null, each))) : make("input", { name, required: true });
      return [name, input, make("label", null, label, input)];
    });
    const token = make("input", { name: "token", required: true, autocomplete: "off", value: sessionStorage.getItem("everstep-token") || "" });
    const said = make("p", { role: "status" });
    const form = make("form", { method: "dialog" }, make("h3", null, title), make("p", null, text), inputs.map((each) => each[2]),
      make("label", null, "Token (everstep ui printed it)", token), said,
      make("div", { class: "tools" }, make("button", { type: "submit" }, title), make("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const body = { run, ...Object.fromEntries(inputs.map(([name, input]) => [name, input.value])) };
      const answer = await fetch(act, { method: "POST", headers: { "Content-Type": "application/json", "X-Everstep-Token": token.value }, body: JSON.stringify(body) });
      const found = await answer.json();
      said.textContent = answer.ok ? found.done : found.error;
      if (answer.ok) sessionStorage.setItem("everstep-token", token.value);
    });
    dialog.replaceChildren(form);
    dialog.showModal();
  };
  return make("span", { class: "tools" },
    make("button", { type: "button", onclick: () => ask("Stop the run", "Its driver asks the workers for a last checkpoint, and ends them. The same script again resumes it.", [], "/api/stop") }, "Stop …"),
    make("button", { type: "button", onclick: () => ask("Break a part of it", "On purpose, to see it recover. Only runs on this machine.", [["kind", "What", ["rank", "host", "slice"]], ["which", "Which (a rank's number, or a name)"], ["signal", "Signal", ["KILL", "TERM", "STOP", "CONT"]]], "/api/kill") }, "Kill …"),
    dialog);
}
