// A curve for each metric, across restarts. What was done again later is dashed, and so isn't told by its colour alone.
const HIGH = 150, PAD = { left: 46, right: 6, top: 8, bottom: 18 };
const short = (value) => (value && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6) ? value.toExponential(1) : String(Number(value.toPrecision(3))));

class Metrics {
  constructor() {
    this.root = make("div", { class: "curves" });
    this.note = make("p", { class: "muted" });
    this.drawn = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.draw(entry.target);
    }, { rootMargin: "300px" });
  }

  update(metrics) {
    const left = metrics.left_out ? ` ${plural(metrics.left_out, "metric")} more are not drawn.` : "";
    const redone = metrics.redone ? ` ${plural(metrics.redone, "report")} were done again after a restart: dashed.` : "";
    this.note.textContent = metrics.rows ? `${plural(metrics.rows, "report")} of rank 0.${redone}${left}` : "Nothing has been reported so far.";
    for (const curve of metrics.curves) {
      let figure = this.drawn.get(curve.name);
      if (!figure) {
        figure = make("figure", { tabindex: "0", role: "group" });
        this.drawn.set(curve.name, figure);
        this.root.append(figure);
        this.seen.observe(figure);
        figure.addEventListener("keydown", (event) => this.key(figure, event));
      }
      figure.curve = curve;
      if (figure.firstChild) this.draw(figure);
    }
  }

  draw(figure) {
    const curve = figure.curve;
    if (figure.painted === curve) return;
    figure.painted = curve;
    const xs = [], ys = [], wide = Math.max(160, figure.clientWidth - 24);
    for (const piece of curve.pieces) for (let i = 0; i < piece.x.length; i++) { xs.push(piece.x[i]); if (isNumber(piece.y[i])) ys.push(piece.y[i]); }
    const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    let [left, right] = range(xs), [low, high] = ys.length ? range(ys) : [0, 1];
    if (right === left) right = left + 1;
    if (high === low) { high += Math.abs(high) * 0.05 || 0.5; low -= Math.abs(low) * 0.05 || 0.5; }
    const px = (x) => PAD.left + (x - left) / (right - left) * (wide - PAD.left - PAD.right);
    const py = (y) => PAD.top + (1 - (y / 2 - low / 2) / (high / 2 - low / 2)) * (HIGH - PAD.top - PAD.bottom);
    const svg = make("svg", { viewBox: `0 0 ${wide} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const value of [low, high]) {
      svg.append(make("line", { class: "grid", x1: PAD.left, x2: wide - PAD.right, y1: py(value), y2: py(value) }),
        make("text", { x: PAD.left - 4, y: py(value) + 3, "text-anchor": "end" }, short(value)));
    }
    svg.append(make("text", { x: PAD.left, y: HIGH - 4 }, `report ${number(left)}`), make("text", { x: wide - PAD.right, y: HIGH - 4, "text-anchor": "end" }, number(right)));
    const attempts = new Set(), few = new Set(curve.pieces.map((piece) => piece.attempt)).size <= 25;
    const ordered = [...curve.pieces].sort((a, b) => a.redone - b.redone);
    for (const piece of ordered) {
      if (few && piece.attempt > 1 && !attempts.has(piece.attempt)) {
        attempts.add(piece.attempt);
        const first = Math.min(...curve.pieces.filter((each) => each.attempt === piece.attempt).map((each) => each.x[0]));
        svg.append(make("line", { class: "restart", x1: px(first), x2: px(first), y1: PAD.top, y2: HIGH - PAD.bottom }));
      }
      let path = "", pen = "M";
      for (let i = 0; i < piece.x.length; i++) {
        if (!isNumber(piece.y[i])) {
          const x = px(piece.x[i]), y = HIGH - PAD.bottom;
          svg.append(make("path", { class: "strange", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` }));
          pen = "M";
          continue;
        }
        path += `${pen}${px(piece.x[i]).toFixed(1)} ${py(piece.y[i]).toFixed(1)}`;
        pen = "L";
      }
      if (path) svg.append(make("path", { class: piece.redone ? "curve redone" : "curve", d: path.includes("L") ? path : `${path}h1.5` }));
    }
    figure.cursor = make("line", { class: "cursor", y1: PAD.top, y2: HIGH - PAD.bottom, visibility: "hidden" });
    svg.append(figure.cursor);
    figure.px = px;
    svg.addEventListener("mousemove", (event) => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * wide;
      this.point(figure, left + (x - PAD.left) / (wide - PAD.left - PAD.right) * (right - left));
    });
    svg.addEventListener("mouseleave", () => this.rest(figure));
    figure.value = make("span");
    figure.replaceChildren(make("figcaption", null, make("span", { title: curve.name }, curve.name), figure.value), svg);
    this.rest(figure);
  }

  points(figure) {
    return figure.curve.pieces.flatMap((piece) => piece.x.map((x, i) => ({ x, y: piece.y[i], piece })));
  }
  rest(figure) {
    const points = this.points(figure), last = points[points.length - 1];
    figure.at = undefined;
    figure.cursor.setAttribute("visibility", "hidden");
    figure.value.textContent = last ? number(last.y) : "";
    figure.setAttribute("aria-label", `${figure.curve.name}: ${last ? number(last.y) : "no value"} at the last report. Left and right arrow read values.`);
  }
  point(figure, wanted) {
    const points = this.points(figure);
    if (!points.length) return;
    const best = points.reduce((a, b) => (Math.abs(b.x - wanted) < Math.abs(a.x - wanted) || (b.x === a.x && !b.piece.redone) ? b : a));
    figure.at = best.x;
    figure.cursor.setAttribute("visibility", "visible");
    figure.cursor.setAttribute("x1", figure.px(best.x));
    figure.cursor.setAttribute("x2", figure.px(best.x));
    figure.value.textContent = `report ${number(best.x)}: ${number(best.y)}${best.piece.redone ? ", done again" : ""}`;
  }
  key(figure, event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !figure.painted) return;
    event.preventDefault();
    const xs = [...new Set(this.points(figure).map(({ x }) => x))].sort((a, b) => a - b);
    const here = figure.at === undefined ? (by > 0 ? -1 : xs.length) : xs.indexOf(figure.at);
    this.point(figure, xs[Math.min(xs.length - 1, Math.max(0, here + by))]);
    say(`${figure.curve.name}, ${figure.value.textContent}`);
  }
}
