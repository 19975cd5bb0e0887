// The page asks the service what any client could ask; it keeps nothing.

const element = (id) => document.getElementById(id);
const PALE = [247, 251, 255];
const DARK = [8, 48, 107];
const CELLS_SHOWN = 4096;

let service = null;

async function call(path, body) {
  const response = await fetch(path, body === undefined ? {} : { method: "POST", body });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return { answer, id: response.headers.get("Representation-Id") };
}

/** JSON as it is, or a row a line with numbers separated by commas or blanks. */
function bodyOf(text) {
  const trimmed = text.trim();
  if (trimmed.startsWith("[")) return trimmed;
  const lines = trimmed.split("\n").map((line) => line.trim()).filter(Boolean);
  const rows = lines.map((line, i) => line.split(/[\s,;]+/).filter(Boolean).map((word) => {
    const value = Number(word);
    if (!Number.isFinite(value)) throw new Error(`needs a number, got "${word}" in row ${i}`);
    return value;
  }));
  return JSON.stringify(rows);
}

const rowsOf = (answer) => (Array.isArray(answer[0]) ? answer : [answer]);

async function run(kernels) {
  element("error").textContent = element("difference").textContent = "";
  element("results").replaceChildren();
  const buttons = document.querySelectorAll("button");
  buttons.forEach((button) => { button.disabled = true; });
  try {
    const body = bodyOf(element("rows").value);
    const outputs = [];
    for (const kernel of kernels) {
      const query = `?kernel=${encodeURIComponent(kernel)}`;
      const { answer, id } = await call(`/process${query}`, body);
      const output = rowsOf(answer);
      outputs.push(output);
      const few = output.length <= service.max_rows_of_weights;
      show(kernel, id, output, few ? (await call(`/weights${query}`, body)).answer : null);
    }
    if (kernels.length > 1) tellDifference(kernels, outputs);
  } catch (error) {
    element("error").textContent = error.message;
  } finally {
    buttons.forEach((button) => { button.disabled = false; });
  }
}

function tellDifference(kernels, outputs) {
  const [first, ...others] = outputs.map((rows) => rows.flat());
  const greatest = Math.max(...others.map((other) => (
    first.reduce((most, x, i) => Math.max(most, Math.abs(x - other[i])), 0))));
  element("difference").textContent =
    `Greatest difference between ${kernels.join(" and ")}: ${greatest.toExponential(1)}`;
}

function show(kernel, id, output, weights) {
  const made = element("result").content.cloneNode(true).firstElementChild;
  made.dataset.kernel = kernel;
  made.querySelector("h2").textContent = kernel;
  const link = document.createElement("a");
  link.href = `/retrieve/${id}`;
  link.textContent = `stored as ${id}`;
  made.querySelector(".stored").append(link);
  fillTable(made.querySelector("table"), output);
  if (weights) drawMap(made, weights);
  else made.querySelector(".cell").textContent = "too many rows for a map";
  element("results").append(made);
}

function fillTable(table, rows) {
  const shown = rows.slice(0, Math.max(1, Math.floor(CELLS_SHOWN / rows[0].length)));
  for (const row of shown) {
    const line = table.insertRow();
    for (const x of row) line.insertCell().textContent = x.toPrecision(6);
  }
  if (shown.length < rows.length) {
    table.insertRow().insertCell().textContent = `… ${rows.length - shown.length} more`;
  }
}

/** A pixel a weight, row i downwards, from pale at 0 to dark at 1. */
function drawMap(made, weights) {
  const canvas = made.querySelector("canvas");
  const size = weights.length;
  canvas.width = canvas.height = size;
  canvas.setAttribute("aria-label", `attention weights, ${size} by ${size}`);
  const image = new ImageData(size, size);
  weights.flat().forEach((weight, i) => {
    const colour = PALE.map((pale, c) => pale + weight * (DARK[c] - pale));
    image.data.set([...colour, 255], 4 * i);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  const cell = made.querySelector(".cell");
  canvas.addEventListener("pointermove", (event) => {
    const place = (offset, length) => (
      Math.min(size - 1, Math.max(0, Math.floor(offset / length * size))));
    const i = place(event.offsetY, canvas.clientHeight);
    const j = place(event.offsetX, canvas.clientWidth);
    cell.textContent = `row ${i} takes ${weights[i][j].toFixed(4)} of row ${j}`;
  });
  canvas.addEventListener("pointerleave", () => { cell.textContent = ""; });
}

function sample(dim) {
  const number = (i, j) => Math.abs(Math.sin(3 * i + 7 * j + 1) * 2).toFixed(1);
  return Array.from({ length: 6 }, (_, i) => (
    Array.from({ length: dim }, (_, j) => number(i, j)).join(", "))).join("\n");
}

async function start() {
  try {
    service = (await call("/health")).answer;
  } catch (error) {
    element("error").textContent = `The service does not answer: ${error.message}`;
    return;
  }
  element("shape").textContent =
    `of ${service.dim} numbers, at most ${service.max_rows}: a row a line, or JSON`;
  for (const kernel of service.kernels) {
    element("kernel").add(new Option(kernel, kernel, false, kernel === service.kernel));
  }
  element("compare").hidden = service.kernels.length < 2;
  element("rows").value = sample(service.dim);
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run([element("kernel").value]);
});
element("compare").addEventListener("click", () => run(service.kernels));
await start();
