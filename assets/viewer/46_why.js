// The Why view: one step as a decision, in full and phase by phase. It knows one step and the text before it; verdicts are the engine's.
WORDS.why = {title: 'Why', label: 'Why each draft was accepted or rejected', listTitle: 'Every draft as a decision',
    detailTitle: 'One decision',
  outcomeTitle: 'What the step adds', maskTitle: 'Who sees whom', cacheTitle: 'Caches, and why drafting stopped',
      formulas: 'the rule of acceptance',
  greedyNote: 'Greedy decoding is the case without chance: p is 1 for the target’s most probable token and 0 for every other, '
      + 'so a draft is accepted exactly if it is that token.',
  tree: 'a tree of {n} nodes', pick: 'Choose a draft to see its numbers.',
      noDecision: 'There is no draft to decide on in this step.',
  maskNote: 'Each row is a token fed to the target in this pass, each filled cell a fed token that it may look at. '
      + 'Every row also sees the {before} tokens in the cache.',
  maskLarge: '{n} tokens were fed, too many for a picture: each sees itself, its ancestors in the tree, and the cache.',
  maskOther: 'This pass fed {fed} tokens; the picture shows the {n} that the record tells.',
      maskPrompt: 'Every prompt token sees itself and all before it: a full triangle of {n} rows.'};
WORDS.mask = {label: 'Ancestor mask: {n} fed tokens, {pairs} pairs that see each other', sees: '“{a}” sees “{b}”'};
Object.assign(WORDS, {phaseBack: 'Phase before', phaseOn: 'Next phase'});
Object.assign(ICONS, {up: 'M10 5 4 13h12z', down: 'M10 15 4 7h12z'});

VIEWS.push({name: 'why', title: WORDS.why.title, mount(host) {
  const words = WORDS.why, node = set(el('section', 'sv-why'), {'aria-label': words.label}), phases = makePhases(host);
  const ribbon = set(el('div', 'sv-ribbon'), {'aria-live': 'off'}), list = el('div', 'sv-why-list'), detail = el('div', 'sv-why-detail'),
      outcome = el('div', 'sv-why-card-body'), mask = el('div', 'sv-why-card-body'), cache = el('div', 'sv-why-card-body');
  const hint = makeHint(host, words.formulas, () => {
    const step = host.shownStep();
    return step ? [ruleOf(step, host.run), 'accept_prob', 'residual'] : NONE;
  }, () => host.shownStep() && host.run.isGreedy(host.shownStep()) ? [el('p', 'sv-greedy-note', words.greedyNote)] : NONE);
  const card = (cls, title, body, extra) => box('sv-why-card ' + cls, box('sv-why-card-head', el('h3', null, title), extra && extra.info),
      extra && extra.about, body);
  node.append(phases.node, ribbon, box('sv-why-body', card('is-list', words.listTitle, list, hint),
      card('is-detail', words.detailTitle, detail)),
      box('sv-why-cards', card('is-outcome', words.outcomeTitle, outcome), card('is-mask', words.maskTitle, mask),
          card('is-cache', words.cacheTitle, cache)));
  list.addEventListener('click', event => {
    const row = event.target.closest('button.sv-row');
    if (row) host.choose(+row.dataset.node);
  });
  let drawn = '', drawnStep = null;

  function contextOf(at) {    // the end of the text before this step
    let text = '';
    for (let i = at - 1; i >= 0 && text.length < 66; i--) text = emittedOf(host.run.steps[i]).map(token => token.text).join('') + text;
    return shownTail(text);
  }
  function shownTail(text) {
    const line = text.replace(/\n/g, '⏎'), tail = Array.from(line).slice(-66).join('');
    return tail.length < line.length ? '…' + tail.trimStart() : tail;
  }

  // two lines hold it all
  const flat = (token, kind, isEnd) => tokenSpan({...token, text: token.text.replace(/\n/g, '⏎')}, kind, isEnd);
  function drawRibbon(step) {
    const {run, view} = host, nodes = nodesOf(step), chain = isChain(step), tokens = [];
    if (view.phase === 3) for (const token of emittedOf(step)) tokens.push(flat(token, token.origin, run.isEnd(token)));
    else if (chain) for (const one of nodes)
      tokens.push(flat(one, view.phase < 2 ? 'unjudged' : one.state === 'accepted' ? 'draft' : one.state));
    else if (view.phase < 2) tokens.push(el('span', 'sv-chip', say(words.tree, {n: numDrafted(step)})));
    else for (const i of acceptedPath(step)) tokens.push(flat(nodes[i], 'draft'));
    ribbon.replaceChildren(el('span', null, el('span', 'sv-ribbon-text', contextOf(view.at)),
        tokens.length > 0 && el('span', 'sv-ribbon-new', ...tokens)));
  }

  function drawDetail(step, chosen) {
    if (chosen === 'end') detail.replaceChildren(panels.outcome(step, host.run));
    else if (typeof chosen === 'number' && chosen >= 0 && nodesOf(step)[chosen]) detail.replaceChildren(decisionDetail(step, chosen,
        host.run));
    else detail.replaceChildren(el('p', 'sv-quiet', nodesOf(step).length ? words.pick : words.noDecision));
  }

  function drawMask(step, chosen) {
    const kv = step.kv && step.kv.target, n = nodesOf(step).length + 1, before = host.run.steps[host.view.at - 1],
        last = before && emittedOf(before).slice(-1)[0];
    if (isPrefill(step)) { mask.replaceChildren(el('p', 'sv-say', say(words.maskPrompt, {n: step.num_prompt_tokens || 0}))); return; }
    if (!nodesOf(step).length && numDrafted(step)) { mask.replaceChildren(el('p', 'sv-quiet', WORDS.unknownNodes)); return; }
    if (n > MOST_ROWS) { mask.replaceChildren(el('p', 'sv-quiet', say(words.maskLarge, {n}))); return; }
    mask.replaceChildren(box('sv-mask-box', maskPicture(step, typeof chosen === 'number' ? chosen : null, last ? last.text : '')),
        el('p', 'sv-quiet', say(words.maskNote, {before: kv ? kv.before : ''}) + (kv
            && kv.fed !== n ? ' ' + say(words.maskOther, {fed: kv.fed, n}) : '')));
  }

  function draw() {
    const {run, view} = host, step = run.steps[view.at];
    phases.draw();
    node.dataset.phase = step ? PHASES[view.phase] : '';
    const key = [run.id, view.at, view.phase, view.node, run.reason, run.steps.length === view.at + 1].join();
    if (step && step === drawnStep && key === drawn) return;
    const scroll = step === drawnStep && list.firstChild ? list.firstChild.scrollTop : 0, focused = list.contains(document.activeElement);
    drawn = key;
    if (!step) { drawnStep = null; for (const place of [ribbon, list, detail, outcome, mask, cache]) place.replaceChildren();
        list.append(el('p', 'sv-quiet', WORDS.emptyStep)); return; }
    const isNew = step !== drawnStep, chosen = view.node !== null ? view.node : view.phase < 2 ? (nodesOf(step).length ? 0 : -1)
        : telling(step);
    drawnStep = step;
    drawRibbon(step);
    const rows = decisionList(step, run), row = rows.querySelector('[data-node="' + chosen + '"]');
    if (row) row.classList.add('is-chosen');
    list.replaceChildren(rows);
    drawDetail(step, chosen);
    drawMask(step, chosen);
    if (isNew) { cache.replaceChildren(timeBar(step), ...panels.cache(step).childNodes); }
    outcome.replaceChildren(...panels.outcome(step, run).childNodes);
    if (scroll) rows.scrollTop = scroll;
    else if (row && isNew && row.offsetTop + row.offsetHeight > rows.clientHeight) rows.scrollTop = row.offsetTop - 60;
    if (focused && row) row.focus({preventScroll: true});
  }
  return {node, draw, phases: true};
}});
