"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  // Okabe and Ito: distinguishable with every kind of colour vision.
  const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00", "#F0E442", "#8A8F99"];
  const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]];

  // ---------------------------------------------------------------- words and elements

  function element(name, properties = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key in made && !key.startsWith("aria")) made[key] = value; else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = 0;
    while (count >= 1024 && power < units.length - 1) { count /= 1024; power += 1; }
    return `${power ? count.toFixed(count < 10 ? 2 : 1) : Math.round(count)} ${units[power]}`;
  }

  function seconds(value) {
    if (value === 0) return "0 s";
    if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
    if (value < 60) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
    const minutes = Math.floor(value / 60);
    return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  function summed(steps) { let value = 0; return steps.map((step) => (value += step)); }
  function viridis(share) {
    const at = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
    return VIRIDIS[low].map((from, index) => Math.round(from + (at - low) * (VIRIDIS[low + 1][index] - from)));
  }

  // ---------------------------------------------------------------- ranks and files

  class Side {
    constructor(name, side, states) {
      Object.assign(this, { name, ...side });
      this.count = side.labels.length;
      this.states = states;
      this.total = side.labels.map((_, place) => sum(states.map((state) => state[place])));
    }

    block(place) { return this.blocks.find((one) => place < one.first + one.count); }

    coordinates(place) {
      const block = this.block(place), axes = block.axes, rank = (place - block.first) * block.each;
      const tp = rank % axes.tp, sharding = Math.floor(rank / axes.tp) % axes.sharding;
      const pp = Math.floor(rank / axes.tp / axes.sharding) % axes.pp, dp = Math.floor(rank / axes.tp / axes.sharding / axes.pp);
      const dense = Math.max(1, Math.floor(axes.ep / axes.tp));
      return { rank, tp, sharding, pp, dp, ep: axes.ep > 1 ? (sharding % dense) * axes.tp + tp : 0 };
    }

    label(place) {
      const block = this.block(place);
      if (!block.axes) return this.labels[place] + (block.each > 1 ? ` and ${block.each - 1} more` : "");
      const at = this.coordinates(place);
      const named = ["dp", "pp", "sharding", "tp", "ep"].filter((axis) => block.axes[axis] > 1).map((axis) => `${axis} ${at[axis]}`);
      const ranks = block.each > 1 ? `ranks ${at.rank}–${at.rank + block.each - 1}` : `rank ${at.rank}`;
      return ranks + (named.length ? ` · ${named.join(", ")}` : "");
    }

    folded(number, fold) {
      const first = number * fold, last = Math.min(first + fold, this.count) - 1;
      const title = this.blocks.length > 1 ? `${this.block(first).title}: ` : "";
      if (fold === 1 || first === last) return title + this.label(first);
      return `${title}${this.label(first)} to ${this.label(last)}`;
    }
  }

  const picture = data.picture;
  const sides = picture && {
    source: new Side("source", picture.source, picture.source_bytes),
    target: new Side("target", picture.target, picture.target_bytes),
  };
  let picked = null;

  // A state has the same colour in every report.
  const USUAL = { param: 0, master_weight: 1, moment1: 2, moment2: 3, ema_param: 4, ema_master_weight: 5 };
  function stateColour(number) {
    const usual = USUAL[picture.states[number]];
    return PALETTE[usual === undefined ? 6 + number % 2 : usual];
  }

  class Grid {
    constructor(side, holder) {
      this.side = side;
      this.holder = holder;
      this.cursor = -1;
      this.figures = side.blocks.map((block) => {
        const title = block.detail || block.title;
        const caption = element("figcaption", {}, `${title}${title ? " · " : ""}${this.counted(block)}`);
        const svg = shape("svg", { class: "cells", tabindex: 0, role: "img", "aria-label": `${side.name}: ${title}. Use the arrow keys to go from place to place.` });
        holder.append(element("figure", {}, caption, svg));
        svg.addEventListener("keydown", (event) => this.key(event, block));
        svg.addEventListener("focus", () => { if (this.cursor < block.first || this.cursor >= block.first + block.count) this.show(block.first); });
        svg.addEventListener("click", (event) => this.point(event));
        svg.addEventListener("mousemove", (event) => this.point(event));
        return { block, svg };
      });
      this.draw();
    }

    counted(block) {
      const own = Array.from({ length: block.count }, (_, index) => this.side.files[block.first + index]);
      const what = block.axes ? plural(block.axes.dp * block.axes.pp * block.axes.sharding * block.axes.tp, "rank") : plural(sum(own), "file");
      return block.axes ? `${what}, ${plural(sum(own), "tensor file")}` : what;
    }

    columns(block, width) {
      if (!block.axes) return Math.max(1, Math.min(block.count, block.count <= 24 ? 2 : Math.floor(width / 12)));
      const tp = Math.max(1, Math.floor(block.axes.tp / block.each)), widest = Math.max(tp, Math.floor(width / 9));
      let shards = Math.max(1, Math.floor(block.axes.sharding * block.axes.tp / block.each / tp));
      while (shards > 1 && shards * tp > widest) shards = Math.ceil(shards / 2);
      return shards * tp;
    }

    draw() {
      for (const figure of this.figures) this.drawBlock(figure);
      this.mark();
    }

    drawBlock(figure) {
      const { block, svg } = figure, side = this.side;
      const width = Math.max(260, this.holder.clientWidth || 560), left = block.axes ? 46 : 0;
      const columns = this.columns(block, width - left), rows = Math.ceil(block.count / columns);
      const stage = block.axes ? Math.max(1, block.axes.sharding * block.axes.tp / block.each / columns) : 1;
      const cell = Math.min((width - left) / columns, block.axes ? 190 : width), large = cell >= 56;
      const gap = cell > 20 ? 5 : cell > 7 ? 1.5 : 0.5, height = large ? 58 : Math.max(5, Math.min(cell, 22, 420 / rows));
      const top = block.axes && large && columns > 1 ? 16 : 0;
      const between = (row) => (stage > 1 ? Math.floor(row / stage) * 5 : 0);
      const most = Math.max(1, ...side.total.slice(block.first, block.first + block.count));
      Object.assign(figure, { columns, cells: new Map() });
      svg.replaceChildren();
      const total = top + rows * (height + gap) + between(rows - 1);
      svg.setAttribute("width", width); svg.setAttribute("height", total); svg.setAttribute("viewBox", `0 0 ${width} ${total}`);
      if (top) for (let column = 0; column < columns; column += 1) {
        const at = side.coordinates(block.first + column), axes = block.axes;
        const words = [axes.sharding > 1 && `sharding ${at.sharding}`, axes.tp > 1 && `tp ${at.tp}`].filter(Boolean).join(" · ");
        svg.append(shape("text", { x: left + column * cell + 2, y: 11, class: "soft" }, cell > 105 ? words : words.replace("sharding", "sh")));
      }
      for (let index = 0; index < block.count; index += 1) {
        const place = block.first + index, row = Math.floor(index / columns), column = index % columns;
        const x = left + column * cell, y = top + row * (height + gap) + between(row), inner = cell - gap;
        const group = shape("g", { "data-place": place });
        const empty = side.total[place] === 0;
        group.append(shape("rect", { x, y, width: inner, height, rx: large ? 5 : 1, class: "cell" }));
        if (large) this.fill(group, place, x, y, inner, height, most);
        else if (!empty) group.append(this.small(place, x, y, inner, height, most));
        if (block.axes && column === 0 && index % Math.max(1, Math.round(columns * stage)) === 0) {
          const at = side.coordinates(place), dp = block.axes.dp > 1 ? `dp${at.dp} ` : "";
          svg.append(shape("text", { x: 0, y: y + Math.min(height / 2 + 4, 24), class: "soft" }, `${dp}pp ${at.pp}`));
        }
        svg.append(group);
        figure.cells.set(place, { group, amount: group.querySelector(".amount"), x, y, width: inner, height });
      }
      figure.over = shape("g", { class: "over" });
      figure.at = shape("g", { class: "over" });
      svg.append(figure.over, figure.at);
    }

    fill(group, place, x, y, width, height, most) {
      const side = this.side, block = side.block(place), at = block.axes ? side.coordinates(place) : null;
      const room = Math.floor((width - 12) / 6.4), text = at ? (block.each > 1 ? `ranks ${at.rank}…` : `rank ${at.rank}`) + (block.axes.ep > 1 && room > 15 ? ` · ep ${at.ep}` : "") : side.label(place);
      group.append(shape("text", { x: x + 7, y: y + 17 }, text.length > room ? `…${text.slice(-room + 1)}` : text));
      group.append(shape("text", { x: x + 7, y: y + 33, class: "soft amount" }, ""));
      let from = x + 7;
      const scale = (width - 14) / most;
      side.states.forEach((state, number) => {
        const length = state[place] * scale;
        if (length > 0) group.append(shape("rect", { x: from, y: y + height - 16, width: Math.max(length, 0.6), height: 9, fill: stateColour(number) }));
        from += length;
      });
    }

    small(place, x, y, width, height, most) {
      return shape("rect", { x, y, width, height, rx: 1, fill: `rgb(${viridis(0.08 + 0.84 * this.side.total[place] / most)})` });
    }

    point(event) {
      const group = event.target.closest("[data-place]");
      if (group) this.show(Number(group.getAttribute("data-place")));
    }

    key(event, block) {
      const figure = this.figures.find((one) => one.block === block);
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -figure.columns, ArrowDown: figure.columns, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const last = block.first + block.count - 1, next = this.cursor + step;
      if (Math.abs(step) === Infinity) this.show(step < 0 ? block.first : last);
      else if (next >= block.first && next <= last) this.show(next);
    }

    show(place) {
      if (place === this.cursor) return;
      grids.forEach((grid) => { grid.cursor = grid === this ? place : -1; grid.markCursor(); });
      describePlace(this.side, place);
    }

    mark() {
      const held = picked && picked[this.side.name], fold = held ? held.fold : 1;
      for (const { cells, over } of this.figures) {
        const rings = [];
        for (const [place, { group, amount, x, y, width, height }] of cells) {
          const lit = !held || held.places.has(Math.floor(place / fold)), total = this.side.total[place];
          group.classList.toggle("off", !lit);
          if (held && lit) rings.push(shape("rect", { x, y, width, height, rx: width > 50 ? 5 : 1, class: width > 20 ? "ring" : "ring thin" }));
          // A place of several stands for all of them; only the amount of a single place is known.
          if (amount) amount.textContent = held && lit && fold === 1 ? bytes(held.places.get(place)) + (width > 145 ? ` of ${bytes(total)}` : "") : total ? bytes(total) : "no file";
        }
        over.replaceChildren(...rings);
      }
      this.markCursor();
    }

    markCursor() {
      for (const { cells, at } of this.figures) {
        at.replaceChildren();
        const cell = cells.get(this.cursor);
        if (cell) at.append(shape("rect", { x: cell.x - 2, y: cell.y - 2, width: cell.width + 4, height: cell.height + 4, rx: cell.width > 50 ? 6 : 1, class: "cursor" }));
      }
    }
  }

  function describePlace(side, place) {
    const block = side.block(place), total = side.total[place];
    const head = element("p", {}, element("b", {}, `${side.name === "source" ? "Source" : "Target"}: ${side.label(place)}`), ` — ${bytes(total)} of values in ${plural(side.files[place], "file")}`);
    if (!side.files[place] && block.axes) head.append(". Another rank of its group writes what it holds.");
    const states = element("table", {}, ...side.states.map((state, number) => [state[place], number]).filter(([count]) => count > 0).map(([count, number]) => {
      return element("tr", {}, element("td", {}, swatch(number), picture.states[number]), element("td", { className: "n" }, bytes(count)), element("td", { className: "n" }, `${(100 * count / total).toFixed(0)} %`));
    }));
    const held = heldOf[side.name], rows = [];
    if (held) {
      const number = Math.floor(place / held.fold);
      held.place.forEach((at, index) => { if (at === number) rows.push([held.nbytes[index], held.rows[index]]); });
    }
    rows.sort((a, b) => b[0] - a[0]);
    const largest = element("table", {}, ...rows.slice(0, states.rows.length + 1).map(([count, row]) => element("tr", {}, element("td", {}, element("code", {}, rowKey(row)), ` ${rowState(row)}`), element("td", { className: "n" }, bytes(count)))));
    const second = rows.length ? [element("div", {}, element("small", {}, `the largest of ${plural(rows.length, "entry").replace("entrys", "entries")}`), largest)] : [];
    byId("place").replaceChildren(head, element("div", { className: "two" }, element("div", {}, element("small", {}, "by state"), states), ...second));
  }

  function swatch(number) {
    const drawn = shape("svg", { viewBox: "0 0 10 10" });
    drawn.append(shape("rect", { width: 10, height: 10, rx: 2, fill: stateColour(number) }));
    return element("span", { className: "swatch", "aria-hidden": "true" }, drawn);
  }

  // ---------------------------------------------------------------- tensors and layers

  const rowKeys = picture ? summed(picture.row_keys) : [];
  const rowKey = (row) => picture.keys[rowKeys[row]];
  const rowState = (row) => (picture.row_states[row] < 0 ? "" : picture.states[picture.row_states[row]]);
  const heldOf = {};
  for (const name of ["source", "target"]) {
    const held = picture && picture[`${name}_held`];
    if (held) heldOf[name] = { ...held, rows: summed(held.row) };
  }
  const grids = [];

  function layerOf(key) {
    const match = /^(.*?\blayers\.\d+)(\.|$)/.exec(key);
    return match ? match[1] : null;
  }

  const choices = [];
  if (picture && picture.keys.length) {
    const layers = new Map();
    picture.keys.forEach((key, number) => {
      const layer = layerOf(key);
      if (layer && layer !== key) { if (!layers.has(layer)) layers.set(layer, new Set()); layers.get(layer).add(number); }
    });
    for (const [layer, keys] of layers) choices.push({ text: layer, keys, note: plural(keys.size, "tensor") });
    picture.keys.forEach((key, number) => choices.push({ text: key, keys: new Set([number]), note: "" }));
  }

  function pick(choice) {
    const state = Number(byId("state").value);
    picked = null;
    if (choice || state >= 0) {
      picked = { choice };
      for (const name of ["source", "target"]) {
        const held = heldOf[name], places = new Map();
        if (!held) continue;
        held.rows.forEach((row, index) => {
          const own = picture.row_states[row];
          if ((choice && !choice.keys.has(rowKeys[row])) || (state >= 0 && own >= 0 && own !== state)) return;
          places.set(held.place[index], (places.get(held.place[index]) || 0) + held.nbytes[index]);
        });
        picked[name] = { fold: held.fold, places };
      }
    }
    byId("clear").hidden = !picked;
    byId("picked").replaceChildren(...saidOf(choice, state));
    grids.forEach((grid) => grid.mark());
    if (heat) heat.draw();
  }

  function saidOf(choice, state) {
    if (!picked) return [];
    const about = ["source", "target"].filter((name) => picked[name]).map((name) => {
      const { places, fold } = picked[name], of = Math.ceil(sides[name].count / fold);
      return `${bytes(sum([...places.values()]))} in ${places.size} of ${of} ${sides[name].blocks.every((block) => block.axes) ? (fold > 1 ? "groups of ranks" : "ranks") : "places"} of the ${name}`;
    });
    const what = element("b", {}, [choice ? choice.text : "all tensors", state >= 0 ? picture.states[state] : ""].filter(Boolean).join(" · "));
    return [what, `: ${about.join(", ")}`];
  }

  function makeSearch() {
    const input = byId("search"), list = byId("found"), select = byId("state");
    let current = null, shown = [], active = -1;
    select.append(element("option", { value: "-1" }, "all states"), ...picture.states.map((state, number) => element("option", { value: String(number) }, state)));
    const close = () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); input.removeAttribute("aria-activedescendant"); };
    const choose = (choice) => { current = choice; input.value = choice ? choice.text : ""; close(); pick(choice); };
    const activate = (number) => {
      active = number;
      [...list.children].forEach((item, index) => item.setAttribute("aria-selected", String(index === number)));
      if (number >= 0 && list.children[number]) { input.setAttribute("aria-activedescendant", list.children[number].id); list.children[number].scrollIntoView({ block: "nearest" }); }
    };
    const search = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean), most = 60;
      const fitting = choices.filter((choice) => words.every((word) => choice.text.toLowerCase().includes(word)));
      // A number is looked for as a whole: "layers.1" finds layer 1 before layer 10.
      const exact = (choice) => words.some((word) => choice.text.toLowerCase() === word || choice.text.toLowerCase().endsWith(`.${word}`) || choice.text.toLowerCase().includes(`${word}.`));
      shown = [...fitting.filter(exact), ...fitting.filter((choice) => !exact(choice))].slice(0, most);
      const items = shown.map((choice, number) => {
        const item = element("li", { id: `found-${number}`, role: "option", "aria-selected": "false" }, element("code", {}, choice.text), element("small", {}, choice.note));
        item.addEventListener("mousedown", (event) => { event.preventDefault(); choose(choice); });
        return item;
      });
      if (!items.length) items.push(element("li", { className: "none", role: "option", "aria-selected": "false" }, "No tensor has this in its key."));
      if (fitting.length > most) items.push(element("li", { className: "none", role: "presentation" }, `… and ${(fitting.length - most).toLocaleString("en")} more`));
      list.replaceChildren(...items);
      list.hidden = false;
      input.setAttribute("aria-expanded", "true");
      activate(shown.length ? 0 : -1);
    };
    input.addEventListener("input", () => { if (input.value === "") choose(null); else search(); });
    input.addEventListener("focus", search);
    input.addEventListener("blur", close);
    input.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "ArrowUp") {
        event.preventDefault();
        if (list.hidden) search(); else activate(Math.max(0, Math.min(shown.length - 1, active + (event.key === "ArrowDown" ? 1 : -1))));
      } else if (event.key === "Enter" && !list.hidden && shown[active]) { event.preventDefault(); choose(shown[active]); }
      else if (event.key === "Escape") { if (list.hidden) choose(null); close(); }
    });
    select.addEventListener("change", () => pick(current));
    byId("clear").addEventListener("click", () => { select.value = "-1"; choose(null); input.focus(); close(); });
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { event.preventDefault(); input.focus(); input.select(); }
    });
    byId("states").append(...picture.states.map((state, number) => [state, number]).filter(([, number]) => sum(sides.source.states[number]) + sum(sides.target.states[number])).map(([state, number]) => {
      const [from, to] = ["source", "target"].map((name) => bytes(sum(sides[name].states[number])));
      return element("li", {}, swatch(number), `${state} ${from === to ? from : `${from} → ${to}`}`);
    }));
    byId("place").textContent = "Point at a rank, or move to one with the arrow keys, to see what it holds.";
  }

  // ---------------------------------------------------------------- heat map

  class Heat {
    constructor(moves, canvas) {
      this.canvas = canvas;
      this.moves = { ...moves, source: summed(moves.source) };
      this.rows = Math.ceil(sides.source.count / moves.fold_source);
      this.columns = Math.ceil(sides.target.count / moves.fold_target);
      this.cell = null;
      this.byRow = Math.ceil(this.rows / 512);
      this.byColumn = Math.ceil(this.columns / 1024);
      document.querySelectorAll("input[name=kind]").forEach((input) => input.addEventListener("change", () => this.draw()));
      canvas.addEventListener("mousemove", (event) => this.point(event));
      canvas.addEventListener("keydown", (event) => this.key(event));
      canvas.addEventListener("focus", () => { if (!this.cell) this.show(0, 0); });
      this.draw();
    }

    values() {
      const kind = document.querySelector("input[name=kind]:checked").value, { source, target, memory, copied } = this.moves;
      const found = new Map();
      for (let index = 0; index < source.length; index += 1) {
        const value = (kind === "copied" ? 0 : memory[index]) + (kind === "memory" ? 0 : copied[index]);
        if (!value) continue;
        const at = Math.floor(source[index] / this.byRow) * this.width + Math.floor(target[index] / this.byColumn);
        found.set(at, (found.get(at) || 0) + value);
      }
      return found;
    }

    get width() { return Math.ceil(this.columns / this.byColumn); }
    get height() { return Math.ceil(this.rows / this.byRow); }

    draw() {
      const room = Math.max(280, byId("heat-frame").clientWidth), label = this.rows <= 64 ? 190 : 78, foot = 34;
      const cellWidth = Math.max(0.5, Math.min(150, (room - label - 8) / this.width));
      const cellHeight = Math.max(1, Math.min(this.height <= 12 ? 34 : 22, 560 / this.height));
      const drawn = { left: label, cellWidth, cellHeight, width: label + cellWidth * this.width + 8, height: cellHeight * this.height + foot };
      this.drawn = drawn;
      const ratio = window.devicePixelRatio || 1, canvas = this.canvas;
      canvas.width = drawn.width * ratio; canvas.height = drawn.height * ratio;
      canvas.style.width = `${drawn.width}px`; canvas.style.height = `${drawn.height}px`;
      const context = canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, drawn.width, drawn.height);
      context.fillStyle = css("--heat-none");
      context.fillRect(drawn.left, 0, cellWidth * this.width, cellHeight * this.height);
      this.found = this.values();
      const all = [...this.found.values()], most = Math.max(1, ...quantiles(all)), gap = cellWidth > 6 && cellHeight > 6 ? 1 : 0;
      this.most = most;
      for (const [at, value] of this.found) {
        const row = Math.floor(at / this.width), column = at % this.width, colour = this.colour(value);
        context.fillStyle = `rgb(${colour})`;
        context.fillRect(drawn.left + column * cellWidth, row * cellHeight, Math.max(cellWidth - gap, 0.6), Math.max(cellHeight - gap, 0.6));
        if (cellWidth >= 62 && cellHeight >= 14) {
          context.fillStyle = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140 ? "#111" : "#fff";
          context.font = "11px system-ui, sans-serif"; context.textAlign = "center"; context.textBaseline = "middle";
          context.fillText(bytes(value), drawn.left + (column + 0.5) * cellWidth, (row + 0.5) * cellHeight);
        }
      }
      this.axes(context);
      this.picked(context);
      if (this.cell) {
        context.strokeStyle = css("--ink"); context.lineWidth = 2;
        context.strokeRect(drawn.left + this.cell[1] * cellWidth - 1, this.cell[0] * cellHeight - 1, cellWidth + 1, cellHeight + 1);
      }
      this.legend();
    }

    colour(value) { return viridis(0.04 + 0.96 * Math.sqrt(value / this.most)); }

    axes(context) {
      const { left, cellWidth, cellHeight } = this.drawn, ink = css("--soft");
      context.fillStyle = ink; context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle"; context.textAlign = "right";
      const stepRow = Math.max(1, Math.ceil(14 / cellHeight)), shortRow = this.rows > 64;
      for (let row = 0; row < this.height; row += stepRow) {
        const text = shortRow ? this.short("source", row * this.byRow) : sides.source.folded(row * this.byRow, this.moves.fold_source);
        context.fillText(clipped(context, text, left - 10), left - 8, (row + 0.5) * cellHeight);
      }
      const stepColumn = Math.max(1, Math.ceil(64 / cellWidth)), y = this.height * cellHeight + 12;
      context.textAlign = "center";
      for (let column = 0; column < this.width; column += stepColumn) {
        context.fillText(clipped(context, this.short("target", column * this.byColumn), Math.max(60, cellWidth - 6)), left + (column + 0.5) * cellWidth, y);
      }
      context.textAlign = "left";
      context.fillText("target →", left, y + 15);
      context.textAlign = "right";
      context.fillText("source ↑", left - 8, y);
    }

    short(name, number) {
      const side = sides[name], place = Math.min(number * this.moves[`fold_${name}`], side.count - 1), block = side.block(place);
      return block.axes ? `${side.blocks.length > 1 ? `${block.title} ` : ""}rank ${side.coordinates(place).rank}` : side.labels[place];
    }

    picked(context) {
      if (!picked) return;
      const { left, cellWidth, cellHeight } = this.drawn;
      context.fillStyle = css("--pick");
      for (const name of ["source", "target"]) {
        if (!picked[name]) continue;
        for (const number of picked[name].places.keys()) {
          const first = number * picked[name].fold / this.moves[`fold_${name}`], count = Math.max(1, picked[name].fold / this.moves[`fold_${name}`]);
          if (name === "source") context.fillRect(left - 5, Math.floor(first) / this.byRow * cellHeight, 4, Math.max(1, count / this.byRow * cellHeight - 1));
          else context.fillRect(left + Math.floor(first) / this.byColumn * cellWidth, this.height * cellHeight + 1, Math.max(1, count / this.byColumn * cellWidth - 1), 4);
        }
      }
    }

    legend() {
      const strip = element("canvas", { width: 180, height: 12, role: "img", "aria-label": `from 0 to ${bytes(this.most)}` }), context = strip.getContext("2d");
      for (let x = 0; x < 180; x += 1) { context.fillStyle = `rgb(${this.colour(this.most * x / 180)})`; context.fillRect(x, 0, 1, 12); }
      byId("scale").replaceChildren("0", strip, bytes(this.most));
      const memory = sum(this.moves.memory), copied = sum(this.moves.copied);
      byId("moved").textContent = `${bytes(memory)} through memory, ${bytes(copied)} copied by the store; ${plural(this.found.size, "pair")} with bytes${this.byRow * this.byColumn * this.moves.fold_source * this.moves.fold_target > 1 ? ", neighbouring ranks joined" : ""}`;
    }

    point(event) {
      const box = this.canvas.getBoundingClientRect(), scale = this.drawn.width / box.width;
      const column = Math.floor(((event.clientX - box.left) * scale - this.drawn.left) / this.drawn.cellWidth), row = Math.floor((event.clientY - box.top) * scale / this.drawn.cellHeight);
      if (row >= 0 && column >= 0 && row < this.height && column < this.width) this.show(row, column);
    }

    key(event) {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step || !this.cell) return;
      event.preventDefault();
      this.show(Math.max(0, Math.min(this.height - 1, this.cell[0] + step[0])), Math.max(0, Math.min(this.width - 1, this.cell[1] + step[1])));
    }

    show(row, column) {
      if (this.cell && this.cell[0] === row && this.cell[1] === column) return;
      this.cell = [row, column];
      const value = this.found.get(row * this.width + column) || 0;
      const words = (name, number, by) => {
        const first = sides[name].folded(number * by, this.moves[`fold_${name}`]);
        return by > 1 ? `${first} and ${by - 1} rows on` : first;
      };
      byId("pair").textContent = `${words("source", row, this.byRow)} → ${words("target", column, this.byColumn)}: ${value ? bytes(value) : "nothing"}`;
      this.draw();
    }
  }

  function quantiles(values) { let most = 0; for (const value of values) if (value > most) most = value; return [most]; }

  function clipped(context, text, room) {
    if (context.measureText(text).width <= room) return text;
    let low = 1, high = text.length;
    while (low < high) { const middle = Math.ceil((low + high) / 2); if (context.measureText(`…${text.slice(-middle)}`).width <= room) low = middle; else high = middle - 1; }
    return `…${text.slice(-low)}`;
  }

  // ---------------------------------------------------------------- over time

  function drawTime() {
    const holder = byId("time"), run = data.run, width = Math.max(260, holder.clientWidth), left = width < 500 ? 72 : 118, right = 14;
    const end = Math.max(run.seconds, 1e-6), x = (at) => left + (width - left - right) * at / end;
    const figure = (title, svg) => element("figure", {}, element("figcaption", {}, title), svg);
    const canvas = (height, label) => shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    const ticks = (svg, height) => {
      for (const at of niceTicks(end, Math.max(2, Math.min(8, Math.floor((width - left) / 90))))) {
        svg.append(shape("line", { x1: x(at), x2: x(at), y1: 0, y2: height, stroke: "var(--line)" }), shape("text", { x: x(at), y: height + 14, class: "soft", "text-anchor": "middle" }, seconds(at)));
      }
    };
    const shortened = (text, room) => (text.length > room / 6 ? `${text.slice(0, Math.floor(room / 6) - 1)}…` : text);
    const parts = [];
    const steps = canvas(run.steps.length * 20 + 18, "steps of the run");
    ticks(steps, run.steps.length * 20);
    run.steps.forEach(([name, start, stop, summary], row) => {
      const last = stop === null ? end : stop, length = Math.max(2, x(last) - x(start));
      const label = shape("text", { x: left - 10, y: row * 20 + 14, "text-anchor": "end" }, shortened(name, left - 10));
      if (label.textContent !== name) label.append(shape("title", {}, name));
      steps.append(label);
      steps.append(shape("rect", { x: x(start), y: row * 20 + 3, width: length, height: 14, rx: 3, fill: stop === null ? "var(--pick)" : "var(--accent)" }));
      const words = `${seconds(last - start)}${stop === null ? ", not finished" : ""}${summary ? ` · ${summary}` : ""}`, after = x(last) + 6, room = Math.floor((width - after) / 6);
      // Behind the bar, else before it, else in it: a long first step leaves room on neither side.
      const [at, anchor] = room >= 24 ? [after, "start"] : x(start) - left > 60 ? [x(start) - 6, "end"] : [x(start) + 6, "start"];
      steps.append(shape("text", { x: at, y: row * 20 + 14, class: "soft halo", "text-anchor": anchor }, room < 24 ? seconds(last - start) : words.length > room ? `${words.slice(0, room - 1)}…` : words));
    });
    parts.push(figure("Steps", steps));
    if (run.stretches.length) {
      const lanes = Math.min(run.workers.length, 64), tall = lanes > 24 ? 7 : lanes > 8 ? 13 : 20, svg = canvas(lanes * tall + 18, "groups that each worker ran");
      ticks(svg, lanes * tall);
      run.workers.slice(0, lanes).forEach((name, lane) => {
        if (tall > 10 || lane % 4 === 0) svg.append(shape("text", { x: left - 10, y: lane * tall + tall / 2 + 4, "text-anchor": "end" }, name.replace("_", " ").slice(0, 18)));
      });
      for (const [worker, start, stop, groups, peak, read, written, copied] of run.stretches) {
        if (worker >= lanes) continue;
        const bar = shape("rect", { x: x(start), y: worker * tall + 1.5, width: Math.max(1, x(stop) - x(start) - 0.5), height: tall - 3, rx: 1.5, fill: copied > written / 2 ? PALETTE[1] : PALETTE[0] });
        bar.append(shape("title", {}, `${plural(groups, "group")}, ${seconds(stop - start)}, ${bytes(read)} read, ${bytes(written)} written${copied ? `, of which the store copied ${bytes(copied)}` : ""}, ${bytes(peak)} of memory`));
        svg.append(bar);
      }
      const hidden = run.workers.length - lanes;
      const key = element("span", {}, "Groups of each worker: ", dot(PALETTE[0]), "made in memory  ", dot(PALETTE[1]), `copied by the store${hidden > 0 ? `; ${hidden} more workers` : ""}`);
      parts.push(figure(key, svg));
      const limit = data.budget_bytes - data.footprint_bytes;
      parts.push(figure(element("span", {}, "Memory: ", dot(PALETTE[0]), "given to groups, of the fullest process  ", dot(PALETTE[5]), `what this process had in all (budget of a process: ${bytes(data.budget_bytes)})`), curves(x, end, [
        { values: run.curves.seconds.map((at, index) => [at, run.curves.memory[index]]), colour: PALETTE[0], area: true },
        { values: run.resident, colour: PALETTE[5] },
      ], bytes, { value: data.budget_bytes, label: `budget ${bytes(data.budget_bytes)}`, second: limit, secondLabel: `for groups ${bytes(limit)}` })));
    }
    const rates = [["read", 0], ["written", 1], ["copied", 2]].filter(([name]) => run.curves[name].some((value) => value > 0));
    if (rates.length) {
      const names = { read: "read", written: "written", copied: "of these, copied by the store" };
      const key = element("span", {}, "Throughput: ", ...rates.flatMap(([name, number]) => [dot([PALETTE[0], PALETTE[5], PALETTE[1]][number]), `${names[name]}  `]));
      parts.push(figure(key, curves(x, end, rates.map(([name, number]) => ({ values: run.curves.seconds.map((at, index) => [at, run.curves[name][index]]), colour: [PALETTE[0], PALETTE[5], PALETTE[1]][number] })), (value) => `${bytes(value)}/s`)));
    }
    if (run.waited_for.length) parts.push(element("p", { className: "note" }, `Waited for ${run.waited_for.join(", ")}.`));
    holder.replaceChildren(...parts);

    function curves(at, last, series, words, limit) {
      const height = 110, svg = canvas(height + 18, "curve over time");
      const most = Math.max(1e-9, ...series.flatMap((one) => one.values.map(([, value]) => value)), ...(limit ? [limit.value] : [])) * 1.06, y = (value) => height - height * value / most;
      ticks(svg, height);
      for (const share of [0, 0.5, 1]) svg.append(shape("text", { x: left - 10, y: Math.max(9, y(most * share / 1.06) + 4), class: "soft", "text-anchor": "end" }, words(most * share / 1.06)));
      for (const one of series) {
        if (!one.values.length) continue;
        const line = one.values.map(([time, value]) => `${at(Math.min(time, last)).toFixed(1)},${y(value).toFixed(1)}`);
        if (one.area) svg.append(shape("polygon", { points: [`${at(one.values[0][0])},${height}`, ...line, `${at(one.values[one.values.length - 1][0])},${height}`].join(" "), fill: one.colour, opacity: 0.22 }));
        svg.append(shape("polyline", { points: line.join(" "), fill: "none", stroke: one.colour, "stroke-width": 1.8, "stroke-linejoin": "round" }));
      }
      if (limit) {
        svg.append(shape("line", { x1: left, x2: width - right, y1: y(limit.value), y2: y(limit.value), stroke: "var(--ink)", "stroke-dasharray": "5 4" }));
        svg.append(shape("line", { x1: left, x2: width - right, y1: y(limit.second), y2: y(limit.second), stroke: "var(--faint)", "stroke-dasharray": "2 4" }));
        svg.append(shape("text", { x: width - right, y: y(limit.second) + 12, class: "soft halo", "text-anchor": "end" }, limit.secondLabel));
      }
      return svg;
    }
  }

  function dot(colour) {
    const drawn = shape("svg", { viewBox: "0 0 10 10" });
    drawn.append(shape("rect", { width: 10, height: 10, rx: 2, fill: colour }));
    return element("span", { className: "swatch", "aria-hidden": "true" }, drawn);
  }

  function niceTicks(end, count) {
    const rough = end / count, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const found = [];
    for (let at = 0; at <= end * 1.0001; at += step) found.push(at);
    return found;
  }

  // ---------------------------------------------------------------- bars and tables

  function drawBars() {
    byId("bars").replaceChildren(...data.charts.map((chart) => {
      const most = Math.max(1e-300, ...chart.bars.map(([, value]) => value ?? 0));
      return element("div", {}, element("h3", {}, chart.title), element("ol", {}, ...chart.bars.map(([name, value, label]) => {
        const fill = element("span", { className: "fill" });
        fill.style.width = `${Math.max(0, 45 * (value ?? most) / most)}%`;
        return element("li", {}, element("span", {}, name), element("span", { className: "track" }, fill, element("small", {}, label)));
      })));
    }));
  }

  function makeTable(table) {
    const numeric = table.headings.map((_, column) => table.rows.every((row) => row[column] === null || typeof row[column] === "number"));
    const inBytes = table.headings.map((heading) => /bytes|most read|most written|peak/.test(heading) && heading !== "first byte");
    let order = null, shown = table.first, words = [];
    const body = element("tbody"), more = element("button", { type: "button", className: "more" }), note = element("small"), cut = element("small", { className: "paper" });
    const heads = table.headings.map((heading, column) => {
      const button = element("button", { type: "button" }, heading), head = element("th", { scope: "col", className: numeric[column] ? "n" : "" }, button);
      button.addEventListener("click", () => { order = { column, up: order && order.column === column ? !order.up : !numeric[column] }; draw(); });
      return head;
    });
    const written = (value, column) => {
      if (value === null) return "not finite";
      if (!numeric[column]) return String(value);
      if (inBytes[column]) return bytes(value);
      if (Number.isInteger(value)) return table.headings[column] === "ulps" && value >= 1e6 ? value.toExponential(1) : value.toLocaleString("en");
      const digits = /^in [AB]$/.test(table.headings[column]) ? 9 : 4;
      return (Math.abs(value) < 1e-3 ? value.toExponential(digits - 1) : value.toPrecision(digits)).replace(/\.?0+(e|$)/, "$1");
    };
    const filter = element("input", { type: "search", placeholder: "Filter", "aria-label": `Filter: ${table.title}` });
    filter.addEventListener("input", () => { words = filter.value.toLowerCase().split(/\s+/).filter(Boolean); shown = table.first; draw(); });
    more.addEventListener("click", () => { shown = Math.max(100, shown * 10); draw(); });
    function draw() {
      const fitting = table.rows.filter((row) => words.every((word) => row.some((value) => String(value).toLowerCase().includes(word))));
      if (order) {
        const compare = (a, b) => (numeric[order.column] ? (a ?? Infinity) - (b ?? Infinity) : String(a).localeCompare(String(b), "en", { numeric: true }));
        fitting.sort((a, b) => compare(a[order.column], b[order.column]) * (order.up ? 1 : -1));
      }
      heads.forEach((head, column) => head.setAttribute("aria-sort", order && order.column === column ? (order.up ? "ascending" : "descending") : "none"));
      body.replaceChildren(...fitting.slice(0, shown).map((row) => element("tr", {}, ...row.map((value, column) => {
        const cell = element("td", { className: numeric[column] ? "n" : "" }, written(value, column));
        if (inBytes[column]) cell.title = `${value} bytes`;
        return cell;
      }))));
      more.hidden = fitting.length <= shown;
      more.textContent = `Show more of ${fitting.length.toLocaleString("en")}`;
      cut.hidden = more.hidden;
      cut.textContent = `The first ${shown.toLocaleString("en")} of ${plural(fitting.length, "row")}.`;
      note.textContent = table.more ? ` ${table.more.toLocaleString("en")} further rows are not in this page; --json lists all.` : "";
    }
    draw();
    const bar = element("div", { className: "bar" }, ...(table.rows.length > 12 ? [filter] : []), element("small", {}, plural(table.rows.length + table.more, "row")));
    return element("div", { className: table.headings.length > 8 ? "table wide" : "table" }, element("h2", {}, table.title), bar, element("div", { className: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body)), more, cut, note);
  }

  // ---------------------------------------------------------------- the page

  let heat = null;
  function redraw() {
    grids.forEach((grid) => grid.draw());
    if (heat) heat.draw();
    if (byId("time")) drawTime();
  }

  function start() {
    byId("nav").append(...[...document.querySelectorAll("section[data-title]")].map((section) => element("a", { href: `#${section.id}` }, section.dataset.title)));
    if (byId("where")) {
      makeSearch();
      for (const name of ["source", "target"]) grids.push(new Grid(sides[name], byId(`${name}-grid`)));
      if (picture.joined) byId("where").append(element("p", { className: "note" }, `Joined in this picture: ${picture.joined}.`));
    }
    if (byId("heat")) heat = new Heat(picture.moves, byId("heat"));
    if (byId("time")) drawTime();
    if (byId("bars")) drawBars();
    for (const name of ["findings", "tables"]) if (byId(name)) byId(name).append(...data[name].map(makeTable));
    const button = byId("theme"), themes = [["", "◐ auto", "as the system has them"], ["light", "○ light", "light"], ["dark", "● dark", "dark"]];
    let theme = 0;
    const apply = () => {
      const [name, text, words] = themes[theme];
      if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
      button.textContent = text;
      button.setAttribute("aria-label", `Colours: ${words}`);
    };
    button.addEventListener("click", () => { theme = (theme + 1) % themes.length; apply(); redraw(); });
    for (const copy of document.querySelectorAll(".copied button")) {
      const line = copy.previousElementSibling;
      copy.addEventListener("click", async () => {
        // A browser may keep pages from the clipboard; what is selected can be copied by hand.
        getSelection().selectAllChildren(line);
        try { await navigator.clipboard.writeText(line.textContent); copy.textContent = "Copied"; } catch { copy.textContent = "Selected"; }
        setTimeout(() => { copy.textContent = "Copy"; }, 2000);
      });
    }
    byId("print").addEventListener("click", () => window.print());
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    // Paper is light. The heat map is a bitmap, which style sheets do not reach.
    window.addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; redraw(); });
    window.addEventListener("afterprint", () => { apply(); redraw(); });
    let waiting = 0;
    window.addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); });
    document.documentElement.dataset.ready = "yes";
  }
  start();
})();
