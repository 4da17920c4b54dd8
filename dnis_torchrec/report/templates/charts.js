// Draws every chart of the page; a legend that wraps, as on a narrow page, makes its chart higher.
// On a narrow page the lines between the marks of many tables would hide the marks.
"use strict";
for (const place of document.querySelectorAll(".chart")) {
  const { data, layout } = JSON.parse(place.querySelector("script").textContent);
  const room = 7 * Math.max(0, ...data.map((trace) => (trace.name || "").length)) + 50;
  const beside = Math.max(1, Math.floor(place.clientWidth / room));
  if (place.clientWidth < 500 && data.length > 4 && place.id === "chart-bits") {
    for (const trace of data) trace.mode = "markers";
  }
  if (layout.showlegend) layout.height += 20 * Math.ceil(data.length / beside);
  Plotly.newPlot(place, data, layout, {
    responsive: true,
    displaylogo: false,
    displayModeBar: place.clientWidth > 500,
    modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
    toImageButtonOptions: { format: "svg", filename: place.id.replace("chart-", "") },
  });
}

const copy = document.getElementById("copy");
copy.addEventListener("click", () => {
  // Unlike navigator.clipboard it also works in a page that was opened from a file.
  getSelection().selectAllChildren(document.getElementById("commands"));
  copy.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl-C";
});
