"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const picked = new Map(); // run -> colour
  const charts = [];
  const svgOf = (name, attributes, parent) => {
    const node = document.createElementNS(parent.namespaceURI, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    return parent.appendChild(node);
  };
  const number = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(5)));
  };

  // Which runs are coloured: those that were picked, else the best of their table.
  const color = (run) => `var(--c${(picked.has(run.id) ? picked.get(run.id) : run.place) % 8})`;
  const isStrong = (run) => (picked.size ? picked.has(run.id) : run.place < data.strong);

  function ticks(low, high, log, count) {
    const found = [];
    if (log) {
      const decades = Math.log10(high / low);
      const steps = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 3, 5, 7];
      const every = Math.max(1, Math.ceil(decades / count));
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
        if (power % every) continue;
        for (const step of steps) {
          const value = step * 10 ** power;
          if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
        }
      }
      if (found.length > 1) return found;
      found.length = 0;
    }
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough);
    for (let value = Math.ceil(low / step); value * step <= high + step * 1e-6; value++) found.push(value * step);
    return found;
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.runs = data.groups[figure.dataset.group].map((id) => data.runs[id]).filter((run) => run[figure.dataset.kind]);
      this.box = figure.querySelector("input");
      this.svg = figure.querySelector("svg");
      this.svg.setAttribute("aria-label", figure.querySelector("b").textContent);
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      figure.appendChild(this.tip);
      const values = this.runs.flatMap((run) => run[figure.dataset.kind][1]);
      const least = Math.min(...this.runs.map((run) => Math.min(...run[figure.dataset.kind][1])));
      this.box.disabled = !(least > 0);
      this.box.checked = least > 0 && values.some((value) => value > 100 * least);
      this.box.addEventListener("change", () => this.draw());
      this.svg.addEventListener("pointermove", (event) => this.hover(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("click", (event) => {
        this.hover(event);
        if (this.near) toggle(this.near.run.id);
      });
    }

    draw() {
      const kind = this.figure.dataset.kind;
      const width = Math.max(this.figure.clientWidth, 240);
      const height = Math.round(Math.min(Math.max(width * 0.56, 210), 330));
      const log = this.box.checked;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.replaceChildren();
      this.leave();
      let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
      for (const run of this.runs) {
        const [steps, values] = run[kind];
        left = Math.min(left, steps[0]);
        right = Math.max(right, steps[steps.length - 1]);
        for (const value of values) {
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
      if (left === right) [left, right] = [left - 1, right + 1];
      if (low === high) [low, high] = log ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
      const scale = log ? Math.log : (value) => value;
      const pad = (scale(high) - scale(low)) * 0.04;
      const [bottom, top] = [scale(low) - pad, scale(high) + pad];
      const yTicks = ticks(low, high, log, 7);
      const margin = { left: 14 + 6.4 * Math.max(...yTicks.map((value) => number(value).length)), right: 12, top: 8, bottom: 36 };
      const x = (step) => margin.left + ((step - left) / (right - left)) * (width - margin.left - margin.right);
      const y = (value) => height - margin.bottom - ((scale(value) - bottom) / (top - bottom)) * (height - margin.top - margin.bottom);
      for (const value of yTicks) {
        svgOf("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(value), y2: y(value) }, this.svg);
        svgOf("text", { x: margin.left - 6, y: y(value) + 4, "text-anchor": "end" }, this.svg).textContent = number(value);
      }
      for (const step of ticks(left, right, false, Math.max(3, Math.floor(width / 110)))) {
        if (!Number.isInteger(step)) continue;
        const [text, half] = [step.toLocaleString("en"), 3.2 * step.toLocaleString("en").length];
        const at = Math.min(x(step), width - half); // the last one is not to be cut
        svgOf("text", { x: at, y: height - margin.bottom + 16, "text-anchor": "middle" }, this.svg).textContent = text;
      }
      svgOf("text", { x: width - margin.right, y: height - 4, "text-anchor": "end" }, this.svg).textContent = "optimizer steps";
      this.points = [];
      this.paths = new Map();
      // The best last, and what is coloured over what is not.
      const order = [...this.runs].sort((a, b) => isStrong(a) - isStrong(b) || b.place - a.place);
      for (const run of order) {
        const [steps, values] = run[kind];
        const places = steps.map((step, index) => [x(step), y(values[index])]);
        const style = `${isStrong(run) ? "strong" : "faint"}${run.failed ? " failed" : ""}`;
        const paths = [svgOf("path", { class: style, d: "M" + places.map((place) => place.map((part) => part.toFixed(1)).join(" ")).join("L") }, this.svg)];
        if (steps.length <= 25 && isStrong(run) || steps.length === 1) {
          const dots = places.map(([across, up]) => `M${across.toFixed(1)} ${up.toFixed(1)}h0`).join("");
          paths.push(svgOf("path", { class: `${style} dots`, d: dots }, this.svg));
        }
        for (const path of paths) path.style.setProperty("--c", color(run));
        this.paths.set(run, paths[0]);
        places.forEach(([across, up], index) => this.points.push({ run, across, up, step: steps[index], value: values[index] }));
      }
      this.marker = svgOf("circle", { r: 4.5, visibility: "hidden" }, this.svg);
      this.width = width;
    }

    hover(event) {
      const frame = this.svg.getBoundingClientRect();
      const zoom = this.width / frame.width;
      const [across, up] = [(event.clientX - frame.left) * zoom, (event.clientY - frame.top) * zoom];
      let best = null;
      let least = 48 ** 2;
      for (const point of this.points) {
        // A faint curve has to be meant: where many are, the coloured ones are easier to hit.
        const distance = ((point.across - across) ** 2 + (point.up - up) ** 2) * (isStrong(point.run) ? 1 : 2.5);
        if (distance < least) [best, least] = [point, distance];
      }
      this.leave();
      if (!best) return;
      this.near = best;
      this.paths.get(best.run).classList.add("over");
      this.marker.style.setProperty("--c", color(best.run));
      for (const [key, value] of [["cx", best.across], ["cy", best.up], ["visibility", "visible"]]) this.marker.setAttribute(key, value);
      this.tip.textContent = "";
      const name = document.createElement("b");
      name.textContent = best.run.name;
      this.tip.append(name, document.createElement("br"), `${number(best.value)} at step ${best.step.toLocaleString("en")}`);
      if (best.run.note) this.tip.append(document.createElement("br"), best.run.note);
      this.tip.hidden = false;
      const [tipWidth, tipHeight] = [this.tip.offsetWidth, this.tip.offsetHeight];
      const left = this.svg.offsetLeft || frame.left - this.figure.getBoundingClientRect().left;
      const base = frame.top - this.figure.getBoundingClientRect().top;
      const at = left + best.across / zoom;
      this.tip.style.left = `${Math.max(0, Math.min(at - tipWidth / 2, frame.width - tipWidth))}px`;
      const above = base + best.up / zoom - tipHeight - 12;
      this.tip.style.top = `${above < 0 ? base + best.up / zoom + 14 : above}px`;
    }

    leave() {
      if (this.near) this.paths.get(this.near.run).classList.remove("over");
      if (this.marker) this.marker.setAttribute("visibility", "hidden");
      this.near = null;
      this.tip.hidden = true;
    }
  }

  function refresh() {
    for (const button of document.querySelectorAll("button[data-run]")) {
      const run = data.runs[button.dataset.run];
      button.setAttribute("aria-pressed", picked.has(run.id));
      button.classList.toggle("colored", isStrong(run));
      button.style.setProperty("--c", color(run));
    }
    for (const clear of document.querySelectorAll(".clear")) clear.hidden = !picked.size;
    for (const chart of charts) chart.draw();
  }

  function toggle(id) {
    if (!picked.delete(id)) {
      // Its own colour if that is free, else the first that is: two picked runs are to be told apart.
      const free = [data.runs[id].place, 0, 1, 2, 3, 4, 5, 6, 7].find((slot) => slot < 8 && ![...picked.values()].includes(slot));
      picked.set(id, free === undefined ? data.runs[id].place : free);
    }
    refresh();
  }

  function sort(header) {
    const table = header.closest("table");
    const index = [...header.parentNode.children].indexOf(header);
    const before = header.getAttribute("aria-sort");
    const first = header.dataset.first || "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const direction = before === first ? other : first;
    const sign = direction === "ascending" ? 1 : -1;
    for (const each of header.parentNode.children) each.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction);
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [row, row.cells[index].dataset.sort]);
    rows.sort(([, a], [, b]) => {
      if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last, either way
      const difference = Number(a) - Number(b);
      return sign * (Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference);
    });
    body.append(...rows.map(([row]) => row));
  }

  for (const header of document.querySelectorAll(".results th")) {
    const button = header.querySelector("button");
    if (button) button.addEventListener("click", () => sort(header));
  }
  for (const row of document.querySelectorAll(".results tbody tr")) {
    row.addEventListener("click", () => {
      if (!String(getSelection())) toggle(Number(row.dataset.run)); // unless text is being selected
    });
  }
  for (const button of document.querySelectorAll(".legend button[data-run]")) {
    button.addEventListener("click", () => toggle(Number(button.dataset.run)));
  }
  for (const clear of document.querySelectorAll(".clear")) {
    clear.addEventListener("click", () => { picked.clear(); refresh(); });
  }
  for (const figure of document.querySelectorAll(".chart")) charts.push(new Chart(figure));
  refresh();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) for (const chart of charts) chart.draw();
    width = innerWidth;
  });

  const viewer = document.getElementById("viewer");
  const zooms = [...document.querySelectorAll("button.zoom")];
  let shown = 0;
  function show(index) {
    shown = (index + zooms.length) % zooms.length;
    const image = zooms[shown].querySelector("img");
    viewer.querySelector("img").src = image.src;
    viewer.querySelector("img").alt = viewer.querySelector("p").textContent = image.alt;
    if (!viewer.open) viewer.showModal();
  }
  zooms.forEach((button, index) => button.addEventListener("click", () => show(index)));
  viewer.addEventListener("click", () => viewer.close());
  viewer.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) show(shown + step);
  });
})();
