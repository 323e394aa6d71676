(() => {
  const shown = (cell) => {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll(".chip").forEach((chip) => chip.before(" "));
    const text = copy.textContent.trim().replace(/\s+/g, " ");
    // A spreadsheet would run such a text as a formula.
    const formula = /^[=+@-]./.test(text) && !/^[+-]?[\d.,]+( \S{1,4})?$/.test(text);
    return formula ? "'" + text : text;
  };
  const field = (cell) => {
    const unit = cell.dataset.unit ? " [" + cell.dataset.unit + "]" : "";
    const text = cell.dataset.value || shown(cell) + unit;
    return /[",\n]/.test(text) ? '"' + text.replace(/"/g, '""') + '"' : text;
  };
  const csv = (table) => [...table.rows].map((row) => [...row.cells].map(field).join(",") + "\n").join("");
  const selected = (text) => {
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return selected(text);
    }
  };
  document.querySelectorAll(".scroll > table").forEach((table) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy as CSV";
    button.onclick = async () => {
      button.textContent = (await copied(csv(table))) ? "Copied" : "Not copied";
      setTimeout(() => { button.textContent = "Copy as CSV"; }, 2000);
    };
    table.parentElement.after(button);
  });
  const waiting = new Set(document.querySelectorAll("figure"));
  const draw = (figure) => {
    if (!waiting.delete(figure)) return;
    if (!window.Plotly) {
      const script = document.createElement("script");
      script.textContent = document.getElementById("plotly").textContent;
      document.body.append(script);
    }
    const [room, described] = figure.children;
    Plotly.newPlot(room, JSON.parse(described.textContent));
  };
  const drawAll = () => waiting.forEach(draw);
  const near = new IntersectionObserver((seen) => {
    seen.forEach((one) => { if (one.isIntersecting) setTimeout(draw, 0, one.target); });
  }, { rootMargin: "50%" });
  const idle = window.requestIdleCallback || ((task) => setTimeout(task, 100));
  const drawRest = () => {
    const [figure] = waiting;
    if (!figure) return;
    draw(figure);
    idle(drawRest);
  };
  addEventListener("DOMContentLoaded", () => {
    // Show text and tables first, because parsing plotly's code takes long.
    requestAnimationFrame(() => {
      waiting.forEach((figure) => near.observe(figure));
      idle(drawRest);
    });
    addEventListener("beforeprint", () => {
      document.querySelectorAll("details").forEach((details) => { details.open = true; });
      drawAll();
    });
    matchMedia("print").addEventListener("change", drawAll);
  });
})();
