// The headline figures, each with its formula and source one click away. It knows a run's sums and summary, not its steps.
const FORMULAS_OF = {speed_up: ['speed_up'], tokens_per_step: ['tokens_per_step'], draft_acceptance_rate: ['draft_acceptance_rate',
    'acceptance_rate_alpha'], tokens_per_s: ['tokens_per_s', 'plain_tokens_per_s']};
let numHints = 0;             // for ids, which must differ between all viewers of a page

// A round "i" that opens a small box with formulas (entries of metrics.FORMULAS by name) and notes; one of a viewer is open at a time.
function makeHint(host, label, names, more) {
  const about = box('sv-about'), info = el('button', 'sv-info', 'i');
  about.hidden = true; about.id = 'sv-about-' + ++numHints;
  set(info, {type: 'button', 'aria-label': say(WORDS.about, {name: label}), 'aria-expanded': 'false', 'aria-controls': about.id});
  const hint = {info, about, close() { about.hidden = true; set(info, {'aria-expanded': 'false'});
      if (host.hint === hint) host.hint = null; }};
  info.onclick = event => {
    event.stopPropagation();
    const isOpen = !about.hidden;
    if (host.hint) host.hint.close();
    if (isOpen) return;
    host.hint = hint;
    about.replaceChildren(...formulaTexts(host, typeof names === 'function' ? names() : names), ...(more ? more() : NONE));
    if (!about.childNodes.length) about.append(el('p', null, label));
    about.hidden = false;
    set(info, {'aria-expanded': 'true'});
  };
  return hint;
}
function formulaTexts(host, names) {
  return names.flatMap(name => {
    const entry = Object.hasOwn(host.formulas(), name) && host.formulas()[name];
    return entry ? [el('strong', null, entry.label || name), el('p', 'sv-formula', entry.formula), entry.note && el('p', null, entry.note),
        entry.source && el('p', 'sv-quiet', WORDS.source + ': ' + entry.source)].filter(Boolean) : NONE;
  });
}

function makeHeads(host) {
  const heads = {}, node = el('div', 'sv-heads'), unit = text => el('small', null, text);
  for (const name in WORDS.heads) {
    const value = el('span', 'sv-head-value sv-num', WORDS.dash), sub = el('span', 'sv-head-sub'), words = WORDS.heads[name],
        hint = makeHint(host, words.label, FORMULAS_OF[name]),
        head = box('sv-head', box('sv-head-label', el('span', null, words.label), hint.info), value, sub, hint.about);
    head.dataset.name = name;
    heads[name] = {head, value, sub};
    node.append(head);
  }
  const put = (name, value, sub, mood) => {
    heads[name].value.replaceChildren(...[].concat(value));
    heads[name].sub.textContent = sub;
    heads[name].head.dataset.mood = mood || '';
  };

  function draw() {
    const {run} = host, {stats} = run, words = WORDS.heads;
    const pick = (name, running) => stats && name in stats ? stats[name] : running;       // the run's own summary where it is there
    const gain = run.speedUp() || {}, value = pick('speed_up', gain.value), n = pick('num_compared_tokens', gain.tokens);
    if (pick('shared', run.isShared)) put('speed_up', WORDS.dash, say(words.speed_up.shared, {n: run.mostAtOnce}));
    else if (pick('disturbed', run.disturbed)) put('speed_up', WORDS.dash, say(words.speed_up.disturbed,
        {what: pick('disturbed', run.disturbed)}));
    else if (finite(value)) put('speed_up', [value.toFixed(2), unit('×')],
        say(value < 1 ? words.speed_up.slower : words.speed_up.over, {n}), value < 1 ? 'loss' : 'gain');
    else put('speed_up', WORDS.dash, words.speed_up.wait);
    const perStep = pick('tokens_per_step', run.numDecode ? run.decodeTokens / run.numDecode : null);
    put('tokens_per_step', finite(perStep) ? perStep.toFixed(2) : WORDS.dash, finite(perStep)
        ? say(words.tokens_per_step.sub, {tokens: run.decodeTokens, steps: run.numDecode}) : '');
    const drafted = pick('num_draft_tokens', run.numDrafted), accepted = pick('num_accepted_draft_tokens', run.numAccepted);
    if (drafted) put('draft_acceptance_rate', [(accepted / drafted * 100).toFixed(0), unit('%')],
        say(run.isTree ? words.draft_acceptance_rate.tree : words.draft_acceptance_rate.sub, {accepted, drafted}));
    else put('draft_acceptance_rate', WORDS.dash, run.numDecode ? words.draft_acceptance_rate.none : '');
    const fast = pick('tokens_per_s', run.rate()), slow = pick('plain_tokens_per_s', run.plainRate());
    put('tokens_per_s', finite(fast) ? rate(fast) : WORDS.dash, finite(slow) ? say(words.tokens_per_s.plain, {n: rate(slow)})
        : words.tokens_per_s.wait);
  }
  return {node, draw};
}
