// The live panel, drawn from four values that the kernel sends: `about`, `state`, `events` and `notice`. What they hold
// is told in view.py, timeline.py and clicks.py. Sizes here are bytes, times are Unix seconds.
//
// Nodes are made once and changed in place, so that the focus and a text half typed survive a refresh. Names are the
// user's: they are written as text, never as HTML. A click only sends a request and shows that it was asked; the kernel
// does it when it can. Refuses to know how models move.

const SHOWN_S = 300; // of the timeline
const MOST_CELLS = 60; // of a block map
const MOST_EVENTS = 200;
const MIB = 2 ** 20;

// Okabe and Ito's colours, each with the ink that is read best on it. More models than colours share them, with a ring;
// a letter tells them apart in any case.
const COLOURS = [
  ["#0072b2", "#fff"], ["#e69f00", "#000"], ["#009e73", "#000"], ["#cc79a7", "#000"],
  ["#56b4e9", "#000"], ["#d55e00", "#000"], ["#f0e442", "#000"],
];
const STATES = { d: "on the device", p: "partly on the device", h: "out, in a copy", k: "out, in its file" };
const PLACES = { d: "on the device", h: "in a copy on the host", k: "in its file", t: "in transit" };
const MARKS = {
  u: "in use", p: "pinned", l: "loading", v: "leaving", x: "demoted",
  D: "residency device", H: "residency host", K: "residency disk",
};
const KINDS = { in: ["▲", "came"], out: ["▼", "left"], no: ["✕", "refused"], cell: ["│", "cell"] };

// ------------------------------------------------------------------------------------------------------------- words

export function formatSize(size) {
  if (Math.abs(size) < 1024) return `${size} B`;
  let power = 1;
  while (Math.round((Math.abs(size) / 1024 ** power) * 10) / 10 >= 1024 && power < 6) power += 1;
  return `${(size / 1024 ** power).toFixed(1)} ${"KMGTPE"[power - 1]}iB`;
}

export function formatAge(seconds) {
  const age = Math.max(0, Math.round(seconds));
  if (age < 60) return `${age} s ago`;
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  return age < 172800 ? `${Math.floor(age / 3600)} h ago` : `${Math.floor(age / 86400)} d ago`;
}

/** The cells of a block map, [letter, text] each, from runs such as "d30h20". */
export function cellsOf(runs) {
  const blocks = [...(runs || "").matchAll(/([a-z])(\d+)/g)].flatMap(([, letter, n]) => Array(Number(n)).fill(letter));
  const count = Math.min(blocks.length, MOST_CELLS);
  return Array.from({ length: count }, (_, n) => {
    const first = Math.floor((n * blocks.length) / count);
    const part = blocks.slice(first, Math.floor(((n + 1) * blocks.length) / count));
    const most = part.includes("t") ? "t" : part.reduce((a, b) => (times(part, b) > times(part, a) ? b : a));
    const which = part.length === 1 ? `block ${first + 1}` : `blocks ${first + 1} to ${first + part.length}`;
    return [most, `${which}: ${placesIn(part)}`];
  });
}

function placesIn(blocks) {
  const found = Object.keys(PLACES).filter((letter) => blocks.includes(letter));
  if (found.length === 1) return PLACES[found[0]];
  return found.map((letter) => `${times(blocks, letter)} ${PLACES[letter]}`).join(", ");
}

function times(blocks, letter) {
  return blocks.filter((block) => block === letter).length;
}

// ------------------------------------------------------------------------------------------------------------- nodes

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setTitle(node, text) {
  if (node.title !== text) node.title = text;
}

/** Makes the children of `parent` these nodes, in this order, and moves none that is in its place. */
function arrange(parent, nodes) {
  const focused = document.activeElement;
  for (const child of [...parent.children]) if (!nodes.includes(child)) child.remove();
  nodes.forEach((node, place) => {
    if (parent.children[place] !== node) parent.insertBefore(node, parent.children[place] ?? null);
  });
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus(); // a move takes it away
}

function button(text, label, action) {
  const node = make("button", { type: "button", class: "vmp-button", "aria-label": label }, text);
  node.addEventListener("click", () => node.getAttribute("aria-disabled") === "true" || action());
  return node;
}

/** Not `disabled`: that would take the focus from whoever has just pressed it. */
function enable(node, isOn) {
  if (node.getAttribute("aria-disabled") !== String(!isOn)) node.setAttribute("aria-disabled", String(!isOn));
}

function paint(node, look) {
  node.style.setProperty("--vmp-colour", look.colour);
  node.style.setProperty("--vmp-ink-on", look.ink);
  node.classList.toggle("vmp-ringed", look.ringed);
}

function tagOf(look) {
  const node = make("span", { class: "vmp-tag", "aria-hidden": "true" }, look.letter);
  paint(node, look);
  return node;
}

// -------------------------------------------------------------------------------------------------------- the device

class Device {
  constructor() {
    this.head = make("div", { class: "vmp-head" });
    this.bar = make("div", { class: "vmp-bar", role: "img" });
    this.line = make("div", { class: "vmp-line" });
    this.legend = make("ul", { class: "vmp-legend", "aria-label": "What holds the device" });
    this.node = make("section", { "aria-label": "The device" }, this.head, this.bar, this.legend);
    this.parts = new Map();
  }

  update(about, state, models) {
    const { budget, used, peak } = state;
    const [total, driverFree, foreign] = (state.outside ?? [0, 0, 0]).map((mib) => mib * MIB);
    const held = models.reduce((sum, model) => sum + model.device, 0);
    const cached = total ? Math.max(total - driverFree - foreign - used, 0) : 0;
    const whole = Math.max(total, budget, used, 1);
    const parts = models.filter((model) => model.device).map((m) => [`m${m.name}`, m.name, m.device, m.look]);
    if (foreign) parts.unshift(["foreign", "other processes", foreign, "vmp-foreign"]);
    parts.push(["other", "other tensors", Math.max(used - held, 0), "vmp-other"]);
    if (cached) parts.push(["cached", "allocator's cache and context", cached, "vmp-cached"]);
    parts.push(["free", "free", budget - used, "vmp-free"]);
    this.draw(parts, whole);
    this.line.style.left = `${Math.min(((foreign + budget) / whole) * 100, 100)}%`;
    const text = `${formatSize(used)} of ${formatSize(budget)} used, ${formatSize(budget - used)} free`;
    const driver = total ? `; ${formatSize(driverFree)} of ${formatSize(total)} free on the device` : "";
    setText(this.head, `${about.device}: ${text}, peak ${formatSize(peak)}${driver}`);
    setTitle(this.head, `guard: ${about.guard}`);
    setTitle(this.line, `budget: ${formatSize(budget)}`);
    this.bar.setAttribute("aria-label", parts.map(([, name, size]) => `${name} ${formatSize(size)}`).join(", "));
  }

  draw(parts, whole) {
    const before = this.parts;
    this.parts = new Map(parts.map((part) => [part[0], before.get(part[0]) ?? this.build(part)]));
    for (const [key, name, size] of parts) {
      const { segment, letter, amount } = this.parts.get(key);
      if (key !== "free") segment.style.width = `${(size / whole) * 100}%`;
      if (letter) letter.hidden = size / whole < 0.03; // it would be cut
      setTitle(segment, `${name}: ${formatSize(size)}`);
      setText(amount, formatSize(size));
    }
    const drawn = [...this.parts.values()];
    arrange(this.bar, [...drawn.map((part) => part.segment), this.line]);
    arrange(this.legend, drawn.map((part) => part.item));
  }

  build([, name, , look]) {
    const amount = make("span", { class: "vmp-number" });
    const isModel = typeof look !== "string";
    const tag = isModel ? tagOf(look) : make("span", { class: `vmp-tag ${look}` });
    const letter = isModel ? make("span", {}, look.letter) : null;
    const segment = make("div", { class: `vmp-segment ${isModel ? "" : look}` }, letter ?? "");
    if (isModel) paint(segment, look);
    const item = make("li", {}, tag, make("bdi", { class: "vmp-name", title: name }, name), amount);
    return { segment, letter, item, amount };
  }
}

// --------------------------------------------------------------------------------------------------------- the models

class Row {
  constructor(name, look, ask) {
    this.ask = (kind, value = "") => ask(kind, name, value);
    this.name = make("bdi", { class: "vmp-name", title: name }, name);
    this.state = make("span", { class: "vmp-state" });
    this.marks = make("span", { class: "vmp-marks" });
    this.map = make("div", { class: "vmp-map", role: "img" });
    this.size = make("span", { class: "vmp-number" });
    this.age = make("span", { class: "vmp-number" });
    this.tier = make("select", { class: "vmp-select", "aria-label": `tier of ${name}` });
    this.tier.addEventListener("change", () => this.ask("tier", this.tier.value));
    this.pin = button("Pin", `pin ${name}`, () => this.ask(this.pinned ? "unpin" : "pin"));
    this.load = button("Load", `load ${name}`, () => this.ask("load"));
    this.evict = button("Evict", `evict ${name}`, () => this.ask("evict"));
    const actions = make("span", { class: "vmp-actions" }, this.load, this.evict, this.pin);
    const cell = (part, ...children) => make("td", { role: "cell", class: `vmp-${part}-cell` }, ...children);
    const header = make("th", { role: "rowheader", scope: "row", class: "vmp-name-cell" }, tagOf(look), this.name);
    this.node = make("tr", { role: "row" }, header, cell("tier", this.tier), cell("state", this.state, this.marks),
      cell("blocks", this.map, this.size), cell("age", this.age), cell("actions", actions));
    this.map.style.setProperty("--vmp-colour", look.colour);
  }

  update(model, tiers, asked) {
    this.model = model;
    this.pinned = model.marks.includes("p");
    setText(this.state, STATES[model.state] ?? "");
    setText(this.marks, [...asked.map((kind) => `asked: ${kind}`), ...wordsOf(model)].join(", "));
    setText(this.size, `${formatSize(model.device)} of ${formatSize(model.total)}`);
    setText(this.pin, this.pinned ? "Unpin" : "Pin");
    this.pin.setAttribute("aria-label", `${this.pinned ? "unpin" : "pin"} ${model.name}`);
    enable(this.load, model.state !== "d" || asked.length > 0); // what was asked may change it
    enable(this.evict, model.device > 0 || asked.length > 0);
    this.updateTiers(model.tier, tiers, asked.includes("tier"));
    this.updateMap(model.blocks);
  }

  updateTiers(tier, tiers, isAsked) {
    const ranks = Object.entries(tiers).sort((a, b) => a[1] - b[1]).map(([name]) => name);
    const names = ranks.includes(tier) ? ranks : [...ranks, tier];
    if (this.tierNames !== names.join("\n")) {
      this.tierNames = names.join("\n");
      this.tier.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
      this.shownTier = undefined;
    }
    if (this.shownTier !== tier && !isAsked) {
      this.tier.value = tier; // only when it changed: someone may be choosing
      this.shownTier = tier;
    }
  }

  /** After a request that changed nothing, what the kernel says counts again. */
  resetTier() {
    if (this.shownTier !== undefined) this.tier.value = this.shownTier;
  }

  updateMap(blocks) {
    if (this.blocks === blocks) return;
    this.blocks = blocks;
    const cells = cellsOf(blocks);
    while (this.map.children.length > cells.length) this.map.lastChild.remove();
    while (this.map.children.length < cells.length) this.map.append(make("i"));
    cells.forEach(([letter, text], place) => {
      const node = this.map.children[place];
      if (node.className !== `vmp-cell vmp-${letter}`) node.className = `vmp-cell vmp-${letter}`;
      setTitle(node, text);
    });
    const all = [...(blocks || "").matchAll(/([a-z])(\d+)/g)];
    const sums = Object.keys(PLACES).map((place) => [place, all.reduce((n, [, l, k]) => n + (l === place) * k, 0)]);
    const words = sums.filter(([, n]) => n).map(([place, n]) => `${n} ${PLACES[place]}`);
    this.map.setAttribute("aria-label", `blocks: ${words.join(", ") || "none"}`);
  }

  tick(now) {
    setText(this.age, this.model.marks.includes("u") ? "now" : formatAge(now - this.model.usedAt));
  }
}

function wordsOf(model) {
  const words = [...model.marks].map((mark) => MARKS[mark]).filter(Boolean);
  return model.working ? [...words, `calls need ${formatSize(model.working)} more`] : words;
}

class Models {
  constructor(ask) {
    this.ask = ask;
    this.rows = new Map();
    this.body = make("tbody", { role: "rowgroup" });
    const heads = ["Model", "Tier", "State", "Blocks", "Last use", "Actions"];
    const head = make("tr", { role: "row" },
      ...heads.map((text) => make("th", { role: "columnheader", scope: "col" }, text)));
    this.empty = make("p", { class: "vmp-empty" }, "no models yet; load one with: %load_model NAME SOURCE");
    this.key = make("p", { class: "vmp-key" }, "Blocks: ",
      ...Object.entries(PLACES).flatMap(([letter, text]) => [
        make("span", {}, make("i", { class: `vmp-cell vmp-${letter}` }), ` ${text}`), " "]));
    const table = make("table", { role: "table", class: "vmp-table" },
      make("caption", {}, "Models, by tier"),
      make("thead", { role: "rowgroup" }, head), this.body);
    this.table = table;
    this.node = make("section", { "aria-label": "Models" }, table, this.key, this.empty);
  }

  update(models, tiers, askedOf) {
    const before = this.rows;
    this.rows = new Map(models.map((m) => [m.name, before.get(m.name) ?? new Row(m.name, m.look, this.ask)]));
    for (const model of models) this.rows.get(model.name).update(model, tiers, askedOf(model));
    arrange(this.body, [...this.rows.values()].map((row) => row.node));
    this.table.hidden = this.key.hidden = !models.length;
    this.empty.hidden = models.length > 0;
  }

  tick(now) {
    for (const row of this.rows.values()) row.tick(now);
  }
}

// ------------------------------------------------------------------------------------------------------- the timeline

class Timeline {
  constructor(askForHistory) {
    this.askForHistory = askForHistory;
    this.events = new Map(); // number -> {event, node}
    this.track = make("div", { class: "vmp-track", role: "group",
      "aria-label": "What left and came in the last 5 minutes; the arrow keys go from one to the next" });
    this.text = make("p", { class: "vmp-why" });
    this.track.addEventListener("keydown", (event) => this.walk(event));
    const ends = make("div", { class: "vmp-ends", "aria-hidden": "true" },
      make("span", {}, "5 min ago"), make("span", {}, "▲ came   ▼ left   ✕ refused   │ cell"), make("span", {}, "now"));
    this.node = make("section", { "aria-label": "The last 5 minutes" }, this.track, ends, this.text);
  }

  add(events) {
    const numbers = events.map(([number]) => number);
    const last = Math.max(0, ...this.events.keys());
    const isGap = this.events.size > 0 && numbers.length > 0 && Math.min(...numbers) > last + 1;
    for (const event of events) if (!this.events.has(event[0])) this.events.set(event[0], this.build(event));
    this.events = new Map([...this.events].sort(([a], [b]) => a - b)); // a history comes late
    if (isGap) this.askForHistory();
  }

  build([number, time, kind, , text]) {
    const [sign, word] = KINDS[kind] ?? ["•", ""];
    const node = make("button",
      { type: "button", class: `vmp-mark vmp-mark-${kind}`, tabindex: "-1", title: text, "aria-label": text }, sign);
    for (const occasion of ["focus", "mouseenter", "click"]) {
      node.addEventListener(occasion, () => setText(this.text, `${word ? sign : ""} ${text}`.trim()));
    }
    return { number, time, kind, node };
  }

  tick(now) {
    for (const [number, { time, node }] of this.events) {
      if (now - time > SHOWN_S || this.events.size > MOST_EVENTS) {
        node.remove();
        this.events.delete(number);
      }
    }
    const shown = [...this.events.values()];
    const crowd = new Map(); // marks of one moment stand side by side
    for (const { time, kind, node } of shown.toReversed()) {
      const place = `${kind} ${Math.floor(time / 2)}`;
      const beside = crowd.get(place) ?? 0;
      crowd.set(place, beside + 1);
      const left = 100 - (Math.max(now - time, 0) / SHOWN_S) * 100;
      node.style.left = `max(0px, calc(${left.toFixed(1)}% - ${14 + 9 * beside}px))`;
    }
    arrange(this.track, shown.map((event) => event.node));
    const nodes = [...this.track.children];
    if (nodes.length && !nodes.some((node) => node.tabIndex === 0)) nodes.at(-1).tabIndex = 0;
    this.track.classList.toggle("vmp-quiet", !nodes.length);
    if (!nodes.length) setText(this.text, "nothing left or came in the last 5 minutes");
    else if (this.text.textContent.startsWith("nothing")) setText(this.text, "");
  }

  walk(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    const nodes = [...this.track.children];
    const here = nodes.indexOf(document.activeElement);
    if (step === undefined || here < 0) return;
    event.preventDefault();
    const next = nodes[Math.min(Math.max(here + step, 0), nodes.length - 1)];
    for (const node of nodes) node.tabIndex = node === next ? 0 : -1;
    next.focus();
  }
}

// ---------------------------------------------------------------------------------------------------- plan and notice

class Planner {
  constructor(ask, tell) {
    this.field = make("input", { type: "text", class: "vmp-field", maxlength: "40", size: "8", value: "1GiB",
      spellcheck: "false", autocomplete: "off" });
    const label = make("label", {}, "What would leave for ", this.field);
    const plan = () => {
      if (this.field.value.trim()) ask("plan", "", this.field.value);
      else tell("type a size, such as 3GiB");
    };
    this.node = make("div", { class: "vmp-plan" }, label, button("Plan", "plan", plan));
    // No <form>: JupyterLab lets none submit.
    this.field.addEventListener("keydown", (event) => event.key === "Enter" && plan());
  }
}

// --------------------------------------------------------------------------------------------------------- the panel

class Panel {
  constructor(model) {
    this.model = model;
    this.looks = new Map();
    this.pending = new Map(); // number -> {kind, name}
    this.skew = 0; // seconds that the browser's clock is ahead of the kernel's
    const ask = (kind, name, value) => this.ask(kind, name, value);
    this.device = new Device();
    this.models = new Models(ask);
    this.timeline = new Timeline(() => this.askForHistory());
    this.planner = new Planner(ask, (text) => this.tell(text));
    this.notice = make("p", { class: "vmp-notice", role: "status", "aria-live": "polite" });
    this.closed = make("p", { class: "vmp-closed" }, "The manager was closed.");
    this.open = make("div", {}, this.device.node, this.models.node, this.timeline.node, this.planner.node);
    this.node = make("div", { class: "vmp" }, this.open, this.closed, this.notice);
  }

  get now() {
    return Date.now() / 1000 - this.skew;
  }

  askForHistory() {
    this.model.send({ kind: "history" });
  }

  ask(kind, name, value) {
    const id = Math.floor(Math.random() * Number.MAX_SAFE_INTEGER); // other views and pages have their own
    this.pending.set(id, { kind, name });
    this.model.send({ kind, name, value, id });
    setText(this.notice, `asked: ${[kind, name || value].join(" ")}`);
    this.update();
  }

  tell(text, failed = false) {
    setText(this.notice, text);
    this.notice.classList.toggle("vmp-failed", failed);
  }

  lookOf(name) {
    if (!this.looks.has(name)) {
      const place = this.looks.size;
      const [colour, ink] = COLOURS[place % COLOURS.length];
      const letters = String.fromCharCode(65 + (place % 26));
      const letter = place < 26 ? letters : `${letters}${Math.floor(place / 26)}`;
      this.looks.set(name, { colour, ink, letter, ringed: place >= COLOURS.length });
    }
    return this.looks.get(name);
  }

  readRow([name, tier, marks, total, device, blocks, used, working, asked]) {
    const usedAt = this.model.get("about").since + (used ?? 0);
    return { name, tier, total: total ?? 0, device: device ?? 0, blocks: blocks ?? "", usedAt, working: (working ?? 0) * MIB,
      asked: asked ?? "", state: marks[0], marks: marks.slice(1), look: this.lookOf(name) };
  }

  update() {
    const about = this.model.get("about");
    const state = this.model.get("state");
    this.open.hidden = !state.models;
    this.closed.hidden = Boolean(state.models);
    if (!state.models) return;
    const models = state.models.map((row) => this.readRow(row));
    const pending = [...this.pending.values()];
    const askedOf = (model) => [...new Set([model.asked, ...pending.filter((one) => one.name === model.name)
      .map((one) => one.kind)].filter(Boolean))];
    this.device.update(about, state, models);
    this.models.update(models, about.tiers, askedOf);
    this.tick();
  }

  tick() {
    if (!this.model.get("state").models) return;
    this.models.tick(this.now);
    this.timeline.tick(this.now);
  }

  updateEvents() {
    this.timeline.add(this.model.get("events"));
    this.timeline.tick(this.now);
  }

  updateNotice() {
    const { ids = [], text = "", failed = false } = this.model.get("notice");
    for (const id of ids) {
      this.models.rows.get(this.pending.get(id)?.name)?.resetTier();
      this.pending.delete(id);
    }
    this.tell(text, failed);
    this.update();
  }

  hear(message) {
    if (message?.kind !== "history") return;
    this.skew = Date.now() / 1000 - message.now;
    this.timeline.add(message.events);
    this.tick();
  }

  /** Begins to follow the kernel; returns how to end it. */
  start() {
    const watched = {
      "change:about": () => this.update(),
      "change:state": () => this.update(),
      "change:events": () => this.updateEvents(),
      "change:notice": () => this.updateNotice(),
      "msg:custom": (message) => this.hear(message),
    };
    for (const [name, action] of Object.entries(watched)) this.model.on(name, action);
    const clock = setInterval(() => document.hidden || this.tick(), 1000);
    this.update();
    this.updateEvents();
    this.updateNotice();
    this.askForHistory();
    return () => {
      clearInterval(clock);
      for (const [name, action] of Object.entries(watched)) this.model.off(name, action);
    };
  }
}

function render({ model, el }) {
  const panel = new Panel(model);
  el.dataset.lmSuppressShortcuts = "true"; // or JupyterLab takes Enter and the arrow keys for its own
  el.append(panel.node);
  return panel.start();
}

export default { render };
