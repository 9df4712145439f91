// Line charts of the series, as SVG.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 360;
const HEIGHT = 132;
const MARGIN = { left: 4, right: 60, top: 8, bottom: 18 };

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// The least of 1, 2 and 5 times a power of ten that is not below `value`.
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((digit) => digit * power >= value * 0.9999) * power;
}

// A chart that is drawn anew with each state. `lines`: name, value of a point, style class. `note`:
// what else there is to say of a state.
class Chart {
  constructor({ title, lines, format, least, note }) {
    this.lines = lines;
    this.format = format;
    this.least = least;
    this.hovered = null;
    this.noteOf = note;
    this.note = html("small", {});
    this.plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.values = lines.map(() => html("span", { class: "value" }));
    const keys = lines.map(({ name, style }, i) => {
      const sample = svg("svg", { viewBox: "0 0 20 8", class: "sample" });
      sample.append(svg("path", { d: "M0 4H20", class: `line ${style}` }));
      return html("span", { class: "key" }, sample, name, " ", this.values[i]);
    });
    this.element = html("figure", { class: "chart" },
      html("figcaption", {}, html("strong", {}, title, this.note), html("span", { class: "keys" }, ...keys)),
      this.plot);
    this.plot.setAttribute("aria-label", title);
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.plot.addEventListener("pointerleave", () => this.hover(null));
  }

  say(state) {
    if (this.noteOf) this.note.textContent = this.noteOf(state);
  }

  hover(event) {
    const box = this.plot.getBoundingClientRect();
    this.hovered = event && ((event.clientX - box.left) / box.width) * WIDTH;
    if (this.series) this.draw(this.series, this.span);
  }

  // `span`: seconds from the left edge to the right one, which is the latest point.
  draw(series, span) {
    this.series = series;
    this.span = span;
    const end = series.length ? series[series.length - 1].at : 0;
    const right = WIDTH - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const x = (point) => right - ((end - point.at) / span) * (right - MARGIN.left);
    const all = this.lines.flatMap(({ value }) => series.map(value)).filter((v) => v !== null);
    const top = niceCeiling(Math.max(this.least, ...all));
    const y = (value) => bottom - (value / top) * (bottom - MARGIN.top);
    const drawn = [];
    for (const part of [0, 0.5, 1]) {
      const at = y(part * top);
      drawn.push(svg("path", { d: `M${MARGIN.left} ${at}H${right}`, class: "grid" }));
      drawn.push(svg("text", { x: right + 6, y: at + 4 }, this.format(part * top)));
    }
    drawn.push(svg("text", { x: MARGIN.left, y: HEIGHT - 4 }, `−${Math.round(span / 60)} min`));
    drawn.push(svg("text", { x: right, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
    for (const { value, style } of this.lines) {
      let path = "";
      series.forEach((point, i) => {
        const found = value(point);
        if (found === null) return;
        const [before, after] = [series[i - 1], series[i + 1]];
        const begins = !before || value(before) === null;
        path += `${begins ? "M" : "L"}${x(point).toFixed(1)} ${y(found).toFixed(1)}`;
        // A point without neighbours has a line too.
        if (begins && (!after || value(after) === null)) path += "h1.5";
      });
      drawn.push(svg("path", { d: path, class: `line ${style}` }));
    }
    const shown = this.nearest(series, x);
    if (this.hovered !== null && shown) {
      drawn.push(svg("path", { d: `M${x(shown)} ${MARGIN.top}V${bottom}`, class: "cursor" }));
      const ago = Math.round(end - shown.at);
      drawn.push(svg("text", { x: (right + MARGIN.left) / 2, y: HEIGHT - 4, "text-anchor": "middle" },
        `${ago} s ago`));
    }
    this.plot.replaceChildren(...drawn);
    this.lines.forEach(({ value }, i) => {
      const found = shown ? value(shown) : null;
      this.values[i].textContent = found === null ? "–" : this.format(found);
    });
  }

  // The point under the pointer, or the latest one.
  nearest(series, x) {
    if (this.hovered === null) return series[series.length - 1];
    const distance = (point) => Math.abs(x(point) - this.hovered);
    return series.reduce((a, b) => (distance(b) < distance(a) ? b : a), series[0]);
  }
}
