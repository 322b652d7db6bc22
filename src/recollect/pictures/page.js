"use strict";
// Fill the page from its JSON. Names of modules are untrusted text: insert them as text nodes, and pass them to Plotly,
// which interprets some HTML, only through `plain`.
(async () => {
  const element = (id) => document.getElementById(id);
  const data = JSON.parse(element("data").textContent);
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  // As recollect.byte_format.format_bytes.
  const size = (value) => {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log(Math.max(1, value * data.unit_bytes)) / Math.log(1024))));
    const scaled = value * data.unit_bytes / 1024 ** power;
    return power ? `${scaled.toFixed(1)} ${" KMGT"[power]}iB` : `${Math.round(scaled)} B`;
  };
  const make = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  let chosen = data.chosen;

  try {
    const packed = Uint8Array.from(atob(element("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(make("script", { textContent: await new Response(stream).text() }));
  } catch (problem) {
    element("problem").textContent = `The charts need a browser of 2023 or later (${problem}).`;
    element("problem").hidden = false;
  }
  document.querySelector("main").hidden = false;

  function layout(more) {
    const axis = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), fixedrange: true };
    return {
      paper_bgcolor: color("paper"), plot_bgcolor: color("paper"), font: { color: color("ink"), size: 12 },
      margin: { l: 58, r: 12, t: 14, b: 46 }, hovermode: "closest",
      showlegend: false,
      ...more,
      xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, rangemode: "tozero", ...more.yaxis },
    };
  }
  // Plotly's names, and the characters for the legend.
  const symbols = [
    ["diamond", "\u25c6"], ["square", "\u25a0"], ["triangle-up", "\u25b2"], ["cross", "\u271a"], ["star", "\u2605"],
    ["x", "\u2716"], ["triangle-down", "\u25bc"], ["hexagon", "\u2b22"],
  ];
  const config = { displayModeBar: false, responsive: true };

  function pointTrace(group, name, indices, style) {
    return {
      name, type: "scatter", customdata: indices, hoverinfo: "none", meta: group,
      x: indices.map((i) => data.plans[i].peak), y: indices.map((i) => data.plans[i].slowdown),
      text: indices.map((i) => data.plans[i].hover.join("\n")),
      cliponaxis: false, ...style,
    };
  }

  function drawFrontier() {
    const of = (group) => data.plans.flatMap((plan, i) => plan.group === group ? [i] : []);
    const traces = [
      {
        name: "no plan can be here", type: "scatter", mode: "lines", hoverinfo: "skip", fill: "tozeroy",
        x: data.bound.map((corner) => corner[0]), y: data.bound.map((corner) => corner[1]),
        line: { color: color("bound"), width: 1 }, fillcolor: `${color("bound")}33`, visible: data.bound.length > 0,
      },
      pointTrace("plan", "recollect", of("plan"), {
        mode: "lines+markers", line: { color: color("ours"), width: 2.5 }, marker: { size: 9 },
      }),
      ...of("classic").map((i, n) => pointTrace("classic", data.plans[i].name, [i], {
        mode: "markers", marker: { size: 11, color: color("classic"), symbol: symbols[n % symbols.length][0] },
      })),
      {
        name: "shown below", type: "scatter", mode: "markers", hoverinfo: "skip",
        x: [data.plans[chosen].peak], y: [data.plans[chosen].slowdown],
        marker: { size: 19, symbol: "circle-open", color: color("ink"), line: { width: 2.5 } },
      },
    ];
    const edge = Math.max(data.range[0], data.no_plan_below ?? -Infinity);
    const frame = layout({
      shapes: [{
        type: "rect", layer: "below", x0: data.range[0], x1: edge, y0: 0, y1: 1, yref: "paper", line: { width: 0 },
        fillcolor: `${color("bound")}33`,
      }],
      xaxis: { title: { text: `predicted peak of the step (${data.unit})` }, range: data.range },
      yaxis: { title: { text: "predicted slowdown (%)" } },
    });
    return Plotly.react("frontier", traces, frame, config);
  }

  function drawMemory() {
    const memory = data.plans[chosen].memory;
    const step = memory.end / memory.places.length;
    // One corner more than stretches: the last one then has a width.
    const x = [...memory.places.map((_, i) => i * step), memory.end];
    const closed = (values) => [...values, values[values.length - 1]];
    const values = data.categories.map((_, c) => typeof memory.bytes[c] === "number"
      ? memory.places.map(() => memory.bytes[c]) : memory.bytes[c]);
    const total = memory.places.map((_, i) => values.reduce((sum, of) => sum + of[i], 0));
    const hover = memory.places.map((place, i) => [
      `${size(total[i])}, ${memory.names[place]}`,
      ...data.categories.flatMap((c, n) => values[n][i] > 0 ? [`${size(values[n][i]).padStart(10)}  ${c.name}`] : []).reverse(),
    ].join("\n"));
    const bare = data.plain;
    const traces = [
      ...data.categories.map((category, c) => ({
        name: category.name, type: "scatter", mode: "lines", stackgroup: "alive", hoverinfo: "skip", x, y: closed(values[c]),
        line: { shape: "hv", width: 0 }, fillcolor: category.color,
      })),
      {
        type: "scatter", mode: "lines", x, y: closed(total), text: closed(hover), hoverinfo: "none",
        line: { shape: "hv", width: 1, color: color("ink") },
      },
      {
        type: "scatter", mode: "lines", hoverinfo: "skip", x: bare.bytes.map((_, i) => i * bare.end / bare.bytes.length),
        y: bare.bytes, line: { shape: "hv", width: 1, color: color("pale") },
      },
      ...(memory.host ? [{
        name: "in host memory", type: "scatter", mode: "lines", hoverinfo: "skip", x, y: closed(memory.host),
        line: { shape: "hv", width: 2, dash: "dot", color: color("classic") },
      }] : []),
      ...(memory.budget ? [{
        type: "scatter", mode: "lines", hoverinfo: "skip", x: [0, memory.end], y: [memory.budget[0], memory.budget[0]],
        line: { dash: "dash", width: 1.5, color: color("ink") },
      }] : []),
      {
        name: "peak", type: "scatter", mode: "markers", hoverinfo: "skip", x: [memory.peak_at], y: [data.plans[chosen].peak],
        marker: { size: 10, color: color("ink"), line: { width: 2, color: color("paper") } },
      },
    ];
    const wide = (phase) => phase[2] - phase[1] > 0.12 * memory.end;
    const frame = layout({
      hovermode: "x",
      xaxis: { title: { text: plain(memory.axis).replace("; ", "<br>") }, automargin: true, range: [0, memory.end] },
      yaxis: { title: { text: `bytes alive (${data.unit})` }, range: [0, 1.2 * Math.max(bare.peak, data.plans[chosen].peak, ...(memory.host ?? []))] },
      shapes: memory.phases.filter((phase) => phase[1] > 0).map((phase) => ({
        type: "line", x0: phase[1], x1: phase[1], y0: 0, y1: 1, yref: "paper", line: { width: 1, color: color("pale") },
      })),
      annotations: [
        ...memory.phases.filter(wide).map((phase) => ({
          text: plain(phase[0]), x: (phase[1] + phase[2]) / 2, y: 1, yref: "paper", yanchor: "top", showarrow: false,
        })),
        { text: "without recompute", x: bare.peak_at, y: bare.peak, yanchor: "bottom", showarrow: false, font: { size: 11 } },
        ...(memory.host ? [{
          text: "in host memory", x: step * memory.host.indexOf(Math.max(...memory.host)), y: Math.max(...memory.host),
          yanchor: "bottom", showarrow: false, font: { size: 11, color: color("classic") },
        }] : []),
        ...(memory.budget ? [{
          text: memory.budget[1], x: memory.end, xanchor: "right", y: memory.budget[0], yanchor: "bottom", showarrow: false,
          font: { size: 11 },
        }] : []),
      ],
    });
    return Plotly.react("memory", traces, frame, config);
  }

  function fillText() {
    const plan = data.plans[chosen];
    element("plan").value = String(chosen);
    element("reading").textContent = plan.hover[0] + (plan.bound_text ? `; ${plan.bound_text}` : "");
    element("where").textContent = plan.where;
    element("meaning").textContent = plan.meaning ? `${plan.name}: ${plan.meaning}` : "";
    for (const what of ["command", "code"]) element(what).textContent = plan[what].trim();
    element("command-step").hidden = !plan.command;
    element("text").textContent = plan.text;
    const swatch = (c) => make("span", { className: "swatch", style: `background: ${data.categories[c].color}` });
    const row = (what, amount) => make("tr", {}, what, make("td", { className: "number" }, amount));
    const rows = plan.alive.flatMap((group) => [
      row(make("th", {}, swatch(group.category), data.categories[group.category].name), group.size),
      ...group.items.map(([name, amount]) => row(make("td", { className: "item" }, name), amount)),
    ]);
    element("alive").tBodies[0].replaceChildren(...rows);
    element("legend").replaceChildren(...data.categories.flatMap((category, c) =>
      plan.memory.bytes[c] === 0 ? [] : [make("li", {}, swatch(c), category.name)]).reverse());
  }

  function fillKey() {
    const entry = (name, glyph, shade) =>
      make("li", {}, make("span", { style: `color: var(--${shade})` }, `${glyph} `), name);
    element("key").replaceChildren(
      entry("recollect", "\u25cf", "ours"),
      ...data.plans.filter((plan) => plan.group === "classic")
        .map((plan, n) => entry(plan.name, symbols[n % symbols.length][1], "classic")),
      entry("shown below", "\u25cb", "ink"),
      ...(data.bound.length ? [entry("no plan can be here", "\u25a0", "bound")] : []),
    );
  }

  function draw() {
    fillText();
    if (!window.Plotly) return Promise.resolve();
    return Promise.all([data.plans.length > 1 ? drawFrontier() : null, drawMemory()]);
  }

  function choose(index) {
    chosen = index;
    // The address names the plan and can be shared.
    if (data.plans[index].slug) location.hash = data.plans[index].slug;
    draw();
  }
  const fromAddress = () => data.plans.findIndex((plan) => plan.slug && `#${plan.slug}` === location.hash);

  async function copy(button) {
    const source = element(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      // A page from a file may not be allowed to: leave the text selected for the keyboard.
      getSelection().selectAllChildren(source);
      button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  // Plotly's own labels are cut off at the chart's edge; this one stays within the window.
  function showTip(event) {
    const point = event.points.find((found) => found.data.hoverinfo === "none");
    if (!point) return;
    const tip = element("tip");
    const lines = (point.text ?? point.data.text[point.pointIndex]).split("\n");
    // A plan's table does not fit a phone, and wrapped it cannot be read: it is in full below.
    const plan = data.plans[point.customdata];
    tip.textContent = (plan && innerWidth < 600 ? lines.slice(0, plan.bound_text ? 2 : 1) : lines).join("\n");
    tip.hidden = false;
    const [x, y] = [event.event.clientX, event.event.clientY];
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - wide - 8))}px`;
    tip.style.top = `${y + 18 + high < innerHeight ? y + 18 : Math.max(8, y - high - 14)}px`;
  }

  for (const [group, name] of [["plan", "recollect"], ["classic", "classic schedules"]]) {
    const options = data.plans.flatMap((plan, i) => plan.group === group ? [new Option(plan.label, String(i))] : []);
    if (options.length) element("plan").append(make("optgroup", { label: name }, ...options));
  }
  fillKey();
  element("meanings").replaceChildren(...data.categories.flatMap(
    (category) => [make("dt", {}, category.name), make("dd", {}, category.meaning)]));
  if (fromAddress() >= 0) chosen = fromAddress();
  addEventListener("hashchange", () => {
    const index = fromAddress();
    if (index >= 0 && index !== chosen) choose(index);
  });
  for (const button of document.querySelectorAll("button[data-copies]")) button.addEventListener("click", () => copy(button));
  element("next").hidden = data.plans.length < 2;
  element("choice").hidden = data.plans.length < 2;
  element("plan").addEventListener("change", (event) => choose(Number(event.target.value)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  await draw();
  if (window.Plotly) {
    for (const chart of data.plans.length > 1 ? ["frontier", "memory"] : ["memory"]) {
      element(chart).on("plotly_hover", showTip);
      element(chart).on("plotly_unhover", () => { element("tip").hidden = true; });
    }
  }
  if (window.Plotly && data.plans.length > 1) {
    element("frontier").on("plotly_click", (event) => {
      const index = event.points[0].customdata;
      if (index !== undefined) choose(index);
    });
  }
  document.body.dataset.ready = "yes";
})();
