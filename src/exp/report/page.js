"use strict";
// Draws the charts, whose options come with the page; sorts tables; enlarges pictures.
(() => {
  const styles = JSON.parse(document.getElementById("styles").textContent);
  const plots = [...document.querySelectorAll("[data-chart]")];

  // The best configurations have a color each, the same in all charts and for all seeds.
  const color = (index) => styles.colors[index] ?? styles.faint.color;
  const bars = ({ data, ...series }) => ({
    ...styles.series[series.type], ...series, data: data.map(({ color_index: index, ...datum }) => (
      { ...datum, itemStyle: { color: color(index), borderColor: color(index), opacity: 0.8 } }
    )),
  });
  const curve = ({ color_index: index, ...series }) => ({
    ...styles.series.line, ...styles.colors[index] ? { color: color(index) } : styles.faint,
    showSymbol: series.data.length <= 25, ...series,
  });
  function legend(names) {
    const data = [...new Set(names)];
    return { show: data.length > 1, data: data.slice(0, styles.colors.length) };
  }
  // Logarithmic, if all values are positive and span at least two decades.
  function scale(values) {
    const [least, most] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)],
      [Infinity, -Infinity]);
    return least > 0 && most >= 100 * least ? "log" : "value";
  }
  const options = new Map(plots.map((chart) => {
    const { kind, ...own } = JSON.parse(chart.dataset.chart);
    const option = { ...styles.all, ...styles[kind === "bars" ? "bars" : "curves"] };
    for (const [key, part] of Object.entries(own)) option[key] = Array.isArray(part) ? part : { ...option[key], ...part };
    option.series = own.series.map((series) => kind === "bars" ? bars(series) : curve(series));
    if (kind === "bars") chart.style.height = `${60 + 28 * Math.max(own.yAxis.data.length, 3)}px`;
    else {
      option.legend = { ...option.legend, ...legend(own.series.map(({ name }) => name)) };
      option.yAxis = { ...option.yAxis, type: scale(own.series.flatMap(({ data }) => data.map(([, value]) => value))) };
    }
    return [chart, option];
  }));
  for (const charts of document.querySelectorAll("section > .charts")) {
    if (charts.closest("section").querySelector(".curves, .more")) charts.insertAdjacentHTML("beforebegin", '<label class="note">smoothing of curves '
      + '<input type="range" class="smooth" min="0" max="0.99" step="0.01" value="0"></label>');
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // Exponential moving average, corrected for its bias towards the initial value 0.
  function smoothed(series, weight) {
    let [sum, share] = [0, 0];
    const data = series.data.map(([step, value]) => {
      [sum, share] = [weight * sum + (1 - weight) * value, weight * share + (1 - weight)];
      return [step, sum / share];
    });
    return { ...series, data };
  }

  function draw(plot, isPrinted = false) {
    const option = { backgroundColor: "transparent", ...options.get(plot) };
    if (plot.closest(".curves, .more")) {
      const weight = Number(plot.closest("section").querySelector(".smooth").value);
      option.series = option.series.map((series) => smoothed(series, weight));
    }
    echarts.getInstanceByDom(plot)?.dispose();
    const width = isPrinted ? Math.min(plot.clientWidth, 680) : undefined; // no wider than a sheet
    echarts.init(plot, dark.matches && !isPrinted ? "dark" : null, { renderer: "svg", width }).setOption(option);
  }

  // Charts are drawn when they become visible: a chart of a hundred curves takes a moment.
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting && !echarts.getInstanceByDom(target)) draw(target);
    }
  }, { rootMargin: "400px" });
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.clientWidth) echarts.getInstanceByDom(target)?.resize();
  });
  for (const plot of plots) {
    seen.observe(plot);
    sized.observe(plot);
  }
  const redraw = (isPrinted) => plots.filter((plot) => plot.clientWidth).forEach((plot) => draw(plot, isPrinted));
  for (const slider of document.querySelectorAll(".smooth")) {
    slider.addEventListener("input", () => {
      const curves = [...slider.closest("section").querySelectorAll(":is(.curves, .more) .plot")];
      curves.filter((plot) => echarts.getInstanceByDom(plot)).forEach((plot) => draw(plot));
    });
  }
  dark.addEventListener("change", () => redraw(false));
  addEventListener("beforeprint", () => {
    document.querySelector(".commands").open = true;
    redraw(true);
  });
  addEventListener("afterprint", () => redraw(false));

  // A click on a column header sorts the rows by the text of the cells; empty cells are always last.
  function sort(header) {
    const index = header.cellIndex;
    const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const cell of header.parentNode.cells) cell.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
    const text = (row) => row.cells[index].textContent.replace(/(\d),(?=\d)/g, "$1");
    const body = header.closest("table").tBodies[0];
    body.append(...[...body.rows].sort((one, other) => {
      const [a, b] = [text(one), text(other)];
      if (!a || !b) return !a - !b;
      const difference = Number.parseFloat(a) - Number.parseFloat(b);
      return sign * (Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference);
    }));
  }
  for (const header of document.querySelectorAll(".results th")) {
    header.tabIndex = 0;
    header.addEventListener("click", () => sort(header));
    header.addEventListener("keydown", ({ key }) => { if (key === "Enter") sort(header); });
  }

  const viewer = document.getElementById("viewer");
  const zooms = [...document.querySelectorAll("button.zoom")];
  let current = 0;
  function show(index) {
    current = (index + zooms.length) % zooms.length;
    const image = zooms[current].querySelector("img");
    viewer.querySelector("img").src = image.src;
    viewer.querySelector("p").textContent = image.alt;
    if (!viewer.open) viewer.showModal();
  }
  zooms.forEach((button, index) => button.addEventListener("click", () => show(index)));
  viewer.addEventListener("click", () => viewer.close());
  viewer.addEventListener("keydown", ({ key }) => {
    if (key === "ArrowLeft") show(current - 1);
    if (key === "ArrowRight") show(current + 1);
  });
})();
