"use strict";
// What reacts: the charts' controls and legends, the tables, which sort and pick runs, and the pictures.
(() => {
  const { data, picked, settings, looks, runsOf, linesOf, isPicked, isStrong, colorOf, toggle } = lines;
  const drawn = [...document.querySelectorAll(".chart")].map((figure) => ({
    section: Number(figure.dataset.section), kind: figure.dataset.chart, title: figure.querySelector("b").textContent,
    place: figure.querySelector(".plot"), log: figure.querySelector("input"), drawing: null, lines: null, over: null, isInView: false, isStale: true,
  }));
  // Charts are drawn when they come into view: a hundred curves take a moment each.
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = drawn.find(({ place }) => place === target);
      chart.isInView = isIntersecting;
      if (isIntersecting && chart.isStale) draw(chart);
    }
  }, { rootMargin: "400px" });
  const make = (name, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(name), properties);
    node.append(...children);
    return node;
  };

  function mark(button, line) {
    button.setAttribute("aria-pressed", isPicked(line));
    button.classList.toggle("colored", isStrong(line));
    button.style.setProperty("--c", colorOf(line));
  }

  function refresh() {
    looks.clear();
    data.sections.forEach((_, section) => {
      const all = linesOf(section);
      const drawable = all.filter(({ runs }) => runs.some((run) => Object.keys(run.curves).length));
      for (const line of all) {
        for (const run of line.runs) mark(document.querySelector(`button[data-run="${run.id}"]`), line);
      }
      const buttons = drawable.map((line) => {
        const swatch = make("span", { className: "swatch" });
        const button = make("button", { type: "button", title: line.note, onclick: () => pick(line) }, swatch, line.label);
        mark(button, line);
        return button;
      });
      const clear = make("button", { type: "button", className: "clear", onclick: () => { picked.clear(); refresh(); } }, "pick none");
      const legend = document.querySelector(`.legend[data-section="${section}"]`);
      if (legend) legend.replaceChildren(...buttons, ...(picked.size ? [clear] : []));
    });
    for (const chart of drawn) {
      chart.isStale = true;
      if (chart.isInView) draw(chart);
    }
  }

  function pick(line) {
    toggle(line);
    refresh();
  }

  function draw(chart) {
    chart.isStale = false;
    if (!chart.drawing) begin(chart);
    const option = (charts.options[chart.kind.split(" ")[0]] ?? charts.options.curves)(chart, Boolean(chart.log?.checked));
    chart.drawing.setOption(option, { replaceMerge: ["series", "parallelAxis"] });
    if (option.toolbox.feature.dataZoom && !matchMedia("(pointer: coarse)").matches) { // dragging zooms
      chart.drawing.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
    }
  }

  function begin(chart) {
    const drawing = (chart.drawing = echarts.init(chart.place, null, { renderer: "svg" }));
    drawing.getZr().on("dblclick", () => drawing.dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
    drawing.on("click", ({ seriesId, data: item }) => {
      const line = item?.line ?? chart.lines?.get(seriesId);
      if (line) pick(line);
    });
    drawing.on("mouseover", ({ seriesId }) => { chart.over = chart.lines?.get(seriesId); });
    drawing.on("datazoom", () => { // what is left of a logarithmic axis needs labels of its own
      if (drawing.getOption().yAxis?.[0].type !== "log") return;
      const [high, low] = [24, chart.place.clientHeight - 50].map((y) => drawing.convertFromPixel({ yAxisIndex: 0 }, y));
      drawing.setOption({ yAxis: { axisLabel: { customValues: charts.decadeMarks(low, high) } } });
    });
    drawing.on("mouseout", () => { chart.over = null; });
    new ResizeObserver(() => chart.place.clientWidth && drawing.resize()).observe(chart.place);
  }

  // A logarithmic axis where all values are above zero; from the beginning where they span decades.
  function prepare(chart) {
    watch.observe(chart.place);
    chart.place.setAttribute("role", "img");
    chart.place.setAttribute("aria-label", chart.title);
    if (!chart.log) return;
    const ofCurves = (run) => run.curves[chart.kind]?.[1] ?? [];
    const ofMetric = (run) => (run.metric === null ? [] : [run.metric]);
    const values = runsOf(chart.section).flatMap(chart.kind.startsWith("over ") ? ofMetric : ofCurves);
    const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    chart.log.disabled = !(low > 0);
    chart.log.checked = low > 0 && high > 100 * low;
    chart.log.onchange = () => draw(chart);
  }

  function addControls(node) {
    const section = Number(node.dataset.section);
    const { keys } = data.sections[section];
    const runs = runsOf(section);
    const change = (name) => ({ target }) => {
      settings[section][name] = name === "smooth" ? Number(target.value) : target.value;
      refresh();
    };
    const choice = (label, name, options) => {
      const items = options.map(([value, title]) => make("option", { value }, title));
      return options.length > 1 ? [make("label", {}, `${label} `, make("select", { name, onchange: change(name) }, ...items))] : [];
    };
    const clocks = [["epoch", "epochs"], ["time", "training time"]].filter(([clock]) => runs.some((run) => run.clocks[clock]));
    const groups = keys.map((key, index) => [String(index), key.name]);
    if (keys.some((key) => key.seed)) groups.unshift(["seeds", "all but seeds"]);
    const slider = make("input", { type: "range", name: "smooth", min: 0, max: 0.99, step: 0.01, value: 0, oninput: change("smooth") });
    node.append(
      ...choice("x axis", "x", [["step", "steps"], ...clocks]), make("label", {}, "smoothing ", slider),
      ...choice("group by", "group", [["", "none"], ...groups]),
    );
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
      const isOf = (line) => line.runs.some((run) => run.id === Number(row.dataset.run));
      const line = data.sections.flatMap((_, section) => linesOf(section)).find(isOf);
      if (!String(getSelection())) pick(line); // unless text is being selected
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  for (const [event, isPrinted] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { // light, and no wider than a sheet
      document.documentElement.classList.toggle("printed", isPrinted);
      refresh();
      for (const chart of drawn.filter(({ place }) => place.clientWidth)) { // not behind a fold
        if (!chart.drawing) begin(chart);
        chart.drawing.resize(isPrinted ? { width: Math.min(chart.place.clientWidth, 680) } : {});
        draw(chart); // at once, unlike resize
      }
    });
  }
  document.querySelectorAll(".controls").forEach(addControls);
  drawn.forEach(prepare);
  refresh();

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
