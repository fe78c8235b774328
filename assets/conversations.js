// The bar under the chat: context meter, display switches, and a list of conversations that this browser keeps (IndexedDB). Texts of the
// model are set as textContent only. Knows nothing of Gradio: the page hands messages to `take` and listens through the options.
(function (global) {
'use strict';
const WORDS = {
  display: 'Display', list: 'Conversations', colour: 'Colour the answer', thinking: 'Show thinking', plain: 'Plain text',
  colourNote: 'by how each token came about, once it is complete:', thinkingNote: 'unfold what a model writes between <think> and </think>',
  plainNote: 'exactly as written: no Markdown, no formulas', noColour: 'This browser cannot colour text without changing it.',
  legend: {draft: 'accepted draft', correction: 'correction', bonus: 'bonus'},
  fresh: 'New chat', rename: 'Rename', markdown: 'Export Markdown', trace: 'Export trace', remove: 'Delete', sure: 'Really delete?',
  none: 'Nothing kept yet. Every conversation is kept in this browser, on this machine only.', open: 'Open this conversation',
  broken: 'This browser keeps nothing (is it a private window?).', title: 'Title of the conversation', you: 'You', model: 'Answer',
  thought: 'Thinking', count: {one: '1 message', many: '{} messages'}, empty: 'Untitled',
};
const STORE = 'conversations', KEPT = 100, TRACE_BYTES = 8e6;

const el = (tag, name, ...content) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  node.append(...content);
  return node;
};
const button = (name, text, act) => { const b = el('button', name, text); b.type = 'button'; b.addEventListener('click', act); return b; };
const stored = (key, value) => {
  try {
    if (value === undefined) return localStorage.getItem('specviz-' + key);
    localStorage.setItem('specviz-' + key, value);
  } catch { /* private window: a choice lasts as long as the page */ }
  return null;
};

// ---- the store: one database, one table, promises
function database() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open('specviz', 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, {keyPath: 'id'});
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error || new Error('blocked'));
  });
}
let opening = null;
async function table(mode, act) {
  opening = opening || database();
  const transaction = (await opening).transaction(STORE, mode), request = act(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}
const all = async () => (await table('readonly', store => store.getAll())).sort((a, b) => b.updated - a.updated);
const put = item => table('readwrite', store => store.put(item));
const get = id => table('readonly', store => store.get(id));
const remove = id => table('readwrite', store => store.delete(id));

// ---- texts
const textsOf = (row, kind) => row.parts.filter(part => part.kind === kind).map(part => part.text);
function titleOf(rows) {
  const first = rows.find(row => row.role === 'user'), text = first ? textsOf(first, 'text')[0] || '' : '';
  const line = text.trim().split(/\s+/).join(' ');
  return line.length > 60 ? line.slice(0, 57) + '…' : line || WORDS.empty;
}
function markdown(item) {
  const parts = ['# ' + item.title.replace(/\s+/g, ' ')];
  for (const row of item.rows) {
    parts.push('## ' + (row.role === 'user' ? WORDS.you : WORDS.model));
    for (const part of row.parts) {
      if (part.kind === 'thinking') parts.push(WORDS.thought + ':\n\n' + part.text.split('\n').map(line => '> ' + line).join('\n'));
      else if (part.kind === 'footer') parts.push('*' + part.text + '*');
      else parts.push(part.text);
    }
  }
  return parts.join('\n\n') + '\n';
}
function download(name, text, kind) {
  const url = URL.createObjectURL(new Blob([text], {type: kind})), link = el('a');
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
const fileName = title => (title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-+|-+$/g, '').slice(0, 40) || 'conversation').toLowerCase();

/* What Gradio's two copy buttons would write, and what was really said. */
function copies(rows) {
  const isSaid = part => part.kind === 'text' || part.kind === 'failed';
  const pairs = rows.map(row => [row.parts.map(part => part.shown).join('\n'), row.parts.filter(isSaid).map(part => part.text).join('\n')]);
  const flat = rows.flatMap(row => row.parts.map(part => ({role: row.role, ...part})));
  const bare = part => part.kind === 'thinking' ? part.shown.replace(/^.*\n  /, '').replace(/\n$/, '') : part.shown;
  const whole = (parts, text) => parts.map(part => part.role + ': ' + text(part)).join('\n\n');
  return new Map([...pairs, [whole(flat, bare), whole(flat.filter(isSaid), part => part.text)]]);
}

function mount(root, options) {
  let rows = [], current = null, runs = [], off = '', said = new Map(), last = 0, saving = Promise.resolve();

  // ---- the bar itself
  const fill = el('i'), track = el('span', 'bar-track', fill), meterText = el('span', 'bar-text'), dropped = el('span', 'bar-dropped');
  const meter = el('div', 'bar-meter', track, meterText, dropped);
  meter.hidden = true;
  const panels = {}, openers = {};
  function toggle(name) {
    for (const key of Object.keys(panels)) {
      const open = key === name && panels[key].hidden;
      panels[key].hidden = !open;
      openers[key].setAttribute('aria-expanded', String(open));
    }
    if (name === 'list' && !panels.list.hidden) draw();
  }
  for (const name of ['display', 'list']) {
    panels[name] = el('section', 'bar-panel');
    panels[name].hidden = true;
    panels[name].setAttribute('aria-label', WORDS[name]);
    openers[name] = button('bar-open', WORDS[name], () => toggle(name));
    openers[name].setAttribute('aria-expanded', 'false');
    openers[name].dataset.open = name;
  }
  root.append(el('div', 'bar-line', meter, openers.display, openers.list), panels.display, panels.list);

  // ---- display
  const look = {colour: stored('colour') === '1', thinking: stored('thinking') === '1', plain: stored('plain') === '1'};
  const boxes = {};
  for (const name of ['colour', 'thinking', 'plain']) {
    const box = el('input');
    box.type = 'checkbox';
    box.checked = look[name];
    box.dataset.look = name;
    box.addEventListener('change', () => {
      look[name] = box.checked;
      stored(name, box.checked ? '1' : '0');
      if (name === 'colour') repaint(); else show();
    });
    boxes[name] = box;
    panels.display.append(el('label', 'bar-switch', box, el('span', null, WORDS[name], el('small', null, WORDS[name + 'Note']))));
  }
  const legend = el('p', 'bar-legend');
  for (const [origin, text] of Object.entries(WORDS.legend)) legend.append(el('span', 'bar-sample is-' + origin, text));
  boxes.colour.closest('label').after(legend);
  if (!SpecColours.supported()) {
    boxes.colour.disabled = true;
    boxes.colour.checked = look.colour = false;
    legend.textContent = WORDS.noColour;
  }
  function show() {
    document.body.classList.toggle('plain-chat', look.plain);
    options.onLook({plain: look.plain, thinking: look.thinking});
  }
  if (look.plain || look.thinking) show();

  // ---- colours: painted again whenever the chat has changed, never while nothing can be painted
  let waiting = false;
  function repaint() {
    if (!SpecColours.supported()) return;
    const answers = [];
    if (look.colour) {
      const shown = document.querySelectorAll('#chat .message-row');
      rows.forEach((row, i) => {
        const at = row.role === 'assistant' && runs[i] ? row.parts.findIndex(part => part.kind === 'text') : -1;
        const part = at >= 0 && shown[i] ? shown[i].querySelectorAll('.message.panel-full-width')[at] : null;
        if (part) answers.push({root: part, runs: runs[i]});
      });
    }
    root.dataset.painted = String(SpecColours.paint(answers));
  }
  new MutationObserver(() => {
    if (!look.colour || waiting || !runs.some(Boolean)) return;
    waiting = true;
    setTimeout(() => { waiting = false; repaint(); }, 60);
  }).observe(document.querySelector('#chat') || document.body, {childList: true, subtree: true, characterData: true});

  // ---- copy: Gradio writes what it was given to render; the exact text goes out instead
  if (navigator.clipboard && !navigator.clipboard.specviz) {
    const write = navigator.clipboard.writeText.bind(navigator.clipboard);
    navigator.clipboard.writeText = text => write(navigator.clipboard.specviz(text));
  }
  if (navigator.clipboard) navigator.clipboard.specviz = text => said.has(text) ? said.get(text) : text;

  // ---- messages
  function take(message) {
    if (message.off !== undefined) {
      off = message.off;
      if (off) panels.list.replaceChildren(el('p', 'bar-reason', off));
    }
    if (message.meter) {
      meter.hidden = !message.meter.text;
      if (message.meter.text) {
        meterText.textContent = message.meter.text;
        meter.title = message.meter.rule;
        track.hidden = message.meter.share === null;
        fill.style.width = (100 * message.meter.share).toFixed(1) + '%';
        fill.classList.toggle('is-full', message.meter.share > 0.9);
        dropped.textContent = message.meter.dropped;
      }
    }
    if (!Array.isArray(message.rows)) return;
    const saidIn = row => row && JSON.stringify(textsOf(row, 'text'));
    runs = message.rows.map((row, i) => saidIn(row) === saidIn(rows[i]) ? runs[i] || null : null);
    rows = message.rows;
    if (message.runs && rows.length) runs[rows.length - 1] = message.runs;
    said = copies(rows);
    last++;
    repaint();
    keep(message.run);
  }

  // ---- keeping
  function keep(run) {
    if (off) return;
    if (!rows.length) { current = null; return draw(); }
    current = current || {id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: titleOf(rows)};
    const item = current, turn = last, bare = rows.map(row => ({role: row.role, parts: row.parts.map(({kind, text}) => ({kind, text}))}));
    const colours = runs.slice();
    saving = saving.then(async () => {
      const before = await get(item.id);
      if (item.gone) return;
      const changed = !before || JSON.stringify(before.rows) !== JSON.stringify(bare);
      await put({...before, id: item.id, title: item.title, rows: bare, runs: colours, updated: changed ? Date.now() : before.updated});
      for (const old of (await all()).slice(KEPT)) await remove(old.id);
      draw();
    }).catch(failed);
    if (run) setTimeout(() => keepTrace(item, run, turn), 400);      // the viewer gets its last message about now
  }
  function keepTrace(item, run, turn) {
    const viewer = (document.querySelector('#viewer [data-ready]') || {}).viewer;
    if (!viewer || viewer.state().run !== run || turn !== last || item.gone) return;
    const text = JSON.stringify(viewer.trace());
    if (text.length > TRACE_BYTES) return;
    saving = saving.then(async () => {
      const before = await get(item.id);
      if (before && !item.gone) { await put({...before, trace: text}); draw(); }
    }).catch(failed);
  }
  function failed() {
    off = WORDS.broken;
    panels.list.replaceChildren(el('p', 'bar-reason', off));
  }

  // ---- the list
  async function draw() {
    if (off || panels.list.hidden) return;
    let items;
    try { items = await all(); } catch { return failed(); }
    const list = el('ul', 'bar-list', ...items.map(line));
    panels.list.replaceChildren(button('bar-fresh', WORDS.fresh, () => { current = null; options.onFresh(); }),
      items.length ? list : el('p', 'bar-reason', WORDS.none));
  }
  function line(item) {
    const when = new Date(item.updated), count = item.rows.length;
    const open = button('bar-title', '', () => recall(item.id));
    open.append(el('span', null, item.title), el('small', null, when.toLocaleString([], {dateStyle: 'medium', timeStyle: 'short'}) + ' · '
      + (count === 1 ? WORDS.count.one : WORDS.count.many.replace('{}', count))));
    open.title = WORDS.open;
    const name = fileName(item.title);
    const erase = button('bar-act', WORDS.remove, async () => {
      if (erase.textContent !== WORDS.sure) { erase.textContent = WORDS.sure; return; }
      if (current && current.id === item.id) { current.gone = true; current = null; }
      await saving;
      await remove(item.id).catch(failed);
      draw();
    });
    const acts = el('div', 'bar-acts', button('bar-act', WORDS.rename, () => rename(item, open)),
      button('bar-act', WORDS.markdown, () => download(name + '.md', markdown(item), 'text/markdown')),
      ...(item.trace ? [button('bar-act', WORDS.trace, () => download(name + '.json', item.trace, 'application/json'))] : []), erase);
    const entry = el('li', current && current.id === item.id ? 'is-current' : '', open, acts);
    entry.dataset.id = item.id;
    return entry;
  }
  function rename(item, place) {
    const box = el('input', 'bar-name');
    box.value = item.title;
    box.maxLength = 120;
    box.setAttribute('aria-label', WORDS.title);
    let done = false;
    const end = async save => {
      if (done) return;
      done = true;
      if (save && box.value.trim()) {
        if (current && current.id === item.id) current.title = box.value.trim();
        await saving;
        const now = await get(item.id);
        if (now) await put({...now, title: box.value.trim()}).catch(failed);
      }
      draw();
    };
    box.addEventListener('keydown', event => { if (event.key === 'Enter') end(true); if (event.key === 'Escape') end(false); });
    box.addEventListener('blur', () => end(true));
    place.replaceWith(box);
    box.focus();
    box.select();
  }
  async function recall(id) {
    await saving;
    const item = await get(id);
    if (!item) return draw();
    current = {id: item.id, title: item.title};
    rows = item.rows.map(row => ({role: row.role, parts: row.parts.map(part => ({...part, shown: part.text}))}));
    runs = item.runs || [];
    options.onRecall(item.rows);
    const viewer = (document.querySelector('#viewer [data-ready]') || {}).viewer;
    if (viewer && item.trace) viewer.open(new File([item.trace], item.title));
    toggle('list');
    draw();
  }

  return {take, repaint, state: () => ({rows, runs, current, off, look: {...look}})};
}

global.SpecChat = {mount, markdown, copies, WORDS};
})(window);
