"use strict";
// What the charts draw: runs, or groups of them, as lines; which of them are picked, and in which colours.
const lines = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const picked = new Map(); // number of a run -> its colour
  const settings = data.sections.map(() => ({ x: "step", smooth: 0, group: "" }));
  // Colours of the style sheet; looked up once in a redraw, as each look-up has the browser lay out what has changed.
  const looks = new Map();
  function css(name) {
    if (!looks.has(name)) looks.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    return looks.get(name);
  }
  const last = (list) => list[list.length - 1];
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const number = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(5)));
  };
  const runsOf = (section) => data.sections[section].runs.map((id) => data.runs[id]);
  const textOf = (key, at) => (key.categories.length ? key.categories[at] : number(at));

  // A line is a run, or the runs that are alike in the keys they are grouped by. The best come first.
  function linesOf(section) {
    const { keys } = data.sections[section];
    const { group } = settings[section];
    const isPart = (key, index) => (group === "seeds" ? !key.seed : String(index) === group);
    const found = new Map();
    for (const run of runsOf(section)) {
      const parts = keys.map((key, index) => isPart(key, index) && `${key.name}=${textOf(key, run.at[index])}`);
      const text = parts.filter(Boolean).join(" ");
      const id = group ? text : run.id;
      const label = group ? text || "all runs" : run.settings || run.name;
      if (!found.has(id)) found.set(id, { label, runs: [], place: found.size, note: `${run.name}: ${run.score}` });
      found.get(id).runs.push(run);
    }
    for (const line of found.values()) {
      if (group) line.note = `${line.runs.length} run${line.runs.length > 1 ? "s" : ""}`;
      line.failed = line.runs.every((run) => run.metric === null);
    }
    return [...found.values()];
  }

  // In colour is what was picked, else the best of the section.
  const slotOf = (line) => line.runs.map((run) => picked.get(run.id)).find((slot) => slot !== undefined);
  const isPicked = (line) => slotOf(line) !== undefined;
  const isStrong = (line) => (picked.size ? isPicked(line) : line.place < data.strong);
  const colorOf = (line) => css(isStrong(line) ? `c${(slotOf(line) ?? line.place) % 8}` : "faint");

  function toggle(line) {
    if (isPicked(line)) {
      line.runs.forEach((run) => picked.delete(run.id));
      return;
    }
    // Its own colour if that is free, else the first that is: what is picked is to be told apart.
    const used = new Set(picked.values());
    const free = [line.place, 0, 1, 2, 3, 4, 5, 6, 7].find((slot) => slot < 8 && !used.has(slot));
    line.runs.forEach((run) => picked.set(run.id, free ?? line.place));
  }

  // Linear between two points, constant beyond the ends.
  function interpolate([xs, ys], x) {
    let [low, high] = [0, xs.length - 1];
    if (x <= xs[low]) return ys[low];
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
  }

  // An exponential moving average without the bias towards zero that it begins with.
  function smoothed(values, weight) {
    let [sum, share] = [0, 0];
    return values.map((value) => {
      [sum, share] = [weight * sum + (1 - weight) * value, weight * share + (1 - weight)];
      return sum / share;
    });
  }

  // The x axis: its name, how a place on it is told, and how many seconds its unit has.
  function axisOf(section) {
    const { x } = settings[section];
    if (x === "step") return { unit: 1, name: "optimizer steps", tell: (value) => `step ${number(Math.round(value))}` };
    if (x === "epoch") return { unit: 1, name: "epochs", tell: (value) => `epoch ${number(Number(value.toPrecision(3)))}` };
    const longest = Math.max(0, ...runsOf(section).map((run) => last(run.clocks.time?.[1] ?? [0])));
    const units = [[1, "s"], [60, "min"], [3600, "h"]];
    const [unit, name] = units.filter(([size], index) => !index || longest > 3 * size).pop();
    return { unit, name: `training time (${name})`, tell: (value) => `${number(Number(value.toPrecision(3)))} ${name}` };
  }

  function curveOf(run, kind, x, unit) {
    const curve = run.curves[kind];
    if (!curve || x === "step") return curve;
    return run.clocks[x] && [curve[0].map((step) => interpolate(run.clocks[x], step) / unit), curve[1]];
  }

  // What a chart shows of a line: its curve; of several runs the mean, and the band from the least to the greatest.
  function traceOf(line, kind, section) {
    const { x, smooth } = settings[section];
    const { unit } = axisOf(section);
    const curves = line.runs.map((run) => curveOf(run, kind, x, unit)).filter(Boolean);
    const ready = curves.map(([xs, ys]) => [xs, smoothed(ys, smooth)]);
    if (curves.length < 2) return curves.length ? { line, raw: curves[0], curve: ready[0], band: [] } : null;
    const first = Math.min(...curves.map(([xs]) => xs[0]));
    const end = Math.max(...curves.map(([xs]) => last(xs)));
    const alike = curves.every(([xs]) => String(xs) === String(curves[0][0]));
    const grid = alike ? curves[0][0] : Array.from({ length: 201 }, (_, part) => first + ((end - first) * part) / 200);
    const curve = [[], []];
    const band = [];
    for (const place of grid) {
      const reached = ready.filter(([xs]) => xs[0] <= place && place <= last(xs));
      if (!reached.length) continue;
      const values = reached.map((own) => interpolate(own, place));
      curve[0].push(place);
      curve[1].push(mean(values));
      band.push([place, Math.min(...values), Math.max(...values)]);
    }
    return { line, curve, band };
  }

  return {
    data, picked, settings, looks, css, last, mean, number, runsOf, textOf, linesOf, isPicked, isStrong, colorOf, toggle,
    interpolate, axisOf, traceOf,
  };
})();
