// Charts of all pages, by uPlot: lines, marks with their spread, stacked bars; values under the pointer and the arrow keys.
"use strict";
const show = (v) => (v == null ? "–" : Math.abs(v) >= 1000 ? v.toFixed(0) : String(+v.toPrecision(4)));
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]);  // between two steps

// The y axis holds the data, and the values that the chart must reach, with some air.
function yRange({ include, spread, stacked }, low, high) {
  const ends = spread.flatMap(([, ...each]) => each);
  const [bottom, top] = [Math.min(low, ...include, ...ends), Math.max(high, ...include, ...ends)];
  const size = Math.max(Math.abs(bottom), Math.abs(top)), air = 0.03 * (top - bottom);
  if (top - bottom <= 1e-6 * size) return size ? [bottom - size / 2, top + size / 2] : [-0.03, 1];  // no ticks fit between
  const wide = uPlot.rangeNum(bottom, top, 0.1, true);
  if (stacked) return [0, wide[1]];
  return [include.includes(bottom) ? bottom - air : wide[0], include.includes(top) ? top + air : wide[1]];
}

function drawChart(box) {
  box.plot?.destroy();
  const chart = JSON.parse(box.parentElement.querySelector("script").textContent);
  const value = box.parentElement.querySelector(".value");
  const css = getComputedStyle(box);
  const linked = chart.series.some((s) => s.run !== null), opens = linked && document.body.dataset.live;
  const few = (s) => 3 * s.y.filter((y) => y != null).length < chart.x.length;  // a line of few values needs their marks
  const lines = chart.series.map((s, i) => ({ ...s, drawn: s.y, marked: s.points || few(s), colour: css.getPropertyValue(`--c${(i % 8) + 1}`) }));
  if (chart.stacked) {  // each part on those before it; the highest is drawn first
    lines.forEach((s, i) => { s.drawn = s.y.map((y, at) => y + (i ? lines[i - 1].drawn[at] : 0)); });
    lines.reverse();
  }
  const spread = lines.flatMap((s) => s.spread);
  const gap = Math.min(...chart.x.slice(1).map((x, i) => x - chart.x[i]), Infinity), half = Number.isFinite(gap) ? gap / 2 : 0.5;
  const runs = [...new Map(chart.series.filter((s) => opens && s.run !== null).map((s) => [s.run, s.name]))];
  let focused = null;
  const say = (i) => {
    const shown = chart.series.filter((s) => i != null && s.y[i] != null).map((s) => `${s.label} ${show(s.y[i])}`).join(", ");
    const chosen = runs[box.chosen] ? `Enter opens ${runs[box.chosen][1]}` : "";
    value.textContent = [i == null ? "" : `${chart.x_label} ${chart.x[i]}: ${shown}`, chosen].filter(Boolean).join(". ");
  };
  const axis = { stroke: css.color, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884" } };
  const plot = new uPlot({
    width: Math.max(280, box.clientWidth), height: 230,
    scales: {
      x: { time: false, ...(chart.stacked && { range: (_, low, high) => [low - half, high + half] }) },
      y: chart.log ? { distr: 3 } : { range: (_, low, high) => yRange({ ...chart, spread }, low, high) },
    },
    axes: [
      { ...axis, incrs: WHOLE, size: 32, label: chart.x_label, labelSize: 18, labelFont: "12px sans-serif" },
      { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => (v == null ? "" : show(v))) },
    ],
    focus: { alpha: 0.35 }, cursor: { focus: { prox: chart.stacked ? -1 : 24 } },
    legend: { show: lines.length > 1 || lines[0].points, live: false },
    series: [{}, ...lines.map((s) => ({
      label: s.label, stroke: s.colour, width: 1.6, spanGaps: true, points: { size: s.marked ? 8 : 5, ...(s.marked && { show: true, fill: s.colour }) },
      dash: linked && s.run === null ? [6, 4] : undefined,
      ...(s.points && { paths: () => null }),
      ...(chart.stacked && { fill: s.colour, width: 0, paths: uPlot.paths.bars({ size: [0.84] }), points: { show: false } }),
    }))],
    hooks: {
      setSeries: [(_, i) => { focused = i; }],
      setCursor: [(u) => say(u.cursor.idx)],
      ready: [(u) => box.at >= 0 && place(u)],  // a chart that is drawn again stays where it was
      draw: [(u) => {
        u.ctx.lineWidth = 1.6 * devicePixelRatio;
        for (const s of lines) for (const [x, low, high] of s.spread) {
          u.ctx.strokeStyle = s.colour;
          u.ctx.beginPath();
          for (const end of [low, high]) u.ctx.lineTo(u.valToPos(x, "x", true), u.valToPos(end, "y", true));
          u.ctx.stroke();
        }
      }],
    },
  }, [chart.x, ...lines.map((s) => s.drawn)], box);
  const open = (chosen) => {
    const i = plot.cursor.idx;
    if (i == null || !opens) return;
    const run = chosen ?? chart.series.find((s) => s.run !== null && s.y[i] != null)?.run;
    if (run != null) location.href = `/run/${run}/step/${chart.x[i]}`;
  };
  plot.over.addEventListener("click", () => open(lines[focused - 1]?.run));
  const place = (u) => u.setCursor({ left: u.valToPos(chart.x[box.at], "x"), top: 10 });
  box.at ??= -1;  // where the arrow keys are; `box.chosen`: on which of the runs
  if (opens) box.ariaLabel = box.ariaLabel.replace(/move\.$/, `move${runs.length > 1 ? ", up and down choose a run" : ""}, Enter opens the step.`);
  box.onkeydown = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], turn = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (move) {
      box.at = Math.min(chart.x.length - 1, Math.max(0, box.at + move));
      place(plot);
    } else if (turn && runs.length > 1) {
      box.chosen = ((box.chosen ?? -Math.max(0, turn)) + turn + runs.length) % runs.length;
      say(plot.cursor.idx);
    } else if (event.key === "Enter") open(runs[box.chosen]?.[0]);
    if (move || (turn && runs.length > 1)) event.preventDefault();
  };
  box.plot = plot;
}
const drawCharts = () => document.querySelectorAll(".chart").forEach(drawChart);
drawCharts();
addEventListener("resize", () => document.querySelectorAll(".chart").forEach((box) => {
  box.plot.setSize({ width: Math.max(280, box.clientWidth), height: box.plot.height });
}));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
