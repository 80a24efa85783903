"use strict";
// Draws the charts, whose options come with the page; sorts tables; enlarges pictures.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const looks = read("looks");
  const options = read("options").map(({ kind, ...own }) => {
    const option = { ...looks.all, ...looks[kind === "bars" ? "bars" : "curves"] };
    for (const [key, part] of Object.entries(own)) option[key] = Array.isArray(part) ? part : { ...option[key], ...part };
    option.series = own.series.map((series) => ({ ...looks.series[series.type], ...series }));
    return option;
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const places = [...document.querySelectorAll("[data-chart]")];

  // Exponential moving average, corrected for its bias towards the initial value 0.
  function smoothed(series, weight) {
    let [sum, share] = [0, 0];
    const data = series.data.map(([step, value]) => {
      [sum, share] = [weight * sum + (1 - weight) * value, weight * share + (1 - weight)];
      return [step, sum / share];
    });
    return { ...series, data };
  }

  function draw(place, isPrinted = false) {
    const option = { backgroundColor: "transparent", ...options[place.dataset.chart] };
    if (place.closest(".curves, .more")) {
      const weight = Number(place.closest("section").querySelector(".smooth").value);
      option.series = option.series.map((series) => smoothed(series, weight));
    }
    echarts.getInstanceByDom(place)?.dispose();
    const width = isPrinted ? Math.min(place.clientWidth, 680) : undefined; // no wider than a sheet
    echarts.init(place, dark.matches && !isPrinted ? "dark" : null, { renderer: "svg", width }).setOption(option);
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
  for (const place of places) {
    seen.observe(place);
    sized.observe(place);
  }
  const redraw = (isPrinted) => places.filter((place) => place.clientWidth).forEach((place) => draw(place, isPrinted));
  for (const slider of document.querySelectorAll(".smooth")) {
    slider.addEventListener("input", () => {
      const curves = [...slider.closest("section").querySelectorAll(":is(.curves, .more) .plot")];
      curves.filter((place) => echarts.getInstanceByDom(place)).forEach((place) => draw(place));
    });
  }
  dark.addEventListener("change", () => redraw(false));
  addEventListener("beforeprint", () => redraw(true));
  addEventListener("afterprint", () => redraw(false));

  // A click on a column header sorts the rows by the text of the cells; empty cells are always last.
  function sort(header) {
    const index = header.cellIndex;
    const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const each of header.parentNode.cells) each.removeAttribute("aria-sort");
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
  let shown = 0;
  function show(index) {
    shown = (index + zooms.length) % zooms.length;
    const image = zooms[shown].querySelector("img");
    viewer.querySelector("img").src = image.src;
    viewer.querySelector("p").textContent = image.alt;
    if (!viewer.open) viewer.showModal();
  }
  zooms.forEach((button, index) => button.addEventListener("click", () => show(index)));
  viewer.addEventListener("click", () => viewer.close());
  viewer.addEventListener("keydown", ({ key }) => {
    if (key === "ArrowLeft") show(shown - 1);
    if (key === "ArrowRight") show(shown + 1);
  });
})();
