
// ---- one step as a decision: pure functions from a step to DOM ------------------------------------------------------
function part(cls, share) { const node = el('span', cls); node.style.width = (share * 100).toFixed(2) + '%'; return node; }
function bar(kind, value) {
  return el('span', 'sv-track', part('sv-fill is-' + kind, clamp(value || 0)));
}

function pair(p, q) {         // p over q on one scale from 0 to 1
  const out = el('span', 'sv-pair');
  for (const [name, value] of [['p', p], ['q', q]])
    out.append(el('i', null, name), finite(value) ? bar(name, value) : el('span', 'sv-track is-none'), el('b', 'sv-num', prob(value)));
  return out;
}

const placeOf = (step, at) => at < 0 ? WORDS.textSoFar : '“' + (shown(nodesOf(step)[at].text) || '␣') + '”';
const isJudged = node => node.state === 'accepted' || node.state === 'rejected';
function ruleOf(step, run) {
  const rule = step.rule || run.meta.verification;
  return Object.hasOwn(WORDS.columns, rule) ? rule : 'rejection';
}
const topTitle = (step, top) => say(WORDS.topAt, {where: placeOf(step, top.at), at: top.temperature_one ? WORDS.topT1 : '',
    what: top.rows.some(row => finite(row[3])) ? WORDS.topBoth : WORDS.topTarget});
const titleOf = (step, i) => isPrefill(step) ? WORDS.promptTitle : say(numDrafted(step) ? WORDS.stepTitle : WORDS.plainTitle, {i});
function timeBar(step) {
  const time = el('div', 'sv-time'), names = el('div', 'sv-time-names'), total = stepMs(step) || 1;
  if (!nodesOf(step).length && !step.draft_ms && (numDrafted(step) || step.kind === 'unknown')) {      // an attached engine tells no phases
    time.append(part('sv-phase is-other_ms', 1));
    names.append(el('span', null, el('i', 'sv-swatch is-other_ms'), WORDS.wholeStep + ' ', el('b', 'sv-num', say(WORDS.msOf, {a: ms(stepMs(step))}))));
    return box('sv-times', time, names);
  }
  for (const name in WORDS.phases) {
    time.append(part('sv-phase is-' + name, step[name] / total));
    const label = el('span', null, el('i', 'sv-swatch is-' + name), WORDS.phases[name] + ' ',
        el('b', 'sv-num', say(WORDS.msOf, {a: ms(step[name])}))), deviceMs = step[name.replace('_ms', '_device_ms')];
    names.append(finite(deviceMs) ? set(label, {title: say(WORDS.deviceMs, {a: ms(deviceMs)})}) : label);
  }
  return box('sv-times', time, names);
}

// The probabilities to show: those of the verdict, or where it needed none (greedy, or never judged) those at temperature 1.
function probsOf(node, greedy) {
  const atOne = greedy || !isJudged(node);
  return [atOne && finite(node.p_t1) ? node.p_t1 : node.p, atOne && finite(node.q_t1) ? node.q_t1 : node.q];
}

function decisionRow(step, i, run) {
  const node = nodesOf(step)[i], judged = isJudged(node), greedy = run.isGreedy(step);
  const token = el('span', 'sv-row-token', el('span', 'sv-mark'), tokenChip(node.text, node.state === 'accepted' ? 'draft' : node.state));
  const [p, q] = probsOf(node, greedy);
  const word = el('span', 'sv-verdict-word', el('strong', null, WORDS.states[node.state])), verdict = el('span', 'sv-verdict', word);
  if (judged && greedy) verdict.append(el('small', null, node.state === 'accepted' ? WORDS.yesArgmax : WORDS.noArgmax));
  else if (judged) {
    const accept = finite(node.accept_prob) ? node.accept_prob : null;
    if (accept !== null) {
      const scale = bar('accept', accept);
      if (finite(node.u)) {
        const tick = el('span', 'sv-tick');
        tick.style.left = (clamp(node.u) * 100).toFixed(1) + '%';
        scale.append(tick);
      }
      verdict.append(scale);
      word.append(el('small', 'sv-num', finite(node.u) ? say(node.state === 'accepted' ? WORDS.uBelow : WORDS.uAbove,
          {u: prob(node.u), a: prob(accept)}) : say(WORDS.noU, {a: prob(accept)})));
    }
  }
  return set(el('button', 'sv-row is-' + node.state, token, pair(p, q), verdict), {type: 'button', 'data-node': i});
}

function decisionList(step, run) {
  const out = el('div', 'sv-rows'), nodes = nodesOf(step), chain = isChain(step), greedy = run.isGreedy(step);
  const say1 = text => out.append(el('p', 'sv-say', text));
  if (isPrefill(step)) {
    say1(say(WORDS.prefill, {n: step.num_prompt_tokens || 0, ms: ms(stepMs(step))}) + (step.num_reused
        ? '; ' + say(WORDS.reused, {n: step.num_reused}) : '') + '.');
    say1(WORDS.prefillWhy);
    return out;
  }
  if (!nodes.length) { say1(numDrafted(step) ? WORDS.unknownNodes : WORDS.noNodes); return out; }
  const {token, probs, probsT1, argmax} = WORDS.columns, verdict = WORDS.columns[ruleOf(step, run)];
  if (step.rule) say1(say(WORDS.byRule, {rule: step.rule}));
  out.append(box('sv-row sv-row-head', ...[token, greedy ? probsT1 : probs,
      greedy ? argmax : verdict].map(text => el('span', null, text))));
  let numUnjudged = 0, parent = null;
  nodes.forEach((node, i) => {
    if (node.state === 'window') return;
    if (!chain && node.state !== 'unjudged' && node.parent !== parent) {
      parent = node.parent;
      out.append(el('p', 'sv-row-after', say(WORDS.after, {where: placeOf(step, parent)})));
    }
    if (node.state === 'unjudged') {
      numUnjudged++;
      if (!chain) return;
      if (numUnjudged === 1) say1(WORDS.notJudged + '. ' + (finite(node.p) || finite(node.p_t1) ? WORDS.conditional : ''));
    }
    out.append(decisionRow(step, i, run));
  });
  if (!chain && numUnjudged) say1(say(WORDS.notJudgedTree, {n: numUnjudged}) + '.');
  if (count(step, 'window')) say1(say(WORDS.windowNodes, {n: count(step, 'window')}) + '.');
  return out;
}

// rows of [text, value] or [text, p, q] as bars; ▸ what was chosen, ✎ what was drafted
function ranked(rows, chosen, label, drafted) {
  const out = el('div', 'sv-ranked');
  for (const [text, ...all] of rows) {
    const values = rows.every(row => row[2] === null || row[2] === undefined) ? all.slice(0, 1) : all;      // no q anywhere: p alone
    const bars = values.length > 1 ? [pair(...values)] : [bar(label || 'p', values[0]), el('b', 'sv-num', prob(values[0]))];
    out.append(box('sv-rank' + (chosen === text ? ' is-chosen' : drafted === text ? ' is-drafted' : ''),
        el('span', 'sv-rank-token', shown(text) || '␣'), ...bars));
  }
  return out;
}

// One cache: what was there, what the step fed (a cell each), and what of it was kept. Kept cells are the fed token itself and the
// accepted drafts, in the order in which they were fed, where the record allows to tell.
function cacheRow(step, name, {before, fed, after}) {
  const back = max(0, before + fed - after), kept = max(0, fed - back), nodes = nodesOf(step),
      known = name === 'target' && fed === nodes.length + 1;
  const isKept = i => known && kept === 1 + numAccepted(step) ? i === 0 || nodes[i - 1].state === 'accepted' : i < kept;
  const cells = el('span', 'sv-cells');
  if (fed <= 96) for (let i = 0; i < fed; i++)
    cells.append(set(el('i', isKept(i) ? 'is-kept' : 'is-back'), {title: known && i ? shown(nodes[i - 1].text) || '␣' : ''}));
  else cells.append(part('sv-fill is-kept', kept / fed), part('sv-fill is-back', back / fed));
  const text = say(WORDS.cacheRow, {before, fed, after}) + (back ? '; ' + say(WORDS.cacheBack, {n: back}) : '');
  return box('sv-cache', el('strong', null, WORDS.caches[name] || name), box('sv-cache-line',
      el('span', 'sv-cache-before sv-num', String(before)), cells,
      el('span', 'sv-cache-after sv-num', '→ ' + after)), el('small', 'sv-num', text));
}

const panels = {
  outcome(step, run) {
    const out = el('div', 'sv-panel'), last = closing(step), end = pathEnd(step), greedy = run.isGreedy(step);
    if (!last) { out.append(el('p', 'sv-say', run.reason && WORDS.reasons[run.reason] || WORDS.noEnd)); return out; }
    const title = text => { out.append(el('p', 'sv-result', tokenSpan(last, last.origin, run.isEnd(last)), el('small', null, text))); };
    const top = (step.top || NONE).find(record => record.at === end), residual = (step.residual || NONE).find(record => record.at === end)
        || (step.residual || NONE)[0];
    if (last.origin === 'correction' && residual && !greedy) {
      title(WORDS.residual);
      out.append(ranked(residual.rows.slice(0, 4).map(row => [row[1], row[2]]), last.text, 'residual'));
      return out;
    }
    title(last.origin === 'correction' ? (greedy ? WORDS.argmaxCorrection : WORDS.correction) : last.origin === 'bonus' ? WORDS.bonus
        : WORDS.plainToken);
    if (top) out.append(ranked(top.rows.slice(0, 4).map(row => [row[1], row[2]]), last.text, 'p'));
    else if (nodesOf(step).length) out.append(el('p', 'sv-quiet', WORDS.keptProbs));
    return out;
  },
  top(step, run, selected) {
    const out = el('div', 'sv-panel'), tops = step.top || NONE, nodes = nodesOf(step);
    const at = selected !== null && nodes[selected] ? nodes[selected].parent : pathEnd(step);
    const top = tops.find(record => record.at === at) || tops[tops.length - 1];
    if (!top) { out.append(el('p', 'sv-quiet', WORDS.keptProbs)); return out; }
    out.append(el('p', 'sv-say', topTitle(step, top)));
    const next = nodes.find(node => node.parent === top.at && node.state === 'accepted')
        || (top.at === pathEnd(step) ? closing(step) : null);
    out.append(ranked(top.rows.slice(0, 8).map(row => [row[1], row[2], row[3]]), next && next.text));
    return out;
  },
  cache(step) {
    const out = el('div', 'sv-panel'), kv = step.kv || {};
    for (const name in kv) out.append(cacheRow(step, name, kv[name]));
    if (!Object.keys(kv).length) out.append(el('p', 'sv-quiet', WORDS.noCache));
    if (step.draft_by) out.append(el('p', 'sv-say', say(WORDS.draftBy, {name: step.draft_by}) + '.'));
    if (finite(step.num_pooled)) out.append(el('p', 'sv-quiet', say(WORDS.pooled, {n: step.num_pooled}) + '.'));
    if (step.draft_stop) out.append(el('p', 'sv-say', WORDS.stopLabel + (WORDS.stops[step.draft_stop] || step.draft_stop) + '.'));
    if (step.choice) out.append(el('p', 'sv-say', say(WORDS.autopilot[step.choice.why],
        {k: step.choice.k, tokens: (step.choice.tokens ?? 1).toFixed(1),
        cost: (step.choice.cost ?? 1).toFixed(1)})));
    if (step.record_ms) out.append(el('p', 'sv-quiet', say(WORDS.record, {n: ms(step.record_ms)}) + '.'));
    return out;
  },
};

// ---- one decision in full: the sum worked out in numbers, what else could have stood there, and what was left after a rejection
function workedOut(step, i, run) {
  const node = nodesOf(step)[i], words = WORDS.worked, a = prob(node.accept_prob), verdict = WORDS.states[node.state];
  if (node.state === 'window') return words.window;
  if (node.state === 'unjudged') return words.unjudged;
  const rule = ruleOf(step, run), top = (step.top || NONE).find(record => record.at === node.parent), first = top && top.rows[0];
  if (run.isGreedy(step)) return say(node.state === 'accepted' ? words.argmaxYes : first
      && first[0] !== node.id ? words.argmaxNo : words.argmaxOther,
      {token: first ? shown(first[1]) || '␣' : ''});
  if (!finite(node.accept_prob)) return say(words.told, {verdict});
  const sum = rule !== 'rejection' ? say(words.chance, {a}) : finite(node.q) && finite(node.p)
      ? say(words.ratio, {p: prob(node.p), q: prob(node.q), a}) : say(words.chosen, {a});
  return sum + (finite(node.u) ? say(words.draw, {u: prob(node.u), sign: node.u < node.accept_prob ? '<' : '≥', a, verdict})
      : say(words.verdict, {verdict}));
}

function decisionDetail(step, i, run) {
  const node = nodesOf(step)[i], out = el('div', 'sv-detail'), kind = node.state === 'accepted' ? 'draft' : node.state;
  out.append(box('sv-detail-head is-' + node.state, el('span', 'sv-mark'), tokenChip(node.text === '' ? '◦' : node.text, kind),
      el('small', null, say(WORDS.afterSmall, {where: placeOf(step, node.parent)}))),
          el('div', 'sv-worked sv-num', workedOut(step, i, run)));
  if (node.state === 'window') return out;
  const top = (step.top || NONE).find(record => record.at === node.parent),
      residual = (step.residual || NONE).find(record => record.at === node.parent);
  const last = closing(step), isLast = node.parent === pathEnd(step) && !!last,
      answer = nodesOf(step).find(one => one.parent === node.parent
      && one.state === 'accepted') || (isLast ? last : null);
  const title = text => box('sv-detail-title', text);
  if (top) out.append(title(topTitle(step, top)),
      ranked(top.rows.slice(0, 8).map(row => [row[1], row[2], row[3]]), answer && answer.text, null, node.text));
  if (residual && !run.isGreedy(step) && isLast) out.append(box('sv-residual-part', title(WORDS.residualTitle),
      ranked(residual.rows.slice(0, 6).map(row => [row[1], row[2]]), last.text, 'residual')));
  if (!top) out.append(el('p', 'sv-quiet', isJudged(node) ? WORDS.keptProbs : WORDS.noTopHere));
  return out;
}
// The draft that one wants to see first: the rejection, else the last one that was judged, else the first.
function telling(step) {
  const nodes = nodesOf(step), rejected = nodes.findIndex(node => node.state === 'rejected');
  return rejected >= 0 ? rejected : max(pathEnd(step), nodes.findIndex(node => node.state !== 'window'));
}
