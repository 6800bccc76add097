// Draws every <canvas data-chart> (aerie_dashboard/charts.py) in the theme's colours, and again when the theme changes.
(() => {
  const ORDER = ["blue", "amber", "teal", "violet", "red", "grey"];
  const drawn = new Map();
  const number = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 3 });
  const short = new Intl.NumberFormat("en-GB", { notation: "compact", maximumSignificantDigits: 3 });
  const percent = new Intl.NumberFormat("en-GB", { style: "percent", maximumFractionDigits: 1 });

  // One so small that it would be written as zero (a learning rate) has its own digits.
  const written = (value, format) =>
    value && Math.abs(value) < 0.001 ? Number(value.toPrecision(3)).toExponential() : format.format(value);

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const fade = (name) => `color-mix(in srgb, ${colour(name)} 18%, transparent)`;

  const dataset = (chart, series, index, numeric) => {
    const tint = series.colour ?? ORDER[index % ORDER.length];
    const line = chart.kind === "line" || chart.kind === "sparkline";
    return {
      label: series.name,
      data: numeric ? series.values.map((y, i) => ({ x: chart.labels[i], y })) : series.values,
      borderColor: colour(tint),
      backgroundColor: line ? fade(tint) : colour(tint),
      borderWidth: line ? (chart.kind === "sparkline" ? 1.5 : 2) : 0,
      borderDash: series.dashed ? [5, 4] : [],
      borderRadius: line ? 0 : 3,
      maxBarThickness: 46,
      // Bars of one label stand together, however few labels there are.
      ...(chart.kind === "bar" && !chart.horizontal ? { categoryPercentage: Math.min(0.8, 0.09 * chart.labels.length) } : {}),
      pointRadius: chart.kind === "line" && series.values.length < 24 ? 2.5 : 0,
      pointHoverRadius: 4,
      pointBackgroundColor: colour(tint),
      tension: 0.2,
      fill: chart.kind === "sparkline",
      spanGaps: Boolean(series.joined),
    };
  };

  // Counts have no tick at a half.
  const whole = (chart) => chart.kind === "stacked" && chart.series.every((one) => one.values.every(Number.isInteger));

  const axis = (title, extra) => ({
    grid: { color: colour("line") },
    border: { color: colour("line") },
    ticks: { color: colour("muted"), font: { size: 11 }, maxRotation: 0, autoSkipPadding: 12, ...(extra.ticks ?? {}) },
    title: { display: Boolean(title), text: title, color: colour("muted"), font: { size: 11 } },
    ...Object.fromEntries(Object.entries(extra).filter(([name]) => name !== "ticks")),
  });

  const options = (chart, numeric) => {
    const said = (value) => (chart.percent ? percent.format(value) : written(value, number));
    const tick = (value) => (chart.percent ? percent.format(value) : written(value, short));
    const still = { animation: false, responsive: chart.kind !== "sparkline", maintainAspectRatio: false };
    if (chart.kind === "sparkline") {
      return {
        ...still,
        layout: { padding: 2 },
        plugins: { legend: { display: false }, tooltip: { enabled: false } },
        scales: { x: { display: false }, y: { display: false, beginAtZero: true } },
      };
    }
    const values = axis(chart.y_title, {
      ticks: { callback: tick, ...(whole(chart) ? { precision: 0 } : {}) },
      beginAtZero: !chart.logarithmic,
      stacked: chart.kind === "stacked",
      ...(chart.logarithmic ? { type: "logarithmic" } : {}),
    });
    const places = axis(chart.x_title, {
      stacked: chart.kind === "stacked",
      ...(numeric ? { type: "linear", ticks: { callback: (value) => short.format(value) } } : { ticks: { autoSkip: !chart.horizontal } }),
      ...(numeric ? {} : { grid: { display: false } }),
    });
    return {
      ...still,
      indexAxis: chart.horizontal ? "y" : "x",
      interaction: { mode: "index", intersect: false, axis: chart.horizontal ? "y" : "x" },
      scales: chart.horizontal ? { x: values, y: places } : { x: places, y: values },
      plugins: {
        legend: {
          display: chart.series.length > 1,
          position: "bottom",
          labels: { color: colour("text"), boxWidth: 10, boxHeight: 10, font: { size: 12 } },
        },
        tooltip: {
          callbacks: {
            label: (item) => ` ${item.dataset.label}: ${said(chart.horizontal ? item.parsed.x : item.parsed.y)}`,
          },
        },
      },
    };
  };

  const draw = (canvas) => {
    drawn.get(canvas)?.destroy();
    const chart = JSON.parse(canvas.dataset.chart);
    const numeric = !chart.horizontal && chart.kind === "line" && chart.labels.every((one) => typeof one === "number");
    const type = chart.kind === "line" || chart.kind === "sparkline" ? "line" : "bar";
    const data = {
      labels: chart.labels,
      datasets: chart.series.map((series, index) => dataset(chart, series, index, numeric)),
    };
    drawn.set(canvas, new Chart(canvas, { type, data, options: options(chart, numeric) }));
  };

  const drawAll = () => {
    for (const [canvas, chart] of drawn) {
      if (!canvas.isConnected) {
        chart.destroy();
        drawn.delete(canvas);
      }
    }
    Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
    document.querySelectorAll("canvas[data-chart]").forEach(draw);
  };

  document.addEventListener("aerie:theme", drawAll);
  document.addEventListener("aerie:content", drawAll);
  drawAll();
})();
