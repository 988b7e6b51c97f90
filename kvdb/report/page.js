"use strict";

// Draws the figures in the page's colours, and again when these change.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displayModeBar: false };

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line") };
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--ink"), size: 13, family: getComputedStyle(document.body).fontFamily },
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
      dragmode: false,
    };
  }

  function draw() {
    for (const place of document.querySelectorAll("[data-figure]")) {
      const figure = figures[place.dataset.figure];
      Plotly.react(place, figure.data, themed(figure.layout), config);
    }
  }

  draw();
  dark.addEventListener("change", draw);
})();
