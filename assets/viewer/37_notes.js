// What must be said about a run: its state, its configuration as the engine read it back, warnings, and whether it equals plain decoding.
function makeNotes(host) {
  const dot = el('span', 'sv-dot'), statusText = el('span', 'sv-status-text', WORDS.noRun), config = el('span', 'sv-config'),
      badge = el('div', 'sv-badge'), notes = el('div', 'sv-notes'), problem = set(box('sv-problem'), {role: 'alert'});
  badge.hidden = problem.hidden = true;

  function status(text) {
    if (typeof text !== 'string' || !text) return;
    const state = (/^[a-z]+/i.exec(text) || [''])[0].toLowerCase();
    dot.className = 'sv-dot is-' + (['active', 'off', 'paused', 'waiting', 'error', 'recorded'].includes(state) ? state : 'other');
    statusText.textContent = text;
  }

  function complain(text) { problem.textContent = text; problem.hidden = !text; }

  function warnings(run) {
    const meta = run.meta, texts = [];
    if (run.note) texts.push(run.note);
    if (run.stats && 'repeating' in run.stats ? run.stats.repeating : run.isRepeating) texts.push(WORDS.repeating);
    if (run.isShared) texts.push(say(WORDS.sharedNote, {n: run.mostAtOnce}));
    const disturbed = run.stats && run.stats.disturbed || run.disturbed;
    if (disturbed) texts.push(say(WORDS.disturbedNote, {what: disturbed}));
    if (meta.config && meta.config.lossless === false) texts.push(WORDS.lossy);
    if (isObject(meta.requested) && Object.keys(meta.requested).length) {
      const list = source => Object.keys(meta.requested).map(key => key + '=' + source[key]).join(', ');
      if (list(meta.requested) !== list(meta.config || {})) texts.push(say(WORDS.requested,
          {a: list(meta.requested), b: list(meta.config || {})}));
    }
    if (meta.dropped_nodes) texts.push(say(WORDS.dropped, {n: meta.dropped_nodes}));
    if (run.numLost) texts.push(say(WORDS.lost, {n: run.numLost}));
    return texts;
  }

  function configOf(meta) {   // read back from the engine, never from the form
    const own = isObject(meta.config) ? meta.config : {}, name = x => isObject(x) ? x.name || x.label || x.id : x;
    const parts = [name(meta.target), meta.drafter && '+ ' + name(meta.drafter), name(meta.method), finite(own.k) && 'K=' + own.k,
        own.tree && 'tree ' + name(own.tree), own.dtype, own.quantization, own.device,
        own.threads && own.threads + (own.threads === 1 ? ' thread' : ' threads')];
    return parts.filter(part => part && (typeof part === 'string' || finite(part))).join(' · ');
  }

  function badgeOf(run) {
    const {compare} = run;
    if (!compare) return run.plain.length && !run.reason && run.steps.length ? ['wait', say(WORDS.measuring, {n: run.plain.length})] : null;
    if (compare.mode === 'lossy') return ['lossy', WORDS.lossy];
    if (compare.mode === 'sampling') return ['neutral', WORDS.sampling];
    const {tokens, of} = compare, draws = compare.mode === 'shared-noise';
    if (!draws && compare.mode !== 'greedy' || compare.identical === null || !of) return null;
    if (compare.identical) return compare.partial ? ['same', say(WORDS.partial, {tokens, of})]
        : ['same', say(draws ? WORDS.sameDraws : WORDS.identical, {tokens, of})];
    const quote = token => token && typeof token.text === 'string' ? shown(token.text) || '␣' : WORDS.dash,
        margin = finite(compare.margin) ? compare.margin.toPrecision(2) : WORDS.dash;
    const values = {n: finite(compare.index) ? compare.index + 1 : WORDS.dash, a: quote(compare.speculative), b: quote(compare.plain),
        margin};
    if (draws) return [compare.tie ? 'neutral' : 'differs', say(compare.tie ? WORDS.tie : WORDS.drawsDiffer, values),
        say(WORDS.drawsWhy, values) + (compare.tie ? WORDS.within : WORDS.beyond)];
    return compare.tie ? ['neutral', say(WORDS.tie, values), say(WORDS.tieWhy, values)]
        : ['differs', say(WORDS.differs, values), say(WORDS.differsWhy, values)];
  }

  function draw() {
    const {run} = host, texts = warnings(run), key = texts.join('\n'), found = badgeOf(run);
    if (key !== notes.dataset.key) { notes.dataset.key = key; notes.replaceChildren(...texts.map(text => el('p', 'sv-note', text))); }
    config.textContent = configOf(run.meta);
    badge.hidden = !found;
    if (!found) return;
    badge.className = 'sv-badge is-' + found[0];
    badge.replaceChildren(el('strong', null, found[1]));
    if (found[2]) badge.append(el('small', null, found[2]));
  }
  const top = box('sv-top', box('sv-status', dot, box('sv-status-lines', statusText, config)), badge);
  return {top, notes, problem, status, complain, draw};
}
