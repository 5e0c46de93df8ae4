"use strict";
// Shows the episodes of the page's data. Text from the log only ever becomes text nodes: a policy can write anything.
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const none = "-";

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function number(value, sign) {
  if (value === null || value === undefined) return none;
  const text = String(Number(value.toPrecision(4)));
  return sign && value >= 0 ? "+" + text : text;
}

function range(values) {
  if (!values) return none;
  return values[0] === values[1] ? String(values[0]) : values[0] + ".." + values[1];
}

// The values of [value, count] runs, one for each token.
function unrolled(runs) {
  return runs.flatMap(([value, count]) => Array(count).fill(value));
}

function textOf(turn) {
  return [turn.texts.join(""), ...turn.notes].join("\n");
}

const found = data.episodes.map((one) => ({
  one,
  words: [one.id, one.prompt, one.source, one.state, one.why || "", ...one.turns.map(textOf)].join("\n").toLowerCase(),
}));

const orders = {
  reward: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  trained: (a, b) => b.trained - a.trained,
  stale: (a, b) => (b.staleness ? b.staleness[1] : -1) - (a.staleness ? a.staleness[1] : -1),
};

function list() {
  const words = at("search").value.toLowerCase();
  const [state, step, sort] = ["state", "step", "sort"].map((id) => at(id).value);
  const chosen = found
    .filter((each) => each.words.includes(words))
    .map((each) => each.one)
    .filter((one) => (!state || one.state === state) && (!step || one.step === Number(step)));
  if (orders[sort]) chosen.sort(orders[sort]);
  at("rows").replaceChildren(...chosen.map(row));
  at("count").textContent = chosen.length + " of " + data.episodes.length + " episodes";
  markOpen();
}

function row(one) {
  const made = element("tr");
  made.dataset.id = one.id;
  const link = element("a", one.id);
  link.href = "#" + one.id;
  const first = element("td");
  first.append(link);
  const state = element("td", one.state + (one.why ? ": " + one.why : ""), "state-" + one.state);
  state.title = state.textContent;
  const prompt = element("td", one.prompt);
  prompt.title = one.prompt + " (" + one.source + ")";
  const turns = one.trajectories > 1 ? one.answers + " in " + one.trajectories : one.answers;
  const cells = [one.step ?? none, null, number(one.reward), number(one.advantage, true), turns];
  cells.push(one.trained + "/" + one.tokens, range(one.versions), range(one.staleness));
  made.append(first, state, ...cells.map((cell) => (cell === null ? prompt : element("td", String(cell)))));
  return made;
}

function openId() {
  return location.hash.slice(1);
}

function markOpen() {
  for (const each of at("rows").children) each.classList.toggle("open", each.dataset.id === openId());
}

function show() {
  const one = data.episodes.find((each) => each.id === openId());
  at("episode").hidden = !one;
  markOpen();
  if (!one) return;
  at("facts").textContent = one.facts;
  const branches = one.trajectories > 1;
  at("tree").replaceChildren(...(branches ? [treeBelow(one, null)] : []));
  at("turns").replaceChildren(...one.turns.map((turn) => shownTurn(one, turn)));
  at("legend").textContent = legend();
}

function legend() {
  return {
    "": "",
    logprob: "red: log-prob -5 or less",
    staleness: "orange: the stalest tokens of the page",
    advantage: "green: above 0, red: below 0",
  }[at("color").value];
}

// A list of the turns after this one; a turn that alone follows another is on the same level.
function treeBelow(one, number) {
  const made = element("ul");
  let below = one.turns.filter((turn) => turn.parent === number);
  while (below.length === 1) {
    made.append(treeEntry(below[0]));
    const parent = below[0].number;
    below = one.turns.filter((turn) => turn.parent === parent);
  }
  for (const turn of below) {
    const entry = treeEntry(turn);
    const deeper = treeBelow(one, turn.number);
    if (deeper.children.length) entry.append(deeper);
    made.append(entry);
  }
  return made;
}

function treeEntry(turn) {
  const entry = element("li");
  const link = element("button", turn.heading);
  link.type = "button";
  link.addEventListener("click", () => at("turn-" + turn.number).scrollIntoView());
  entry.append(link);
  return entry;
}

function shownTurn(one, turn) {
  const made = element("div", undefined, "turn " + turn.author);
  made.id = "turn-" + turn.number;
  made.append(element("h2", turn.heading));
  made.append(at("table").checked ? tokenTable(one, turn) : tokenText(one, turn));
  made.append(...turn.notes.map((note) => element("div", note, "note")));
  return made;
}

function tokenText(one, turn) {
  const text = element("div", undefined, "text");
  const trained = unrolled(turn.trained);
  if (!at("color").value) {
    let first = 0;
    for (const [isTrained, count] of turn.trained) {
      const span = element("span", turn.texts.slice(first, first + count).join(""), isTrained ? "" : "masked");
      text.append(span);
      first += count;
    }
    return text;
  }
  const versions = unrolled(turn.versions);
  const colors = colorsOf(one, turn, versions);
  turn.texts.forEach((piece, place) => {
    const span = element("span", piece, trained[place] ? "token" : "masked");
    if (trained[place]) {
      span.style.backgroundColor = colors[place];
      span.title = "log-prob " + number(turn.logprobs[place]) + ", version " + versions[place];
    }
    text.append(span);
  });
  return text;
}

const stalest = Math.max(1, ...data.episodes.map((one) => (one.staleness ? one.staleness[1] : 0)));

function colorsOf(one, turn, versions) {
  const shade = (color, share) => "rgb(" + color + " / " + Math.min(0.8, 0.8 * share).toFixed(2) + ")";
  if (at("color").value === "logprob") return turn.logprobs.map((value) => shade("220 40 40", -value / 5));
  if (at("color").value === "staleness") {
    return versions.map((version) => shade("235 140 0", one.step === null ? 0 : (one.step - 1 - version) / stalest));
  }
  const values = turn.columns.advantage ? unrolled(turn.columns.advantage) : versions.map(() => 0);
  const most = Math.max(1e-9, ...values.map(Math.abs));
  return values.map((value) => shade(value < 0 ? "220 40 40" : "30 160 70", Math.abs(value) / most));
}

function tokenTable(one, turn) {
  const made = element("table");
  const columns = Object.entries(turn.columns).map(([name, runs]) => [name, unrolled(runs)]);
  const head = element("tr");
  const headings = ["at", "token", "text", "log-prob", "version", "stale", "reward", ...columns.map(([name]) => name)];
  head.append(...headings.map((heading) => element("th", heading)));
  made.append(head);
  const [trained, versions, rewards] = [turn.trained, turn.versions, turn.rewards].map(unrolled);
  turn.texts.forEach((piece, place) => {
    const known = trained[place];
    const stale = known && one.step !== null ? one.step - 1 - versions[place] : none;
    const cells = [turn.start + place, turn.tokens[place], JSON.stringify(piece)];
    cells.push(known ? number(turn.logprobs[place]) : none, known ? versions[place] : none, stale);
    cells.push(rewards[place] ? number(rewards[place]) : none);
    cells.push(...columns.map(([, values]) => (known ? number(values[place]) : none)));
    const line = element("tr", undefined, known ? "" : "masked");
    line.append(...cells.map((cell) => element("td", String(cell))));
    made.append(line);
  });
  return made;
}

for (const state of [...new Set(data.episodes.map((one) => one.state))]) at("state").append(new Option(state, state));
for (const note of data.notes) at("notes").append(element("div", note));
for (const id of ["search", "state", "step", "sort"]) at(id).addEventListener("input", list);
for (const id of ["color", "table"]) at(id).addEventListener("input", show);
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("hashchange", show);
if (!location.hash && data.episodes.length) history.replaceState(null, "", "#" + data.episodes[0].id);
list();
show();
