// The Exactness view: is this run's text the target's, token by token; and a proof by drawing that the rule keeps the target's law.
WORDS.exact = {title: 'Exactness', label: 'Is it the target’s text?', head: 'Is it the target’s text?',
  yes: 'Yes, token for token', yesSeed: 'Yes: plain sampling’s own text with this seed', soFar: 'Yes, as far as both runs go', no: 'No: it differs from token {n} on',
  tie: 'A rounding tie at token {n}', sampling: 'The same law, not the same letters', lossy: 'No, and it does not claim to be', nothing: 'Nothing to compare with yet', unknown: 'Cannot be told',
  yesWhy: '{n} of {of} tokens are the same as in plain decoding on the same engine. Drafts changed the time, not the text.',
  soFarWhy: 'All {n} tokens that both runs have are the same; plain decoding was measured for {plain} tokens of {all}.',
  noWhy: 'There the target’s two best tokens were {margin} apart in log-probability: more than rounding. Please report the trace.',
  tieWhy: 'There the target’s two best tokens were {margin} apart in log-probability: so close that rounding decides. Neither text is the better one.',
  samplingWhy: 'Rejection sampling promises the target’s distribution. Two draws from one distribution are seldom equal, so comparing this text with another one shows nothing. What can be shown is the law: see the proof below. With “Shared noise” the text itself would be plain sampling’s own.',
  lossyWhy: 'Typical acceptance takes any token that is likely enough. The text follows neither model’s distribution; “Break it” shows by how much on a small example.',
  nothingWhy: 'Plain decoding was not measured for this run. Switch on “Measure plain decoding too” and ask again.', measuringWhy: 'Plain decoding is being measured: {n} tokens so far.',
  unknownWhy: 'This engine does not tell the ids of its tokens.', closest: 'The closest call: token {n}, “{text}”, ahead of the next best by {margin} in log-probability.',
  window: 'tokens {a} to {b} of {n}', go: 'Show the difference', pick: 'A click on a token shows its step.',
  prove: 'Prove it', proveHead: 'Prove it: does the rule keep the target’s law?',
  proveIntro: 'A target of eight words, known exactly, and a drafter that is often wrong. The engine’s own verifier writes thousands of texts of two words; the meter compares how often each came with how often it should.',
  rule: 'Verification', shape: 'Drafts', number: 'Texts', rules: {rejection: 'Rejection sampling', block: 'Block verification', 'shared-noise': 'Shared noise'},
  shapes: {chain: 'a chain, drawn', chosen: 'a chain, the most probable', siblings: 'two siblings, drawn', tree: 'a tree, the three most probable'},
  formulasTitle: 'Formulas', formulas: [['χ² = Σ (drawn − expected)² / expected', 'over the 64 texts; Pearson 1900'],
    ['p-value = Q(f/2, χ²/2)', 'the chance that honest draws give at least this χ²; f = 63 degrees of freedom, Q the regularised incomplete gamma function'],
    ['distance = ½ Σ |share drawn − probability|', 'total variation; draws alone leave a few per cent, which shrink with their number'],
    ['accept x with min(1, p(x)/q(x)), else draw from max(0, p − q)', 'the rule under test; Leviathan et al. 2023, arXiv 2211.17192']],
  limitsTitle: 'What this shows, and what it does not',
  limits: ['Drawing shows that this very verifier keeps the target’s law on this model as far as that many texts can tell. It cannot rule out a distortion smaller than chance.',
    'The fractions rule it out for this model: every way that the dice can fall is taken once, with its exact weight.',
    'Neither speaks of a large model’s arithmetic, of caches and of kernels. That is what the comparison token by token above is for.']};

VIEWS.push({name: 'exact', title: WORDS.exact.title, controls: false, charts: false, mount(host) {
  const words = WORDS.exact, node = set(el('section', 'sv-exact'), {'aria-label': words.label}), top = el('div', 'sv-same'), desk = makeDesk(host), SHOWN = 400;
  let drawnFor = '';

  function answer() {         // [mood, head, why, index or null]
    const {run} = host, compare = run.compare || {}, ours = run.steps.flatMap(emittedOf), plain = run.plain, both = min(ours.length, plain.length);
    const config = run.meta.config || {}, greedy = host.size() > 0 && run.isGreedy(host.shownStep() || run.steps[host.size() - 1]), promise = run.meta.promise;
    if (compare.mode === 'lossy' || config.lossless === false && !greedy) return ['off', words.lossy, words.lossyWhy, null];
    if (compare.mode === 'sampling' || compare.mode === undefined && !greedy && promise !== 'text' && host.size()) return ['other', words.sampling, words.samplingWhy, null];
    if (!both) return ['wait', words.nothing, run.plain.length ? say(words.measuringWhy, {n: plain.length}) : words.nothingWhy, null];
    const first = (list, test) => { const at = list.findIndex(test); return at < 0 ? null : at; };
    if (ours.slice(0, both).some(token => token.id === null)) return ['wait', words.unknown, words.unknownWhy, null];
    const index = first(ours.slice(0, both), (token, i) => token.id !== plain[i].id), margin = finite(compare.margin) ? compare.margin.toPrecision(2) : WORDS.dash;
    if (index !== null) return compare.tie ? ['other', say(words.tie, {n: index + 1}), say(words.tieWhy, {margin}), index]
        : ['off', say(words.no, {n: index + 1}), compare.mode ? say(words.noWhy, {margin}) : '', index];
    if (ours.length !== plain.length) return ['good', words.soFar, say(words.soFarWhy, {n: both, plain: plain.length, all: ours.length}), null];
    return ['good', compare.mode === 'shared-noise' ? words.yesSeed : words.yes, say(words.yesWhy, {n: both, of: ours.length}), null];
  }

  function drawTop() {
    const {run} = host, [mood, head, why, index] = answer(), key = [run.id, mood, head, why, run.numTokens, run.plain.length].join('\n');
    if (key === drawnFor) return;
    drawnFor = key;
    const parts = [box('sv-same-head is-' + mood, el('strong', null, head), el('span', null, why))];
    const ours = run.steps.flatMap((step, i) => emittedOf(step).map(token => ({token, i}))), both = min(ours.length, run.plain.length);
    if (both && (mood === 'good' || index !== null)) {
      const total = max(ours.length, run.plain.length), from = index === null ? 0 : max(0, index - SHOWN / 2), to = min(index === null ? both : total, from + SHOWN);
      const flat = text => ({text: text.replace(/\n/g, '⏎')}), pairs = [];
      for (let at = from; at < to; at++) {
        const mine = ours[at], other = run.plain[at], text = mine ? mine.token.text : other.text;
        pairs.push([mine && fill(el('span', 'sv-tok is-' + mine.token.origin), flat(mine.token.text), run.isEnd(mine.token)),
          other && fill(el('span', 'sv-tok'), flat(other.text), other.text === '' && at === run.plain.length - 1 && run.reason === 'eos'), text.includes('\n')]);
      }
      const texts = set(alignedTexts(pairs, from, index, at => { if (ours[at]) { host.openView('tokens'); host.pick(ours[at].i); } }), {tabindex: 0, role: 'group',
          'aria-label': words.head});
      const close = run.plain.reduce((best, token, i) => i < both && finite(token.margin) && (best < 0 || token.margin < run.plain[best].margin) ? i : best, -1);
      parts.push(el('p', 'sv-quiet sv-same-legend', [WORDS.museum.upper, WORDS.museum.lower, ...to - from < total ? [say(words.window, {a: from + 1, b: to, n: total})] : NONE,
        words.pick].join(' · ')), texts);
      if (close >= 0) parts.push(el('p', 'sv-quiet', say(words.closest, {n: close + 1, text: shown(run.plain[close].text) || '␣', margin: run.plain[close].margin.toPrecision(2)})));
    }
    top.replaceChildren(...parts);
    const first = top.querySelector('.is-first'), texts = top.querySelector('.sv-aligned');
    if (first) texts.scrollTop = first.offsetTop - texts.offsetTop - texts.clientHeight / 2;
  }

  node.append(el('h3', null, words.head), top);
  if (desk.canRun || host.fetch) {
    const choice = (name, options, value) => { const list = el('select', 'sv-speed'); for (const key in options) list.append(set(el('option', null, options[key]), {value: key}));
      list.value = value; return [list, el('label', 'sv-field', el('span', 'sv-quiet', name), list)]; };
    const [rule, ruleField] = choice(words.rule, words.rules, 'rejection'), [shape, shapeField] = choice(words.shape, words.shapes, 'chain'),
        [number, numberField] = choice(words.number, {3000: '3,000', 6000: '6,000', 20000: '20,000'}, '6000');
    const go = host.button('sv-primary', words.prove, prove), note = set(el('span', 'sv-quiet sv-run-note'), {role: 'status'}), result = el('div', 'sv-result-box');
    numberField.hidden = go.hidden = !desk.canRun;
    const list = rows => el('ul', 'sv-plain-list', ...rows);
    node.append(box('sv-prove', el('h3', null, words.proveHead), el('p', 'sv-lead', words.proveIntro), box('sv-prove-bar', ruleField, shapeField, numberField, go, note), result,
        box('sv-two', box('sv-note-card', el('h4', null, words.limitsTitle), list(words.limits.map(text => el('li', null, text)))),
            box('sv-note-card', el('h4', null, words.formulasTitle), list(words.formulas.map(([formula, text]) => el('li', null, el('code', null, formula), ' ', text)))))));
    const show = state => result.replaceChildren(meterPicture(state), lawPicture(state), exactNote(state));
    function recorded() {
      desk.stop(); go.disabled = false;
      const asked = rule.value + ' ' + shape.value;
      desk.recorded(asked).then(state => {
        if (asked !== rule.value + ' ' + shape.value || go.disabled) return;
        if (state) { show(state); note.textContent = desk.canRun ? WORDS.museum.recorded : WORDS.museum.noServer; } else { result.replaceChildren(); note.textContent = ''; }
      }, error => { note.textContent = say(WORDS.museum.failed, {why: error.message}); });
    }
    function prove() {
      go.disabled = true;
      note.textContent = WORDS.museum.starting;
      desk.run({rule: rule.value, shape: shape.value, num_texts: +number.value, seed: floor(Math.random() * 2147483647)}, ({state, note: text, error, done}) => {
        if (state) show(state);
        note.textContent = error ? say(WORDS.museum.failed, {why: error}) : done ? WORDS.museum.live : text;
        if (done) { go.disabled = false; if (state) host.announce(greenOf(state) ? WORDS.museum.fits : WORDS.museum.off); }
      });
    }
    for (const option of shape.options) option.dataset.name = option.value;
    rule.onchange = () => {     // block verification is one for chains: a tree would be judged by rejection
      for (const option of shape.options) option.disabled = rule.value === 'block' && !['chain', 'chosen'].includes(option.value);
      if (shape.selectedOptions[0].disabled) shape.value = 'chain';
      recorded();
    };
    shape.onchange = recorded;
    recorded();
  }
  return {node, draw: drawTop, leave() { desk.stop(); }};
}});
