"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const kept = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
  };
  paint(kept() || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!kept()) paint(dark.matches ? "dark" : "light"); });
  button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", theme); } catch { /* a file:// page may not keep it */ }
    paint(theme);
  });

  // Tables: a click on a head sorts by that column, numbers the largest first; what has no figure stays at the end.
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const figure = parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(figure) ? text : figure;
  };
  const sort = (table, head, column) => {
    const body = table.tBodies[0];
    const numeric = [...body.rows].some((row) => typeof value(row, column) === "number") && column > 0;
    const down = head.ariaSort ? head.ariaSort === "ascending" : numeric;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      if (numeric && typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      const order = numeric && typeof x === "number" ? x - y : String(x).localeCompare(String(y));
      return down ? -order : order;
    });
    body.append(...rows);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.tabIndex = 0;
      head.addEventListener("click", () => sort(table, head, column));
      head.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(table, head, column); }
      });
    });
  }

  // The outputs. Texts are set as text, never as HTML.
  const data = document.getElementById("texts");
  if (!data) return;
  const { prompts, sources } = JSON.parse(data.textContent);
  const place = document.getElementById("outputs");
  const [choice, heat] = [document.getElementById("prompt"), document.getElementById("temperature")];
  const make = (name, text, className) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  };
  const colour = (node, source, depth) => {
    node.className = "tok";
    node.style.setProperty("--hue", `var(--c${Math.min(source, 8)})`);
    node.style.setProperty("--deep", `${Math.min(12 + 9 * depth, 66)}%`);
  };
  const origin = (source) => sources[source] || "drafter";

  // For each token: [source, depth], or null where the target itself chose it.
  const origins = (output, count) => {
    const found = new Array(Math.min(output.first, count)).fill(null);
    for (let at = 0; at < output.steps.length; at += 3) {
      const [committed, accepted, source] = output.steps.slice(at, at + 3);
      for (let depth = 0; depth < committed; depth++) found.push(depth < accepted ? [source, depth + 1] : null);
    }
    return found;
  };
  const parting = (output, plain, tokens) => {
    const told = output.parted;
    if (!told) return null;
    const node = make("span", "parts here", "parted");
    const explained = told.accepted ? "rounding explains it" : "rounding does not explain it";
    const margin = told.margin === null ? "one of the two ends" : `top-2 margin ${told.margin.toPrecision(3)} logits`;
    node.title = `token ${told.position}: ${margin}; ${explained}`;
    return [node, `Parts from plain decoding at token ${told.position}: ${margin}, ${explained}. Plain decoding goes on: `,
      plain.slice(told.position, told.position + 40).join("")];
  };
  const shown = (output, plain) => {
    const tokens = plain.slice(0, output.same).concat(output.rest);
    const text = make("div", undefined, "written");
    text.dir = "auto";
    const marks = origins(output, tokens.length);
    const mark = parting(output, plain, tokens);
    tokens.forEach((token, index) => {
      if (mark && index === output.parted.position) text.append(mark[0]);
      const from = marks[index];
      const node = make("span", token);
      if (from) {
        colour(node, from[0], from[1]);
        node.title = `${origin(from[0])}, draft token ${from[1]} of its step`;
      }
      text.append(node);
    });
    const parts = [text];
    if (mark) {
      const note = make("p", mark[1], "soft");
      note.append(make("span", mark[2], "mono"));
      parts.push(note);
    }
    return parts;
  };
  const summary = (output, count) => {
    const node = make("summary");
    node.append(make("strong", output.name));
    const steps = output.steps.length / 3;
    const made = output.steps.filter((_, at) => at % 3 === 0).reduce((a, b) => a + b, 0);
    const told = steps ? `${count} tokens in ${steps} steps, tau ${(made / steps).toFixed(2)}` : `${count} tokens`;
    node.append(make("span", told, "soft"));
    if (output.parted) node.append(make("span", `parts from plain at token ${output.parted.position}`, "soft"));
    return node;
  };
  const show = () => {
    const prompt = prompts[choice.value];
    const outputs = prompt.outputs.filter((output) => !heat || output.t === Number(heat.value));
    const base = outputs.find((output) => output.kind === "plain");
    const plain = base ? base.rest : [];
    place.replaceChildren();
    const question = make("details", undefined, "output");
    question.append(make("summary", "The prompt, as the target has it"), make("div", prompt.prompt, "written"));
    place.append(question);
    let opened = 0;
    for (const output of outputs) {
      const node = make("details", undefined, "output");
      node.append(summary(output, output.same + output.rest.length));
      const fill = () => { if (node.open && node.children.length === 1) node.append(...shown(output, plain)); };
      node.addEventListener("toggle", fill);
      if (output.kind !== "plain" && opened < 1) { opened += 1; node.open = true; fill(); }
      place.append(node);
    }
  };
  const step = (by) => {
    choice.value = (Number(choice.value) + by + prompts.length) % prompts.length;
    show();
  };
  choice.addEventListener("change", show);
  if (heat) heat.addEventListener("change", show);
  document.getElementById("before").addEventListener("click", () => step(-1));
  document.getElementById("after").addEventListener("click", () => step(1));
  const legend = document.getElementById("origins");
  sources.forEach((name, source) => {
    const [node, box] = [make("li"), make("i")];
    colour(box, source, 3);
    node.append(box, name ? `drafted by ${name}` : "drafted");
    legend.append(node);
  });
  show();
})();
