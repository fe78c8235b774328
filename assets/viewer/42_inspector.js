// One step in small, beside the text: its times, its drafts as decisions, its outcome. It knows one step; the Why view has the rest.
function makeInspector(host) {
  const node = set(el('section', 'sv-inspector'), {tabindex: -1, 'aria-label': WORDS.inspectorLabel});
  let shownStep = null, shownKey = '', rows = null, tab = 'outcome';

  function head(step, i) {
    const drafted = numDrafted(step), said = drafted ? [say(WORDS.verdictOf, {accepted: numAccepted(step), drafted})] : [];
    if (step.num_rows > 1) said.push(step.num_rows === 2 ? WORDS.sharedOne : say(WORDS.shared, {n: step.num_rows - 1}));
    if (step.disturbed) said.push(say(WORDS.disturbed, {what: step.disturbed}));
    const source = host.run.meta.remote && (step.source || 'exact') === 'exact' ? WORDS.counted : WORDS[step.source];
    if (source) said.push(source);
    const why = set(el('button', 'sv-link', WORDS.openWhy), {type: 'button'}), close = host.button('sv-icon sv-sheet-close', WORDS.close,
        () => host.sheet(false), 'close');
    why.onclick = () => { host.sheet(false); host.openView('why'); };
    return box('sv-inspect-head', el('h3', null, titleOf(step, i)), el('span', 'sv-quiet', said.join(' · ')), why, close);
  }

  function draw(force) {      // the scroll position is read before anything is written: one layout per seek
    const {run, view} = host, step = run.steps[view.at], key = [view.node, tab, run.reason, run.steps.length === view.at + 1].join();
    if (!force && step === shownStep && key === shownKey) return;
    if (!step) { shownStep = null; node.replaceChildren(el('p', 'sv-empty', WORDS.emptyStep)); return; }
    const scroll = rows && step === shownStep ? rows.scrollTop : 0, focused = node.contains(document.activeElement)
        ? document.activeElement.dataset : null;
    shownStep = step; shownKey = key;
    rows = decisionList(step, run);
    if (view.node !== null) { const chosen = rows.querySelector('[data-node="' + view.node + '"]');
        if (chosen) chosen.classList.add('is-chosen'); }
    const tabs = set(el('div', 'sv-tabs'), {role: 'tablist'});
    for (const name of ['outcome', 'top', 'cache']) {
      const one = set(el('button', 'sv-tab', WORDS.tabs[name]), {type: 'button', 'data-tab': name, role: 'tab',
          'aria-selected': name === tab});
      one.onclick = () => { tab = name; draw(); };
      tabs.append(one);
    }
    const panel = set(panels[tab](step, run, typeof view.node === 'number' ? view.node : null), {role: 'tabpanel'});
    node.replaceChildren(head(step, run.rows.decode[view.at]), timeBar(step), rows, tabs, panel);
    if (scroll) rows.scrollTop = scroll;
    const again = focused && (focused.tab ? '[data-tab="' + focused.tab + '"]' : focused.node ? '[data-node="' + focused.node + '"]' : '');
    if (again) { const place = node.querySelector(again); if (place) place.focus({preventScroll: true}); }
  }

  node.addEventListener('click', event => {
    const row = event.target.closest('button.sv-row');
    if (!row) return;
    tab = 'top';
    row.focus({preventScroll: true});
    host.choose(+row.dataset.node);
  });
  return {node, draw, show(name) { tab = name; draw(); }};
}
