// The view What if: another draft length, cheaper drafts, cheaper verification, worked out from the recorded steps.
WORDS.what_if = {
  title: 'What if', lead: 'Worked out from the recorded steps; nothing is run again.',
  sliders: {depth: 'draft length K', treeDepth: 'depth of the draft tree', draft: 'cost of drafting', verify: 'extra cost of verifying many tokens'},
  depths: {none: 'no drafts', own: '{n}, as recorded', other: '{n}'}, times: {none: 'free', own: 'as recorded', other: '× {n}'},
  presets: {two: 'K were 2?', half: 'the draft cost half?', free: 'verification were free?', best: 'K were the best one?', reset: 'as recorded'},
  presetsLabel: 'What if …', tokens: 'tokens per step', speedUp: 'speed-up', tags: {exact: 'exact', bounds: 'bounds', estimate: 'estimate', measured: 'measured'},
  between: 'between {a} and {b}', exactWhy: 'Follows from the recorded guesses.', plainWhy: 'Plain decoding: one token per step.',
  boundsWhy: 'Some guesses after wholly accepted drafts were never asked for; this is in between.',
  estimateWhy: 'The guesses of this run depend on more than the text, or were drawn by chance.',
  was: 'measured in this run: {n}×', wasNot: 'not measured in this run', asIs: 'the same estimate for the run as it was: {n}×',
  best: 'Best for this run: K = {n}, about {s}×.', bestTree: 'Best for this run: depth {n}, about {s}×.', bestNone: 'Best for this run: no drafts at all. Every draft length loses, at these costs.',
  noTimes: 'Times are missing (no plain run, or steps shared with other answers), so only tokens per step can be said.',
  costs: {measured: 'Cost of verifying: from the table measured on that machine.', steps: 'Cost of verifying: estimated from this run’s own steps.'},
  none: 'Nothing was drafted in this run, so there is nothing to change.', chartLabel: 'speed-up by draft length',
};

VIEWS.push({name: 'what_if', title: WORDS.what_if.title, controls: false, charts: false, mount(host) {
  const words = WORDS.what_if, chosen = {depth: null, draft: 1, verify: 1};       // depth null: as recorded
  let known = null, deepest = 8;

  const slider = (name, step) => {
    const input = set(el('input', 'sv-range'), {type: 'range', min: 0, max: 2, step, value: 1}), label = el('span'), value = el('b', 'sv-num');
    input.oninput = () => { chosen[name] = +input.value; draw(); };
    return {input, label, value, node: el('label', 'sv-slide', box('sv-slide-head', label, value), input)};
  };
  const sliders = {depth: slider('depth', 1), draft: slider('draft', 0.05), verify: slider('verify', 0.05)};
  sliders.draft.label.textContent = words.sliders.draft;
  sliders.verify.label.textContent = words.sliders.verify;
  const presets = box('sv-presets', el('span', 'sv-quiet', words.presetsLabel)), goals = {two: () => ({depth: min(2, deepest), draft: 1, verify: 1}),
    half: () => ({depth: null, draft: 0.5, verify: 1}), free: () => ({depth: null, draft: 1, verify: 0}),
    best: () => ({...chosen, depth: (known.best(deepest, chosen.draft, chosen.verify) || {depth: null}).depth}), reset: () => ({depth: null, draft: 1, verify: 1})};
  for (const name in goals) {
    const chip = host.button('sv-chip-btn', words.presets[name], () => { Object.assign(chosen, goals[name]()); draw(); });
    chip.dataset.preset = name;
    presets.append(chip);
  }

  const figure = (name, formulas) => {
    const value = el('span', 'sv-head-value sv-num', WORDS.dash), tag = el('span', 'sv-tag'), sub = el('span', 'sv-head-sub'), hint = makeHint(host, words[name], formulas),
        node = box('sv-head', box('sv-head-label', el('span', null, words[name]), hint.info, tag), value, sub, hint.about);
    node.dataset.name = 'what_if_' + name;
    return {value, tag, sub, node};
  };
  const tokens = figure('tokens', ['what_if_tokens']), gain = figure('speedUp', ['what_if_speed_up', 'speed_up']);
  const best = el('p', 'sv-best'), basis = el('p', 'sv-quiet'), row = box('sv-charts sv-one'), none = el('p', 'sv-note', words.none);
  const body = box('sv-what-if', box('sv-what-left', presets, sliders.depth.node, sliders.draft.node, sliders.verify.node,
      box('sv-heads sv-two', tokens.node, gain.node), best, basis), row);

  function mark(place, name) { place.tag.textContent = words.tags[name] || ''; place.tag.className = 'sv-tag is-' + name; }

  function draw() {
    known = recordedOf(host.run);
    none.hidden = known.depth > 0; body.hidden = !known.depth;
    if (!known.depth) return;
    deepest = known.isTree ? known.depth : min(24, max(8, 2 * known.depth));
    if (chosen.depth !== null && chosen.depth > deepest) chosen.depth = null;
    const depth = chosen.depth === null ? known.depth : chosen.depth, {draft, verify} = chosen, now = known.outcome(depth, draft, verify), as = known.outcome(known.depth);
    sliders.depth.label.textContent = known.isTree ? words.sliders.treeDepth : words.sliders.depth;
    sliders.depth.input.max = deepest; sliders.depth.input.value = depth;
    sliders.depth.value.textContent = say(words.depths[depth === 0 ? 'none' : depth === known.depth ? 'own' : 'other'], {n: depth});
    for (const name of ['draft', 'verify']) {
      sliders[name].input.value = chosen[name];
      sliders[name].value.textContent = say(words.times[chosen[name] === 0 ? 'none' : chosen[name] === 1 ? 'own' : 'other'], {n: chosen[name].toFixed(2)});
    }
    for (const name in sliders) sliders[name].input.style.setProperty('--sv-done', sliders[name].input.value / sliders[name].input.max * 100 + '%');
    tokens.value.textContent = now.tokensPerStep.toFixed(2);
    const kind = now.exact ? 'exact' : now.least !== null ? 'bounds' : 'estimate';
    mark(tokens, kind);
    tokens.sub.textContent = depth === 0 ? words.plainWhy : kind === 'bounds' ? say(words.between, {a: now.least.toFixed(2), b: now.most.toFixed(2)})
        : kind === 'exact' ? words.exactWhy : words.estimateWhy;
    tokens.node.title = kind === 'bounds' ? words.boundsWhy : '';
    const times = (value, place) => place.replaceChildren(...(finite(value) ? [value.toFixed(2), el('small', null, '×')] : [WORDS.dash]));
    times(now.speedUp, gain.value);
    gain.node.dataset.mood = finite(now.speedUp) && depth ? now.speedUp < 1 ? 'loss' : 'gain' : '';
    mark(gain, finite(now.speedUp) ? 'estimate' : '');
    const measured = host.run.stats ? host.run.stats.speed_up : (host.run.speedUp() || {}).value;
    gain.sub.textContent = finite(measured) ? say(words.was, {n: measured.toFixed(2)}) : words.wasNot;
    const top = known.best(deepest, draft, verify);
    best.textContent = !top ? words.noTimes : top.depth ? say(known.isTree ? words.bestTree : words.best, {n: top.depth, s: top.speedUp.toFixed(2)}) : words.bestNone;
    basis.textContent = known.costs ? words.costs[known.costs] + (finite(as.speedUp) ? ' ' + say(words.asIs, {n: as.speedUp.toFixed(2)}).replace(/^./, c => c.toUpperCase()) + '.' : '') : '';
    presets.querySelector('[data-preset=two]').hidden = known.isTree && known.depth < 3;
    state = {depth, draft, verify, measured, top};
    plots.draw();
  }

  let state = {};
  function series(name) {
    if (!known || !known.points.length) return null;
    const x = Array.from({length: deepest + 1}, (_, i) => i), curve = (...factors) => ({x, y: x.map(depth => known.outcome(depth, ...factors).speedUp)});
    if (name === 'as_recorded') return curve();
    if (name === 'with_changes') return curve(state.draft, state.verify);
    if (name === 'measured') return finite(state.measured) ? {x: [known.depth], y: [state.measured]} : {x: [], y: []};
    return name !== 'chosen' ? null : {x: [state.depth], y: [known.outcome(state.depth, state.draft, state.verify).speedUp]};
  }
  const plots = makePlots(host, row, {absent: WORDS.charts.absent, series, formulas: () => ['what_if_speed_up', 'what_if_tokens'], names: figures => 'what_if' in figures ? ['what_if'] : [],
    key: () => [host.run.id, host.size(), host.run.plain.length, JSON.stringify(state)].join(), note: () => known && known.costs ? '' : words.noTimes,
    finish(chart, from, data, layout) {
      const ys = data.flatMap(trace => trace.y), high = max(1.15, ...ys) * 1.12, {top} = state;
      layout.yaxis.range = [0, high];
      layout.xaxis.range = [-0.4, deepest + 0.4];
      layout.xaxis.dtick = max(1, ceil(deepest / 12));
      if (known.isTree) layout.xaxis.title = {...layout.xaxis.title, text: words.sliders.treeDepth};
      layout.annotations = top ? from.layout.annotations.map(one => ({...one, visible: true, x: top.depth, y: top.speedUp, yshift: 8,
          xanchor: top.depth < 2 ? 'left' : top.depth > 0.85 * deepest ? 'right' : 'center', text: one.text.replace('{}', top.depth)})) : [];
    }});
  host.addPlots(plots);
  return {node: box('sv-view', el('p', 'sv-quiet sv-lead', words.lead), none, body), draw};
}});
