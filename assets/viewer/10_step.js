
// ---- what a step says -----------------------------------------------------------------------------------------------
const nodesOf = step => step.nodes || NONE;
const emittedOf = step => step.emitted || NONE;
const count = (step, state) => nodesOf(step).reduce((n, node) => n + (node.state === state), 0);
const numAccepted = step => finite(step.num_accepted) ? step.num_accepted : count(step, 'accepted');
const numDrafted = step => finite(step.num_drafted) ? step.num_drafted : nodesOf(step).length - count(step, 'window');
const numTokens = step => emittedOf(step).reduce((n, token) => n + (finite(token.num_tokens) ? token.num_tokens : 1), 0);
const stepMs = step => step.draft_ms + step.verify_ms + step.other_ms;
const isChain = step => nodesOf(step).every((node, i) => node.parent === i - 1);
const closing = step => emittedOf(step).find(token => token.origin !== 'draft');
const isPrefill = step => step.kind === 'prefill';
function depthsOf(step) {
  const out = [];
  for (const node of nodesOf(step)) out.push(node.parent < 0 ? 1 : out[node.parent] + 1);
  return out;
}
const acceptedPath = step => nodesOf(step).flatMap((node, i) => node.state === 'accepted' ? [i] : NONE);
function pathEnd(step) { let end = -1; nodesOf(step).forEach((node, i) => { if (node.state === 'accepted') end = i; }); return end; }

function shown(text) {        // a short form for quotes and labels: white space made visible
  return text.replace(/\n/g, '⏎').replace(/\t/g, '⇥').replace(/^ +$/, s => '␣'.repeat(s.length)).trim();
}

// Token text as DOM: only white space that the eye would miss gets a faint mark; special tokens become chips.
function fill(span, token, isEnd) {
  const text = token.text;
  if (text === '') {
    if (isEnd) span.append(el('span', 'sv-chip', WORDS.special.eos));
    else { span.classList.add('is-empty'); span.title = say(WORDS.special.bytes, {id: token.id}); span.append(el('span', 'sv-ws', '◦')); }
  } else if (SPECIAL.test(text.trim())) span.append(el('span', 'sv-chip', text.trim()));
  else if (!/[\n\t]|^ +$/.test(text)) span.textContent = text;
  else {
    for (const part of text.split(/(\n|\t)/)) {
      if (part === '\n') span.append(el('span', 'sv-ws', '⏎'), '\n');
      else if (part === '\t') span.append(el('span', 'sv-ws', '⇥'), '\t');
      else if (/^ +$/.test(part) && part === text) span.append(el('span', 'sv-ws', '␣'.repeat(part.length)));
      else if (part) span.append(part);
    }
  }
  return span;
}
function tokenSpan(token, kind, isEnd) { return fill(el('span', 'sv-tok is-' + kind), token, isEnd); }
function tokenChip(text, kind) { return fill(el('span', 'sv-tok is-' + kind), {text, id: null}); }

// ---- the four phases of a step
const PHASES = ['draft', 'verify', 'judge', 'emit'];
function phaseText(step, run, phase) {
  const num = numDrafted(step), accepted = numAccepted(step), end = closing(step),
      values = {n: num, accepted, token: end ? shown(end.text) || '␣' : '',
      origin: end ? WORDS.origins[end.origin] : '', tokens: numTokens(step)};
  if (isPrefill(step)) return WORDS.phaseTexts.prefill[phase];
  if (!num && phase === 1 && count(step, 'window')) return WORDS.phaseTexts.window;
  if (!num) return say(WORDS.phaseTexts.plain[phase], values);
  return say(WORDS.phaseTexts[PHASES[phase]][phase < 2 ? 0 : phase === 2 ? +(accepted === num) : end ? accepted ? 1 : 2 : 0], values);
}
