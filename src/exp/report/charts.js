"use strict";
// ECharts' options for each chart of the page. Names reach it as text or through text nodes, never as HTML.
const charts = (() => {
  const { data, settings, css, last, mean, number, runsOf, textOf, linesOf, isStrong, colorOf, interpolate, axisOf, traceOf } = lines;
  const CROSS = "path://M0 0L8 8M8 0L0 8";
  const short = (text, width = 18) => (text.length <= width ? text : `${text.slice(0, width - 1)}…`);
  const plural = (count) => `${count} run${count === 1 ? "" : "s"}`;
  const text = () => ({ color: css("soft"), fontFamily: css("sans"), fontSize: 11 });
  const cross = () => ({ color: "none", borderColor: css("soft"), borderWidth: 1.5 });
  const strokeOf = (line) => ({
    color: colorOf(line), type: line.failed ? "dashed" : "solid", width: isStrong(line) ? 1.8 : 1, opacity: isStrong(line) ? 1 : 0.55,
  });

  function tip(head, rows) {
    const node = document.createElement("div");
    node.append(head);
    for (const [color, words] of rows) {
      const row = node.appendChild(document.createElement("div"));
      if (color) {
        const dot = row.appendChild(document.createElement("i"));
        dot.className = "dot";
        dot.style.background = color;
      }
      row.append(words);
    }
    return node;
  }

  const common = (title) => ({
    animation: false,
    textStyle: { fontFamily: css("sans") },
    tooltip: {
      confine: true, className: "tip", backgroundColor: css("ink"), borderWidth: 0, padding: [3, 8], transitionDuration: 0,
      textStyle: { color: css("paper"), fontSize: 12 }, trigger: "item", formatter: ({ data: item }) => (item?.tip ? tip(...item.tip) : ""),
    },
    toolbox: {
      show: !document.documentElement.classList.contains("printed"),
      right: 4, top: 0, itemSize: 11, itemGap: 10, iconStyle: { borderColor: css("soft") },
      feature: { dataZoom: { filterMode: "none" }, saveAsImage: { name: title, type: "svg", backgroundColor: css("paper") } },
    },
    grid: { left: 8, right: 22, top: 24, bottom: 26, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    // With fingers: two of them zoom, and one still scrolls the page.
    dataZoom: !matchMedia("(pointer: coarse)").matches ? [] : ["xAxisIndex", "yAxisIndex"].map((which) => ({
      type: "inside", [which]: 0, filterMode: "none", moveOnMouseMove: false, preventDefaultMouseMove: false,
    })),
  });

  const axis = (type, more = {}) => ({
    type, scale: true, nameTextStyle: text(),
    axisLine: { show: false }, axisTick: { show: false }, splitLine: { lineStyle: { color: css("line") } }, ...more,
    axisLabel: {
      ...text(), hideOverlap: true, formatter: (value) => (typeof value === "number" ? number(value) : short(value)), ...more.axisLabel,
    },
  });
  // The name below the right end of an x axis.
  const named = (name) => ({
    name, nameLocation: "end", nameGap: 0, splitLine: { show: false },
    nameTextStyle: { ...text(), align: "right", verticalAlign: "top", padding: [22, 0, 0, 0] },
  });

  // ECharts labels whole decades only: of a few decades, values between them need labels as well.
  function decadeMarks(low, high) {
    const decades = Math.log10(high / low);
    const found = [];
    if (decades < 0.6) {
      const rough = (high - low) / 5 || high;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= rough);
      for (let count = Math.ceil(low / step); count * step <= high; count++) found.push(Number((count * step).toPrecision(6)));
      return found;
    }
    const marks = decades > 3 ? [1] : decades > 1.5 ? [1, 2, 5] : [1, 2, 3, 5, 7];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      found.push(...marks.map((mark) => Number(`${mark}e${power}`)).filter((value) => value >= low && value <= high));
    }
    return found;
  }
  function logAxis(values, more = {}) {
    const positive = values.filter((value) => value > 0);
    const [low, high] = positive.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, 0]);
    if (!positive.length) return axis("log", more);
    const margin = (high / low) ** 0.04;
    const [min, max] = high > low ? [low / margin, high * margin] : [low / 1.5, high * 1.5];
    const distinct = [...new Set(positive)];
    const customValues = distinct.length < 10 ? distinct : decadeMarks(min, max);
    const marked = (part) => ({ ...part, customValues });
    return axis("log", { min, max, ...more, axisTick: marked(more.axisTick ?? { show: false }), axisLabel: marked(more.axisLabel) });
  }
  const scores = (values, log, more) => (log ? logAxis(values, more) : axis("value", more));

  function bandSeries(band, color) {
    return {
      type: "custom", silent: true, clip: true, z: 1, data: band, encode: { x: 0, y: [1, 2] }, tooltip: { show: false },
      renderItem: ({ dataIndexInside }, api) => {
        const points = () => [...band.map(([x, , high]) => api.coord([x, high])), ...band.map(([x, low]) => api.coord([x, low])).reverse()];
        return dataIndexInside ? null : { type: "polygon", style: { fill: color, opacity: 0.16 }, shape: { points: points() } };
      },
    };
  }

  function lineSeries({ line, curve, raw, band }, smooth, isShown) {
    const pairs = ([xs, ys]) => xs.map((x, index) => [x, ys[index]]).filter(([, y]) => isShown(y));
    const stroke = strokeOf(line);
    const found = [];
    if (band.length && isStrong(line)) found.push(bandSeries(band.filter(([, low]) => isShown(low)), colorOf(line)));
    if (raw && smooth && isStrong(line)) {
      found.push({ type: "line", data: pairs(raw), silent: true, showSymbol: false, z: 1, lineStyle: { ...stroke, width: 1, opacity: 0.25 } });
    }
    const few = curve[0].length === 1 || (curve[0].length <= 25 && isStrong(line));
    found.push({
      type: "line", id: `line ${line.place}`, name: line.label, data: pairs(curve), z: isStrong(line) ? 4 : 2, triggerLineEvent: true,
      symbol: "circle", symbolSize: 5, showSymbol: few, showAllSymbol: true, lineStyle: stroke, itemStyle: { color: colorOf(line) },
      emphasis: { focus: "series", lineStyle: { width: 3, opacity: 1 } }, blur: { lineStyle: { opacity: 0.2 } },
    });
    return found;
  }

  function curves(chart, log) {
    const { section } = chart;
    const where = axisOf(section);
    const traces = linesOf(section).map((line) => traceOf(line, chart.kind, section)).filter(Boolean);
    chart.lines = new Map(traces.map(({ line }) => [`line ${line.place}`, line]));
    const values = traces.flatMap(({ curve, band }) => [...curve[1], ...band.flatMap(([, low, high]) => [low, high])]);
    const option = common(chart.title);
    // Where the pointer is: the lines in colour, and the one that it is on.
    const formatter = ([{ axisValue }]) => {
      const there = traces.filter(({ line, curve: [xs] }) => (isStrong(line) || line === chart.over) && xs[0] <= axisValue && axisValue <= last(xs));
      const rows = there.map(({ line, curve }) => [interpolate(curve, axisValue), line]).sort(([one], [other]) => other - one);
      const words = (value, line) => `${number(value)}  ${short(line.label, 48)}${line === chart.over ? `; ${line.note}` : ""}`;
      return tip(where.tell(axisValue), rows.map(([value, line]) => [colorOf(line), words(value, line)]));
    };
    return {
      ...option,
      tooltip: { ...option.tooltip, trigger: "axis", axisPointer: { snap: false, lineStyle: { color: css("soft") } }, formatter },
      xAxis: axis("value", { ...named(where.name), max: "dataMax", minInterval: settings[section].x === "step" ? 1 : 0 }),
      yAxis: scores(values, log),
      series: traces.flatMap((trace) => lineSeries(trace, settings[section].smooth, (value) => !log || value > 0)),
    };
  }

  // Each run beside the line that it is part of; the best last, so that they lie on top.
  const members = (section) => linesOf(section).flatMap((line) => line.runs.map((run) => ({ line, run })))
    .sort((one, other) => isStrong(one.line) - isStrong(other.line) || other.run.place - one.run.place);
  const item = ({ line, run }, value) => ({
    value, line, tip: [run.settings || run.name, [["", `${run.name}: ${run.score}`]]],
    itemStyle: { color: colorOf(line), opacity: isStrong(line) ? 0.9 : 0.6 },
  });

  function parallel(chart) {
    const { keys, metric, greater } = data.sections[chart.section];
    const runs = members(chart.section);
    const axes = keys.slice(0, 10).map((key, dim) => ({ ...key, values: runs.map(({ run }) => run.at[dim]) }));
    axes.push({ name: metric, kind: "value", inverse: !greater });
    const upright = chart.place.clientWidth < 90 * axes.length;
    const look = {
      axisLine: { show: true, lineStyle: { color: css("soft") } }, axisTick: { show: true, length: 4 }, z: 10,
      axisLabel: { color: css("ink"), textBorderColor: css("paper"), textBorderWidth: 3 },
    };
    const option = common(chart.title);
    delete option.toolbox.feature.dataZoom;
    return {
      ...option,
      parallel: upright ? { left: 90, right: 24, top: 30, bottom: 34, layout: "vertical" } : { left: 30, right: 60, top: 44, bottom: 22 },
      parallelAxis: axes.map((key, dim) => ({
        ...(key.kind === "log" ? logAxis(key.values, look) : axis(key.kind, look)), dim, data: key.categories,
        name: short(key.name, 16), inverse: key.inverse, nameGap: 14, nameLocation: upright !== Boolean(key.inverse) ? "start" : "end",
      })),
      series: {
        type: "parallel", emphasis: { lineStyle: { width: 4, opacity: 1 } },
        data: runs.map((each) => ({ ...item(each, [...each.run.at.slice(0, 10), each.run.metric ?? "-"]), lineStyle: strokeOf(each.line) })),
      },
    };
  }

  function over(chart, log) {
    const { keys, metric } = data.sections[chart.section];
    const index = Number(last(chart.kind.split(" ")));
    const key = keys[index];
    const inRows = key.kind === "category";
    const all = members(chart.section);
    const known = all.filter(({ run }) => run.metric !== null);
    const at = new Map();
    for (const { run } of known) at.set(run.at[index], [...(at.get(run.at[index]) ?? []), run.metric]);
    const means = [...at].map(([place, values]) => [place, mean(values)]).sort(([one], [other]) => one - other);
    const values = scores(known.map(({ run }) => run.metric), log, inRows ? named(metric) : {});
    const places = inRows ? axis("category", { data: key.categories, inverse: true })
      : key.kind === "log" ? logAxis(all.map(({ run }) => run.at[index]), named(key.name)) : axis("value", named(key.name));
    const series = [];
    if (inRows && known.length > at.size) {
      const bars = means.map(([place, value]) => [value, place]);
      series.push({ type: "scatter", symbol: "rect", symbolSize: [2, 18], silent: true, z: 1, itemStyle: { color: css("soft") }, data: bars });
    } else if (!inRows && (at.size <= 12 || known.length >= 2 * at.size)) { // of a random search it would be scribble
      series.push({ type: "line", silent: true, showSymbol: false, z: 1, lineStyle: { color: css("soft"), width: 1.2 }, data: means });
    }
    // Runs without a result have a place among the keys, but none among the metrics: they are on the rim.
    const rim = all.filter(({ run }) => run.metric === null).map((each) => ({
      ...item(each), ...(inRows ? { x: "98%", yAxis: each.run.at[index] } : { xAxis: each.run.at[index], y: 34 }),
      symbol: CROSS, symbolSize: 8, itemStyle: cross(), label: { show: false },
    }));
    const points = known.map((each) => item(each, inRows ? [each.run.metric, each.run.at[index]] : [each.run.at[index], each.run.metric]));
    series.push({ type: "scatter", symbolSize: 9, z: 3, data: points, markPoint: { data: rim } });
    return { ...common(chart.title), xAxis: inRows ? values : places, yAxis: inRows ? places : values, series };
  }

  function map(chart) {
    const { keys, map: pair, metric, greater } = data.sections[chart.section];
    const runs = runsOf(chart.section);
    const sides = pair.map((index) => [...new Set(runs.map((run) => run.at[index]))].sort((one, other) => one - other));
    const cells = new Map();
    for (const run of runs) {
      const place = pair.map((index, side) => sides[side].indexOf(run.at[index]));
      if (!cells.has(String(place))) cells.set(String(place), { place, values: [] });
      if (run.metric !== null) cells.get(String(place)).values.push(run.metric);
    }
    const known = [...cells.values()].filter(({ values }) => values.length);
    const empty = [...cells.values()].filter(({ values }) => !values.length).map(({ place }) => place);
    const means = known.map(({ values }) => mean(values));
    const [least, most] = [Math.min(...means), Math.max(...means)];
    const dark = (value) => ((value - least) / (most - least) > 0.5) === greater;
    const rounded = (value) => number(Number(value.toPrecision(4)));
    const blues = ["#cfe3f5", "#7fb4df", "#2f6fb5", "#0b3468"]; // the best is the darkest
    const side = (which) => ({ splitLine: { show: false }, data: sides[which].map((at) => textOf(keys[pair[which]], at)) });
    const option = common(chart.title);
    delete option.toolbox.feature.dataZoom;
    return {
      ...option, dataZoom: [],
      grid: { ...option.grid, right: 70 },
      xAxis: axis("category", { ...named(keys[pair[0]].name), ...side(0) }),
      yAxis: axis("category", { name: keys[pair[1]].name, nameGap: 6, nameTextStyle: { ...text(), align: "left" }, ...side(1) }),
      visualMap: {
        min: least, max: most, dimension: 2, seriesIndex: 0, inverse: !greater, inRange: { color: greater ? blues : blues.reverse() },
        right: 0, top: "middle", itemHeight: 90, itemWidth: 12, textGap: 6, textStyle: text(), text: [most, least].map(rounded),
      },
      series: [
        {
          type: "heatmap", itemStyle: { borderColor: css("paper"), borderWidth: 1.5 },
          label: { show: sides[0].length <= 8, fontSize: 11, formatter: ({ data: each }) => rounded(each.value[2]) },
          data: known.map(({ place, values }, index) => ({
            value: [...place, means[index]], label: { color: dark(means[index]) ? "#fff" : "#111" },
            tip: [`${metric} ${number(means[index])}`, [["", `mean of ${plural(values.length)}`]]],
          })),
        },
        { type: "scatter", silent: true, symbol: CROSS, symbolSize: 9, itemStyle: cross(), data: empty },
      ],
    };
  }

  return { decadeMarks, options: { parallel, map, over, curves } };
})();
