// The sliders of the widget that tools/build_widget.py puts on a page. Every figure and every word comes from the grid that it made;
// this script looks them up and draws the same table.
(() => {
  const METRICS = ["seconds", "bytes", "extra"], AXES = ["n", "v", "h", "dtype", "budget", "gpu"], UNITS = ["MiB", "GiB", "TiB"];
  const box = document.querySelector(".fl-plans");
  const inputs = AXES.map(axis => document.getElementById(`fl-plan-${axis}`));
  let grid;

  const code = (text, place) => grid.letters.indexOf(text[2 * place]) * grid.letters.length + grid.letters.indexOf(text[2 * place + 1]);

  // [text, value] of a code, as figure_text and figure_value have them
  const figure = (metric, code) => {
    if (metric === "seconds") {
      const power = Math.floor(code / 900), number = ((code % 900 + 100) / 10 ** (2 - power % 3)).toFixed(2 - power % 3);
      return [`${number} ${["µs", "ms", "s"][Math.floor(power / 3)]}`, number * 1000 ** (Math.floor(power / 3) - 2)];
    }
    const unit = Math.floor(code / 2724), rest = code % 2724, skipped = Math.min(Math.floor(rest / 900), 2);
    const number = ((rest - 900 * skipped + 100) / 10 ** (2 - skipped)).toFixed(2 - skipped);
    return [`${number} ${UNITS[unit]}`, number * 1024 ** (unit + 2)];
  };

  // the code called `name` at the place of the sliders
  const found = (name, [n, v, h, dtype, budget, gpu]) => {
    const {stops, index, blocks} = grid;
    const block = blocks[code(index[name], ((dtype * stops.gpu.length + gpu) * stops.budget.length + budget) * stops.h.length + h)];
    return code(block, v * stops.n.length + n);
  };

  const element = (name, attributes, ...inside) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  };

  const points = at => Object.fromEntries(grid.measured.filter(p => at.every((place, axis) => p[axis] === place))
    .map(([, , , , , , method, seconds, extra, made]) => [method, {seconds, extra, made}]));

  const fillCell = (cell, metric, now, limit, point, longest) => {
    const share = value => `${(100 * value / longest).toFixed(1)}%`, [bar] = cell.querySelectorAll(".fl-bar > i");
    cell.querySelector(".fl-shown").textContent = now[0];
    bar.style.width = share(now[1]);
    cell.querySelectorAll(".fl-limit, .fl-point, .fl-measured").forEach(old => old.remove());
    if (metric === "extra" && limit[1] <= longest) bar.after(element("i", {class: "fl-limit", style: `left:${share(limit[1])}`}));
    if (!point) return;
    bar.parentElement.append(element("i", {class: "fl-point", style: `left:${share(point[1])}`}));
    cell.append(element("span", {class: "fl-measured"}, `measured ${point[0]}`));
  };

  const fillColumn = (rows, metric, at, limit, measured) => {
    const now = grid.methods.map((_, method) => figure(metric, found(metric + method, at)));
    const points = now.map((_, method) => measured[method]?.[metric] === undefined ? null : figure(metric, measured[method][metric]));
    const longest = Math.max(...[...now, ...points].filter(Boolean).map(([, value]) => value));
    rows.forEach((row, method) => fillCell(row.cells[1 + METRICS.indexOf(metric)], metric, now[method], limit, points[method], longest));
  };

  const say = (at, names, limit, measured) => {
    const [n, v, h, dtype, , gpu] = names, [, why] = grid.said[found("said", at)], made = Object.values(measured).map(point => point.made);
    box.querySelector("caption").textContent = `Predicted for ${n} tokens, ${v} classes and ${h} features in ${dtype}, on ${gpu}`;
    box.querySelector(".fl-verdict").textContent = why.replace("{}", at[4] ? names[4] : limit[0]);
    box.querySelector(".fl-made").textContent = made.length ? ` Measured on ${gpu}: ${[...new Set(made)].join("; ")}.` : "";
  };

  const update = () => {
    const at = inputs.map(input => Number(input.value)), names = AXES.map((axis, number) => grid.stops[axis][at[number]]);
    inputs.forEach((input, number) => {
      input.setAttribute("aria-valuetext", names[number]);
      input.previousElementSibling.textContent = names[number];
    });
    const rows = [...box.querySelectorAll("tbody tr")], limit = figure("extra", found("limit", at)), measured = points(at);
    METRICS.forEach(metric => fillColumn(rows, metric, at, limit, measured));
    const [taken, , ...reasons] = grid.said[found("said", at)];
    rows.forEach((row, method) => {
      row.classList.toggle("fl-taken", method === taken);
      row.cells[4].textContent = reasons[method];
    });
    say(at, names, limit, measured);
  };

  const begin = () => {
    grid = globalThis.planGrid;
    box.querySelector(".fl-sliders").hidden = false;
    inputs.forEach(input => input.addEventListener("input", update));
    update();
  };

  // the grid is fetched when the widget comes near the window
  const near = new IntersectionObserver(seen => {
    if (!seen.some(entry => entry.isIntersecting)) return;
    near.disconnect();
    const script = element("script", {src: box.dataset.grid});
    script.addEventListener("load", begin);
    document.head.append(script);
  }, {rootMargin: "600px"});
  near.observe(box);
})();
