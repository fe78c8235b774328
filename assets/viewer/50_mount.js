/* The specviz viewer: draws one run of speculative decoding from its trace, live or replayed. All files here are joined into one plain
 * script; no build step, no server. It knows nothing of Gradio, of models, or of how verdicts are reached: it draws what was recorded.
 *
 *   const viewer = SpecViz.mount(element, {onResync(run, fromSeq), onPick(step)});
 *   viewer.take(message);      // start | steps | plain | end | trace | error | resync, one object each with run and seq
 *
 * Every piece of model or file text is set with textContent. Charts need Plotly, loaded in idle time from the address in the `start`
 * message; everything else works without it. `element.dataset.ready` is "1" once mounted; `viewer.state()` is for tests.
 */

// ---- the viewer -----------------------------------------------------------------------------------------------------
function mount(root, options) {
  options = options || {};
  root.classList.add('sv');
  root.replaceChildren();

  // what is known (run) and what is looked at (view: step `at`; `node` in it, null, an index or 'end'; `phase` of PHASES)
  let run, view, formulas = {}, lastMessage = {};   // lastMessage: the last `start` or `trace`: figures, formulas and what else came along
  const ears = [], tell = what => { for (const ear of ears) ear(what); };
  const size = () => run.steps.length;
  const button = (cls, label, action, name) => {
    const node = el('button', 'sv-btn ' + cls, name ? icon(name) : label);
    node.onclick = action;
    return set(node, name ? {type: 'button', 'aria-label': label, title: label} : {type: 'button'});
  };
  const announce = set(box('sv-sr'), {role: 'status'}), slot = el('div', 'sv-slot'), foot = el('div', 'sv-foot');
  // takers: functions of messages that are no part of a run, by type
  const host = {root, options, slot, foot, button, size, visit, follow, pick, choose, setPhase, show, dress, openView, hint: null,
      takers: {},
    pause: () => player.pause(), complain: text => notes.complain(text), announce: text => { announce.textContent = text; },
    tell, hear: ear => ears.push(ear), views: VIEWS.filter(one => !one.when || one.when(options)),
        // `hear`: told 'run', 'move' or 'view' after each
    shownStep: () => run.steps[view.at], formulas: () => formulas, redraw: () => schedule(), message: () => lastMessage, sheet,
    get run() { return run; }, get view() { return view; }, get shownView() { return shownView; }};

  // skeleton
  const notes = makeNotes(host), heads = makeHeads(host), player = makePlayer(host), strip = makeStrip(host),
      inspector = makeInspector(host);
  const main = box('sv-main', box('sv-left', makeLegend(host), strip.node), inspector.node);
  const chartRow = el('div', 'sv-charts'), tableBox = el('div', 'sv-data');
  tableBox.hidden = true;
  const tableButton = button('', WORDS.table, () => { tableBox.hidden = !tableBox.hidden;
      set(tableButton, {'aria-pressed': !tableBox.hidden}); charts.drawTable(); });
  set(tableButton, {'aria-pressed': false});
  const viewBar = set(box('sv-views'), {role: 'tablist', 'aria-label': WORDS.viewsLabel}), stage = box('sv-stage', main);
  const files = makeFiles(host), charts = makeCharts(host, chartRow, tableBox);
  foot.append(...files.nodes, tableButton);
  root.append(notes.top, heads.node, notes.notes, notes.problem, viewBar, slot, player.node, stage, chartRow, tableBox, foot, announce);

  function reset(id, meta) {
    stream.leave(run && run.id, id);
    if (view) player.pause();
    run = new Run(id, meta);
    run.isEnd = token => run.reason === 'eos' && size() > 0 && emittedOf(run.steps[size() - 1]).slice(-1)[0] === token;
    view = {at: -1, node: null, phase: PHASES.length - 1, live: true, playing: false, pending: false, threshold: view ? view.threshold : 0,
        zoom: null};
    strip.reset();
    root.classList.remove('replay');
    notes.complain('');
    player.draw(); notes.draw(); inspector.draw();
  }

  // ---- messages
  const stream = makeStream({get run() { return run; }, begin, apply, restart: id => reset(id, {}), resync: options.onResync,
    lost(n) { run.numLost += n; schedule(); }});

  function begin(message) {
    if (message.type === 'trace') {
      let data;
      try { data = checkTrace(message.trace); } catch (error) { return notes.complain(error.message); }
      show(data, message.run, message);
    } else {
      reset(message.run, message.meta);
      setUp(message);
      tell('run');
    }
    run.seq = message.seq || 0;
    schedule();
  }

  function setUp(message) {
    if (message.formulas) formulas = message.formulas;
    lastMessage = message;
    run.note = typeof message.note === 'string' ? message.note : '';
    notes.status(message.status);
    charts.prepare(message);
  }

  function dress(look) {      // figures and formulas that come after the run that they belong to
    if (look.formulas) formulas = look.formulas;
    lastMessage = {...lastMessage, ...look};
    charts.prepare(lastMessage);
    schedule();
    tell('look');
  }

  function show(data, id, message) {       // a whole recording, already checked
    reset(id, data.meta);
    run.plain = (data.plain || []).slice();
    for (const step of data.steps) run.addStep(step);
    run.stats = data.stats || null; run.compare = data.compare || null;
    run.reason = data.meta.reason || run.stats && run.stats.reason || '';
    setUp(message);
    view.live = false;
    flush();
    if (size()) select(size() - 1, null, true);
    drawTokens();
    tell('run');
  }

  function apply(message) {
    if (Object.hasOwn(host.takers, message.type)) return host.takers[message.type](message);
    if (message.seq !== undefined) run.seq = message.seq;
    try {
      if (message.steps) checkSteps(message.steps, 'steps');
      if (message.tokens) checkList('plain', message.tokens, 'tokens');
    } catch (error) { return notes.complain(error.message); }
    for (const step of message.steps || NONE) run.addStep(step);
    for (const token of message.tokens || NONE) run.plain.push(token);
    if (message.type === 'end') {
      run.stats = message.stats || null; run.compare = message.compare || null; run.reason = message.reason || '';
      if (size()) announce.textContent = spoken(size() - 1) + '. ' + (WORDS.reasons[run.reason] || '');
    }
    if (message.type === 'error') notes.complain(message.error && message.error.message || '');
    notes.status(message.status);
    schedule();
  }

  // ---- once per animation frame, however many messages came
  function schedule() { if (!view.pending) { view.pending = true; requestAnimationFrame(flush); } }
  function flush() {
    view.pending = false;
    const atEnd = strip.flush();
    if (run.reason === 'eos') strip.markEnd();
    if (view.live) follow(atEnd); else player.draw();
    heads.draw(); notes.draw();
    if (shownView === 'tokens') inspector.draw();
    charts.draw(); charts.drawTable();
    drawView();
  }

  // ---- views: what stands in the stage. Each is built when it is first opened and drawn only while it is shown.
  const built = new Map([['tokens', {node: main}]]);
  let shownView = 'tokens';
  function drawView() { const now = built.get(shownView); if (now.draw) now.draw(); }
  function openView(name) {
    const kind = host.views.find(one => one.name === name);
    if (name !== 'tokens' && !kind) return;
    const old = built.get(shownView);
    if (name !== shownView && old.leave) old.leave();
    if (!built.has(name)) { const made = kind.mount(host); built.set(name, made); stage.append(made.node); }
    shownView = name;
    root.dataset.view = name;
    for (const [key, one] of built) one.node.hidden = key !== name;
    player.node.hidden = !!kind && kind.controls === false;
    chartRow.hidden = !!kind && kind.charts === false;
    for (const tab of viewBar.children) {
      const isOn = tab.dataset.view === name;
      set(tab, {'aria-selected': isOn, tabindex: isOn ? 0 : -1});
    }
    if (name === 'tokens') drawTokens();
    drawView();
    charts.rest();
    tell('view');
    const chosen = viewBar.querySelector('[aria-selected=true]');       // on a phone the bar scrolls
    if (viewBar.scrollWidth > viewBar.clientWidth) viewBar.scrollLeft = chosen.offsetLeft - viewBar.offsetLeft - 24;
  }
  const tabNames = [{name: 'tokens', title: WORDS.views.tokens}, ...host.views];
  for (const {name, title} of tabNames) {
    const tab = set(el('button', 'sv-tab', title), {type: 'button', role: 'tab', 'data-view': name, 'aria-selected': name === 'tokens',
        tabindex: name === 'tokens' ? 0 : -1});
    tab.onclick = () => openView(name);
    viewBar.append(tab);
  }
  viewBar.addEventListener('keydown', event => {      // one stop for Tab, arrows among the views
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], at = tabNames.findIndex(one => one.name === shownView);
    if (!by) return;
    event.preventDefault(); event.stopPropagation();
    const to = (at + by + tabNames.length) % tabNames.length;
    openView(tabNames[to].name);
    viewBar.children[to].focus();
  });
  viewBar.hidden = !host.views.length;
  root.dataset.view = 'tokens';

  // ---- moving through the steps: all sizes are read first or last, never between two writes
  function select(i, node, isQuiet) {
    Object.assign(view, {at: i, node: node === undefined ? null : node, isQuiet: !!isQuiet});
    player.draw();
  }
  function drawTokens() {     // text and inspector, only where they are seen; the Tokens view catches up when it is opened again
    if (shownView !== 'tokens') return;
    if (size() && view.at >= 0) { strip.select(view.at, view.isQuiet); strip.dim(view.live ? null : view.at); }
    inspector.draw();
    if (!view.live && !view.isQuiet) strip.reveal(view.at);
  }

  function follow(scroll) {   // live: the newest step, nothing dimmed
    view.live = true;
    view.phase = PHASES.length - 1;
    root.classList.remove('replay');
    if (size()) select(size() - 1, view.at === size() - 1 ? view.node : null); else player.draw();
    drawTokens();
    if (scroll !== false) strip.toEnd();
    charts.draw();
    if (scroll === undefined) drawView();
  }

  function visit(i, keepPlaying, node) {
    if (!size()) return;
    if (!keepPlaying) player.pause();
    i = max(0, min(size() - 1, i));
    view.live = false;
    view.phase = PHASES.length - 1;
    root.classList.add('replay');
    select(i, node);
    drawTokens();
    charts.draw();
    drawView();
    if (!keepPlaying) announce.textContent = spoken(i);
    tell('move');
  }

  function pick(i, node) {    // chosen by pointer: the page around may want to know
    if (i === undefined) return;
    visit(i, false, node);
    sheet(true);
    if (options.onPick) options.onPick(i);
  }

  function choose(node) {     // a token of the step in view: an index of its nodes, 'end' for what stands behind the drafts, null for none
    if (!run.steps[view.at]) return;
    view.node = node;
    view.isQuiet = view.live && node === null;
    drawTokens();
    drawView();
    tell('move');
  }

  // Within a step: draft, verify, judge, emit. Past either end is the neighbouring step.
  function setPhase(phase) {
    if (!size()) return;
    player.pause();
    const at = view.at + (phase < 0 ? -1 : phase >= PHASES.length ? 1 : 0);
    if (at < 0 || at >= size()) return;
    const node = at === view.at ? view.node : null;
    if (at !== view.at || view.live) visit(at, false, node);
    view.phase = phase < 0 ? PHASES.length - 1 : phase % PHASES.length;
    drawView();
    announce.textContent = spoken(view.at, true);
    tell('move');
  }

  function spoken(i, withPhase) {
    const step = run.steps[i], end = closing(step);
    if (withPhase && view.phase < PHASES.length - 1) return say(WORDS.stepTitle, {i: run.rows.decode[i]}) + ': ' + phaseText(step, run,
        view.phase);
    return (isPrefill(step) ? WORDS.saidPrompt : say(WORDS.said,
        {i: run.rows.decode[i], accepted: numAccepted(step), drafted: numDrafted(step)})) +
      (end && shown(end.text) ? say(WORDS.saidThen, {origin: WORDS.origins[end.origin], text: shown(end.text)}) : '');
  }

  // On a narrow screen the inspector is a sheet at the bottom, in the top layer, where no container can clip it.
  function isNarrow() { return getComputedStyle(inspector.node).getPropertyValue('--sv-sheet').trim() === '1'; }
  function sheet(open) {
    const node = inspector.node, isSheet = node.hasAttribute('popover');
    if (open && shownView === 'tokens' && isNarrow() && node.showPopover) {
      if (!isSheet) { node.setAttribute('popover', 'manual'); node.showPopover(); }
    } else if (!open && isSheet) node.removeAttribute('popover');
  }
  new ResizeObserver(() => { if (!isNarrow()) sheet(false); }).observe(root);

  // ---- keyboard and pointer
  const keys = {ArrowLeft: () => visit(view.at - 1), ArrowRight: () => visit(view.at + 1), Home: () => visit(0),
      End: () => visit(size() - 1),
    ' ': () => player.toggle(), Enter: () => { sheet(true); inspector.node.focus(); },
    Escape() {
      if (host.hint) { const {info} = host.hint; host.hint.close(); info.focus(); }
      else if (inspector.node.hasAttribute('popover')) sheet(false);
      else { player.pause(); follow(); }
    }};
  const phaseKeys = {ArrowUp: () => setPhase(view.phase - 1), ArrowDown: () => setPhase(view.phase + 1)};
  root.addEventListener('keydown', event => {
    const tag = event.target.tagName, {key} = event;
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || tag === 'SELECT' || tag === 'TEXTAREA'
        || tag === 'INPUT' && event.target !== player.scrubber) return;
    if (event.target === player.scrubber && key.startsWith('Arrow') || tag === 'BUTTON' && (key === ' ' || key === 'Enter')) return;
    const action = keys[key] || (built.get(shownView).phases ? phaseKeys[key] : null);
    if (action) { event.preventDefault(); action(); }
  });
  root.addEventListener('click', event => { if (host.hint && !event.target.closest('.sv-about')) host.hint.close(); });

  reset(undefined, {});
  for (const extra of EXTRAS) extra(host);
  root.dataset.ready = '1';
  return {
    take: stream.take, visit, follow, choose, setPhase, open: files.open, openView, host,
    trace: () => run.file(),
    state: () => ({run: run.id, seq: run.seq, numSteps: size(), numDecode: run.numDecode, numPlain: run.plain.length,
      numTokens: run.numTokens, numAccepted: run.numAccepted, numDrafted: run.numDrafted, numLost: run.numLost, numHeld: stream.numHeld(),
      at: view.at, node: view.node, phase: PHASES[view.phase], live: view.live, playing: view.playing, text: run.text,
          speedUp: run.speedUp(),
      charts: charts.state(), chartDraws: charts.numDraws(), tab: shownView, numSpans: strip.numSpans(), pending: view.pending}),
  };
}
