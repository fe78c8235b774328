// The view Compare: one prompt through several methods, one after the other, or recorded runs side by side.
WORDS.compare = {
  title: 'Compare', head: 'One prompt, several methods', prompt: 'Prompt', methods: 'Methods', tokens: 'New tokens at most', run: 'Compare', stop: 'Stop',
  settings: 'One after the other, never at the same time; plain decoding is measured once. Draft length, sampling and system prompt are the page’s own.',
  waiting: 'Waiting for its turn …', phases: {'warm-up': 'warming up, not counted', answer: '{n} tokens', plain: 'measuring plain decoding, {n} tokens', waiting: 'waiting, others are being answered'}, at: '{i} of {of}: {method}, {phase}',
  done: 'Done: {n} compared.', stopped: 'Stopped. What was finished stays in the table.', failed: '{method}: {why}', none: 'Choose at least one method.',
  noMethods: 'No model is loaded yet; recorded runs can be compared all the same.', add: 'Add a run', adds: 'Add a run to the table …', addAll: 'Add all recorded runs', clear: 'Empty the table',
  empty: 'Nothing to compare yet.', emptyHow: ' Choose methods above, or add recorded runs.', emptyRuns: ' Add recorded runs.', prompts: 'These runs answer different prompts.', setups: 'These runs differ in model, quantization or machine.',
  pictures: 'accepted per step; tokens over time', show: 'Show', showLabel: 'Show this run: {name}', save: 'Save', saveLabel: 'Save the trace of this run: {name}', drop: 'Remove this run: {name}',
  exports: 'Export the table', kinds: {json: 'JSON', csv: 'CSV', md: 'Markdown'}, loss: 'slower than plain decoding',
};

VIEWS.push({name: 'compare', title: WORDS.compare.title, controls: false, charts: false, mount(host) {
  const words = WORDS.compare, {shelf, options} = host, runs = new Map(), open = {ticket: null, wanted: []};
  let methods = [], numTickets = Date.now() % 1e9;

  // ---- the form, where a model is at hand
  const uid = 'sv-compare-' + numTickets, prompt = set(el('textarea', 'sv-text'), {rows: 3, maxlength: 20000, id: uid}), boxes = el('div', 'sv-boxes'), limit = set(el('select', 'sv-speed'), {id: uid + 'n'});
  for (const n of [32, 64, 96, 128, 256, 512]) limit.append(set(el('option', null, String(n)), {value: n}));
  limit.value = '96';
  const go = host.button('sv-primary', words.run, () => open.ticket === null ? start() : stop()), said = set(el('span', 'sv-quiet'), {role: 'status'}), fill = el('span', 'sv-fill is-kept'),
      track = el('span', 'sv-track', fill);
  const form = el('section', 'sv-compare-form', el('h3', null, words.head), set(el('label', 'sv-quiet', words.prompt), {for: uid}), prompt, set(el('fieldset', 'sv-fieldset', el('legend', 'sv-quiet', words.methods), boxes), {}),
      box('sv-compare-go', go, set(el('label', 'sv-quiet', words.tokens + ' ', limit), {for: uid + 'n'}), said), track, el('p', 'sv-quiet sv-small', words.settings));
  form.hidden = !options.compare; track.hidden = true;

  function drawMethods() {
    const was = new Map([...boxes.querySelectorAll('input')].map(input => [input.value, input.checked]));
    boxes.replaceChildren(...methods.map(method => {
      const input = set(el('input'), {type: 'checkbox', value: method.name});
      input.disabled = !!method.reason;
      input.checked = !method.reason && (was.has(method.name) ? was.get(method.name) : !method.note);
      const label = el('label', 'sv-box' + (method.reason ? ' is-off' : ''), input, el('span', null, method.label, (method.reason || method.note) && el('small', null, method.reason || method.note)));
      return set(label, {title: method.summary});
    }));
    if (!methods.length) boxes.append(el('p', 'sv-quiet', words.noMethods));
    go.disabled = !methods.length;
  }
  let asked = -Infinity;       // never yet: also in the page’s first seconds
  function askMethods() {
    if (!options.compare || performance.now() - asked < 3000 || open.ticket !== null) return;
    asked = performance.now();
    Promise.resolve().then(() => options.compare.methods()).then(found => {
      if (JSON.stringify(found) === JSON.stringify(methods) && boxes.childNodes.length) return;
      methods = Array.isArray(found) ? found : [];
      drawMethods();
    }, error => host.complain(String(error && error.message || error)));
  }

  function start() {
    const names = [...boxes.querySelectorAll('input:checked')].map(input => input.value);
    if (!names.length) { said.textContent = words.none; return; }
    open.ticket = ++numTickets; open.wanted = names.map(name => methods.find(method => method.name === name)); open.done = 0;
    said.textContent = words.waiting;
    fill.style.width = '0'; track.hidden = false;
    go.textContent = words.stop;
    options.compare.start({ticket: open.ticket, prompt: prompt.value, methods: names, num_tokens: +limit.value});
  }
  function stop() { const {ticket} = open; ended(words.stopped); options.compare.stop(ticket); }
  function ended(text) { open.ticket = null; go.textContent = words.run; said.textContent = text; track.hidden = true; }

  host.takers.compare = message => {
    if (message.ticket !== open.ticket) return;
    if (message.state) return ended(message.state === 'done' ? say(words.done, {n: open.done}) : message.state === 'stopped' ? words.stopped : String(message.message));
    const method = open.wanted[message.at] || {label: WORDS.dash}, of = open.wanted.length, phase = words.phases[message.phase];
    if (message.failed) { host.complain(say(words.failed, {method: method.label, why: message.failed})); return; }
    if (message.trace) {
      let run;
      try { run = runOf(checkTrace(message.trace), 'compare:' + open.ticket + ':' + message.at); } catch (error) { host.complain(error.message); return; }
      open.done++;
      runs.set(run.id, run);
      shelf.add(run);
      drawTable();
    } else if (phase) said.textContent = say(words.at, {i: message.at + 1, of, method: method.label, phase: say(phase, {n: message.num_tokens})});
    const part = message.trace ? 1 : message.phase === 'warm-up' ? 0.05 : min(0.95, 0.1 + 0.85 * message.num_tokens / +limit.value) * (message.phase === 'plain' ? 1 : message.at ? 0.95 : 0.5);
    fill.style.width = (message.at + part) / of * 100 + '%';
  };

  // ---- the table
  const add = set(el('select', 'sv-speed sv-pick'), {'aria-label': words.add}), addAll = host.button('', words.addAll, () => addRecorded(shelf.names().map(one => one.name))),
      clear = host.button('', words.clear, () => { runs.clear(); drawTable(); }), out = el('div', 'sv-compare-out'), notes = el('div');
  const exports = box('sv-exports', el('span', 'sv-quiet', words.exports), ...Object.keys(words.kinds).map(kind => host.button('', words.kinds[kind], () =>
    download(tableText(allRows(), kind), 'specviz-comparison.' + kind, {json: 'application/json', csv: 'text/csv', md: 'text/markdown'}[kind]))));
  add.onchange = () => {
    const value = add.value;
    add.value = '';
    if (value === 'file') shelf.open(run => { runs.set(run.id, run); drawTable(); });
    else if (value.startsWith('rec:')) addRecorded([value.slice(4)]);
    else {
      const run = value === 'now' ? host.run : shelf.runs().find(one => 'run:' + one.id === value);
      if (run) { runs.set(run.id, run); drawTable(); }
    }
  };
  async function addRecorded(names) {
    for (const name of names) {
      try { const run = await shelf.recording(name); runs.set(run.id, run); } catch (error) { host.complain(say(WORDS.shelf.missing, {why: error.message})); }
    }
    drawTable();
  }
  function fillMenu() {
    const option = (value, text) => set(el('option', null, text), {value}), group = (label, list) => list.length ? [set(el('optgroup', null, ...list), {label})] : [];
    add.replaceChildren(option('', words.adds), ...group(WORDS.shelf.now, host.run.numDecode && !runs.has(host.run.id) ? [option('now', runTitle(host.run))] : []),
        ...group(WORDS.shelf.page, shelf.runs().filter(run => !runs.has(run.id)).map(run => option('run:' + run.id, runTitle(run)))),
        ...group(WORDS.shelf.recorded, shelf.names().filter(one => !runs.has('recorded:' + one.name)).map(one => option('rec:' + one.name, one.title))), option('file', WORDS.shelf.file));
    add.value = '';
    addAll.hidden = !shelf.names().length; clear.hidden = exports.hidden = !runs.size;
  }

  const drafting = () => [...runs.values()].filter(run => !isPlainRun(run));
  function baseline() {       // one plain row for all, where they answer one prompt in one set-up
    const all = drafting(), first = all.find(run => run.plain.length > 2), key = run => JSON.stringify([promptOf(run), nameOf(run.meta.target), machineOf(run)]);
    return first && all.every(run => key(run) === key(first)) ? first : null;
  }
  const allRows = () => [...(baseline() ? [plainRowOf(baseline())] : []), ...[...runs.values()].map(rowOf)];

  function drawTable() {
    fillMenu();
    const list = [...runs.values()], plain = baseline(), rows = list.map(rowOf), table = el('table', 'sv-table'), names = Object.keys(WORDS.table_of.columns), head = el('tr');
    const seen = new Set(list.map(promptOf)), setups = new Set(list.map(run => [nameOf(run.meta.target), quantizationOf(run), machineOf(run)].join()));
    notes.hidden = seen.size < 2 && setups.size < 2;
    notes.replaceChildren(...[seen.size > 1 && words.prompts, setups.size > 1 && words.setups].filter(Boolean).map(text => el('p', 'sv-note', text)));
    if (!list.length) { out.replaceChildren(el('p', 'sv-empty', words.empty + (options.compare && methods.length ? words.emptyHow : words.emptyRuns))); return; }
    for (const name of names) {
      const cell = set(el('th', name in CELLS ? 'is-number' : null), {scope: 'col'}), label = WORDS.table_of.columns[name];
      if (ROW_FORMULA[name]) { const hint = makeHint(host, label, [ROW_FORMULA[name]]); cell.append(box('sv-th', el('span', null, label), hint.info), hint.about); } else cell.append(label);
      head.append(cell);
    }
    head.append(set(el('th', null, words.pictures), {scope: 'col'}));
    table.append(el('thead', null, head));
    const bestRate = max(...rows.map(row => row.tokens_per_s || 0), plain ? plain.plainRate() : 0), most = max(1, ...list.flatMap(run => run.rows.accepted.map((n, i) => n + (run.rows.rejected[i] ? 1 : 0)))),
        endMs = max(1, ...list.flatMap(run => [run.decodeMs, timelineOf(run, true).endMs])), numTokens = max(1, ...list.map(run => run.decodeTokens));
    const line = (row, run) => {
      const tr = el('tr', run ? null : 'is-plain'), act = (text, label, action) => set(host.button('sv-small-btn', text, action), {'aria-label': say(label, {name: row.name})});
      const acts = run ? box('sv-acts', act(words.show, words.showLabel, () => { host.show(run.file(), run.id, {status: say(WORDS.opened, {name: row.name})}); host.openView('tokens'); }),
          act(words.save, words.saveLabel, () => download(JSON.stringify(run.file()), 'specviz-' + String(nameOf(run.meta.method) || 'run').replace(/[^\w.-]+/g, '-') + '.json', 'application/json')),
          act('✕', words.drop, () => { runs.delete(run.id); drawTable(); })) : '';
      for (const name of names) {
        const cell = el(name === 'name' ? 'th' : 'td', (name in CELLS ? 'is-number sv-num' : '') + (name === 'tokens_per_s' && row[name] === bestRate ? ' is-best' : ''), cellText(name, row[name]));
        if (name === 'name') set(cell, {scope: 'row'}).append(run && seen.size > 1 ? el('small', null, run.meta.title || clipped(promptOf(run), 40)) : '', acts);
        if (name === 'speed_up' && run && finite(row[name])) { cell.classList.add(row[name] < 1 ? 'is-loss' : 'is-gain'); if (row[name] < 1) cell.title = words.loss; }
        if (name === 'identical' && row[name]) cell.className = 'sv-text-word is-' + (row[name] === WORDS.table_of.identical ? 'same' : run && run.compare && run.compare.identical === false && !run.compare.tie || row[name] === WORDS.table_of.lossy ? 'bad' : 'other');
        tr.append(set(cell, {'data-label': WORDS.table_of.columns[name]}));
      }
      tr.append(el('td', 'sv-picture', run && acceptedPicture(run, most), run && tokensPicture(run, endMs, numTokens)));
      return tr;
    };
    table.append(el('tbody', null, ...(plain ? [line(plainRowOf(plain), null)] : []), ...rows.map((row, i) => line(row, list[i]))));
    out.replaceChildren(table);
  }

  let drawnFor = null;
  function draw() {
    askMethods();
    if (!prompt.value && promptOf(host.run)) prompt.value = promptOf(host.run);
    const key = [host.run.id, host.run.numDecode > 0, host.run.reason, shelf.runs().length, shelf.names().length, methods.length].join();
    if (key === drawnFor) return;
    drawnFor = key;
    if (runs.size) fillMenu(); else drawTable();
  }
  shelf.hear(() => { if (host.shownView === 'compare') draw(); });
  return {node: box('sv-view sv-compare', form, box('sv-compare-bar', add, addAll, clear, exports), notes, out), draw};
}});
