/* The specviz viewer: draws one run of speculative decoding from its trace, live or replayed. A plain script; no build step, no server.
 * It knows nothing of Gradio, of models, or of how verdicts are reached: it draws what the engine recorded.
 *
 *   const viewer = SpecViz.mount(element, {onResync(run, fromSeq), onPick(step)});
 *   viewer.take(message);      // start | steps | plain | end | trace | error | resync, one object each with run and seq
 *
 * Every piece of model or file text is set with textContent. Charts need Plotly, loaded in idle time from the address in the `start`
 * message; everything else works without it. `element.dataset.ready` is "1" once mounted; `viewer.state()` is for tests.
 */
(function (global) {
'use strict';

const WORDS = {
  dash: '–',
  noRun: 'No run yet. Send a prompt, or open a saved trace.',
  emptyStrip: 'The answer appears here, token by token, coloured by who wrote it.',
  emptyStep: 'Choose a step to see how its draft was judged.',
  heads: {
    speed_up: {label: 'measured speed-up', wait: 'not measured yet', over: 'against plain decoding, {n} tokens',
        slower: 'slower than plain decoding, {n} tokens',
               shared: 'withheld: steps were shared with other answers'},
    tokens_per_step: {label: 'tokens per step', sub: '{tokens} tokens in {steps} steps'},
    draft_acceptance_rate: {label: 'drafts accepted', sub: '{accepted} of {drafted} drafted',
        tree: '{accepted} of {drafted} drafted, many branches each step',
                            none: 'nothing was drafted'},
    tokens_per_s: {label: 'tokens per second', plain: 'plain decoding {n}', wait: 'plain decoding not measured'},
  },
  about: 'Formula and source of “{name}”', source: 'Source',
  origins: {draft: 'accepted draft', correction: 'correction', bonus: 'bonus', plain: 'target alone'},
  states: {accepted: 'accepted', rejected: 'rejected', unjudged: 'not judged', window: 'window'},
  legend: {draft: 'accepted', rejected: 'rejected', correction: 'correction', bonus: 'bonus', plain: 'target alone'},
  showRejected: 'Show rejected drafts',
  stripLabel: 'The answer. Left and right arrow keys move from step to step.',
  first: 'First step', previous: 'Previous step', play: 'Play', pause: 'Pause', next: 'Next step', last: 'Last step', live: 'Live',
  scrubber: 'Step', speed: 'Playback speed', stepOf: 'step {i} of {n}', prompt: 'prompt', noStep: 'no steps',
  stepTitle: 'Step {i}', promptTitle: 'Reading the prompt', plainTitle: 'Step {i}: no draft',
  verdictOf: '{accepted} of {drafted} drafts accepted', shared: 'shared with {n} other answers', sharedOne: 'shared with 1 other answer',
  inferred: 'inferred from the stream', aggregate: 'counts of a whole answer',
  phases: {draft_ms: 'draft', verify_ms: 'verify', other_ms: 'other'}, msOf: '{a} ms',
  columns: {token: 'draft token', probs: 'target p over drafter q', probsT1: 'p over q, at temperature 1',
      accept: 'u against min(1, p/q)', argmax: 'is it the argmax?',
      'shared-noise': 'is it the target’s own draw?', block: 'u against h of the block it ends', typical: 'is p above the threshold?'},
  byRule: 'This draft branches, so it was judged by {rule}.',
  yesArgmax: 'yes, the argmax', noArgmax: 'no, not the argmax', uBelow: 'u {u} < {a}', uAbove: 'u {u} ≥ {a}', noU: 'chance {a}',
  notJudged: 'Not judged: they continue a rejected token', notJudgedTree: '{n} more nodes were not judged: their parents were not accepted',
  conditional: 'p supposes it had been kept.', windowNodes: '{n} nodes belong to the lookahead window and are never judged',
  unknownNodes: 'This engine tells how many drafts were accepted, but neither the rejected tokens nor their probabilities.',
  noNodes: 'Nothing was drafted in this step; the target wrote one token by itself.',
  tabs: {outcome: 'Outcome', top: 'Top tokens', cache: 'Cache', tree: 'Tree'},
  residual: 'correction, drawn from the residual, max(0, p − q)',
  argmaxCorrection: 'correction: the target’s own most probable token', correction: 'correction by the target',
      bonus: 'bonus: all drafts accepted, so the same pass yields one more',
  plainToken: 'written by the target alone', noEnd: 'No token beyond the drafts: the answer ended here',
      keptProbs: 'Probabilities were not kept for this step. Switch on “keep probabilities” to see them.',
  topAt: 'After {where}: target p over drafter q', topT1: 'After {where}, at temperature 1: target p over drafter q',
      textSoFar: 'the text so far',
  prefill: '{n} prompt tokens read in {ms} ms', reused: '{n} more taken over from the conversation so far',
  prefillWhy: 'The first token comes from this pass. Nothing was drafted yet, and prompt time stays out of every speed.',
  caches: {target: 'target cache', drafter: 'drafter cache'}, cacheRow: '{before} entries before, {fed} fed, {after} kept',
      cacheBack: '{n} rolled back', noCache: 'This engine does not tell the state of its cache.',
  stopLabel: 'Drafting stopped: ', stops: {length: 'the draft had its full length', confidence: 'the drafter was no longer sure',
      'no match': 'no earlier text matches', eos: 'the draft reached the end of the text',
    context: 'the context is full', budget: 'the token budget of the step was used up',
    'match length': 'a match of this length is not trusted any further', 'end of turn': 'the earlier text ended its turn here',
    'few agree': 'too few earlier places go on in one way', 'no guess': 'the pool has nothing for the last token'},
  draftBy: 'Drafted by {name}', pooled: '{n} n-grams in the pool',
  record: 'writing this record took {n} ms, which counts in no figure',
  context: 'text so far', treeLabel: 'Draft tree with {n} nodes', threshold: 'hide nodes with q below {q}',
  identical: 'Identical to plain decoding: {tokens}/{of} tokens',
      partial: 'Identical so far: {tokens}/{of} tokens; the plain run stopped early', tie: 'Rounding tie at token {n}',
  tieWhy: 'Speculative: “{a}”, plain: “{b}”; the target’s two best tokens were {margin} apart in log-probability, within rounding.',
  differs: 'Differs from plain decoding at token {n}',
      differsWhy: 'Speculative: “{a}”, plain: “{b}”; margin {margin} in log-probability, more than rounding: please report the trace.',
  sameDraws: 'Identical to plain sampling with this seed: {tokens}/{of} tokens',
      drawsDiffer: 'Differs from plain sampling with this seed at token {n}',
      drawsWhy: 'Shared noise: “{a}”, plain: “{b}”; the two best draws were {margin} apart in log-probability, ',
      within: 'within rounding.', beyond: 'more than rounding: please report the trace.',
  sampling: 'Sampling: same distribution as plain decoding, texts may differ', measuring: 'Measuring plain decoding: {n} tokens',
      lossy: 'Lossy verification: the text does not follow the target’s distribution',
  repeating: 'Repeating text, not representative: a loop is easy to draft and inflates acceptance and speed-up.',
  sharedNote: 'Some steps were shared with other answers, so their times say nothing about this one alone; the speed-up is withheld.',
  lost: '{n} messages did not arrive; counts may be too low until the run ends.', requested: 'Asked for {a}, running with {b}.',
      dropped: '{n} nodes that were never judged were left out to keep the file small.',
  save: 'Save trace', open: 'Open trace', table: 'Charts as table', opened: 'recorded: {name}', stay: ' The present view was kept.',
  tooLarge: 'This file has {n} MB; a trace has at most 20 MB. Choose a smaller one.',
      notJson: 'This file is not valid JSON. Choose a file that “Save trace” wrote.',
  notTrace: 'This is not a trace of specviz: "format" must be "specviz-trace". Choose a file that “Save trace” wrote.',
      version: 'This trace has version {v}; this page reads version 1. Update specviz to open it.',
  broken: 'This trace is broken: {place} is {given}; expected {expected}.', missing: 'missing', unreadable: 'This file could not be read.',
  noCharts: 'Charts are unavailable: {why}. Tokens, playback and step details work without them.',
      notPlotly: 'the chart library’s file is not what it should be', notLoaded: 'the chart library could not be loaded',
  chartsLoading: 'Charts are loading …', cutUnjudged: 'unjudged continues above', chartLabel: 'Chart: {title}',
      tableHead: ['step', 'accepted', 'rejected', 'unjudged', 'tokens/step', 'draft ms', 'verify ms', 'other ms', 'plain ms'],
  said: 'Step {i}: {accepted} of {drafted} draft tokens accepted', saidThen: ', then {origin} “{text}”', saidPrompt: 'Prompt read',
      special: {eos: 'end of text', bytes: 'token {id}: part of a character'},
  reasons: {eos: 'The model ended its answer.', stop: 'A stop string ended the answer.', length: 'The length limit ended the answer.',
      cancelled: 'Stopped by you.', error: 'An error ended the answer.'},
};

const CHUNK = 24;             // steps per chunk of the strip: dimming toggles chunks, not every step
const NEAR = 6;               // chunks kept as spans on each side of the point of interest; the others are bare text
const WINDOW = 40;            // steps shown by the per-step charts
const CHART_MS = 100;         // a chart is redrawn at most every 100 ms ...
const CHART_SHARE = 4;        // ... and charts together leave three quarters of the time to everything else
const MAX_POINTS = 500;       // points of a cumulative line
const MAX_BYTES = 20e6;
const SVG = 'http://www.w3.org/2000/svg';
const NONE = [];
const {max, min, floor, ceil, abs} = Math;
const SPECIAL = /^(<\|[^|>\s]{1,40}\|>|<\/?(s|eos|bos|pad|unk|end_of_turn|start_of_turn|endoftext)>|\[\/?(INST|SEP|CLS|PAD|UNK)\])$/;
const ICONS = {first: 'M5 4v12M16 4 8 10l8 6z', previous: 'M14 4 6 10l8 6z', play: 'M6 3.5v13l10-6.5z',
    pause: 'M6 4h3v12H6zM11 4h3v12h-3z', next: 'M6 4l8 6-8 6z', last: 'M15 4v12M4 4l8 6-8 6z'};

const say = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => values && name in values ? String(values[name]) : whole);
const finite = x => typeof x === 'number' && Number.isFinite(x);
const prob = x => !finite(x) ? WORDS.dash : x === 0 || x === 1 ? String(x) : x < 0.001 ? '<.001' : x > 0.999 ? '>.999'
    : x.toFixed(3).replace(/^0/, '');
const ms = x => x >= 100 ? x.toFixed(0) : x.toFixed(1);
const rate = x => x >= 100 ? x.toFixed(0) : x.toFixed(1);
const clamp = x => max(0, min(1, x));

function el(tag, cls, ...children) {          // text goes in as text nodes, never as markup
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  node.append(...children.filter(child => child !== undefined && child !== null && child !== false));
  return node;
}
const box = (cls, ...children) => el('div', cls, ...children);
function set(node, attributes) { for (const key in attributes) node.setAttribute(key, attributes[key]); return node; }
function svg(tag, attributes, ...children) {
  const node = set(document.createElementNS(SVG, tag), attributes);
  node.append(...children);
  return node;
}
function icon(name) {
  return svg('svg', {viewBox: '0 0 20 20', width: 18, height: 18, 'aria-hidden': 'true'},
    svg('path', {d: ICONS[name], fill: 'currentColor', stroke: 'currentColor', 'stroke-width': 1.6, 'stroke-linejoin': 'round'}));
}

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

// ---- trace files: checked before anything on the screen changes -----------------------------------------------------
const WORD_SETS = {state: ['accepted', 'rejected', 'unjudged', 'window'], origin: ['draft', 'correction', 'bonus', 'plain'],
    kind: ['prefill', 'spec', 'plain', 'unknown'], source: ['exact', 'inferred', 'aggregate']};
const SHAPES = {              // field: type, "!" where it must be there, "?" where null is allowed
  step: {kind: 'kind!', t0_ms: 'time!', draft_ms: 'ms!', verify_ms: 'ms!', other_ms: 'ms!', nodes: '[node', emitted: '[emitted',
      draft_stop: 'text', kv: '{cache', num_rows: 'int', record_ms: 'ms', top: '[top', residual: '[residual',
         source: 'source', num_drafted: 'int?', num_accepted: 'int?', server_ms: 'ms?', num_prompt_tokens: 'int', num_reused: 'int',
         draft_by: 'text', num_pooled: 'int?', rule: 'text', margin: 'number?'},
  node: {id: 'int!?', text: 'text!', parent: 'from-1!', state: 'state!', q: 'prob?', p: 'prob?', accept_prob: 'prob?', u: 'prob?',
      p_t1: 'prob?', q_t1: 'prob?', score: 'number?'},
  emitted: {id: 'int!?', text: 'text!', origin: 'origin!', num_tokens: 'int'},
  cache: {before: 'int!', fed: 'int!', after: 'int!'},
  top: {at: 'from-1!', rows: '(int text prob prob?!', temperature_one: 'bool'},
  residual: {at: 'from-1!', rows: '(int text prob!'},
  plain: {id: 'int!?', text: 'text!', t_ms: 'time!', ms: 'ms!', margin: 'number?'},
};
const whole = x => Number.isInteger(x);
const TYPES = {
  int: ['a whole number, at least 0', x => whole(x) && x >= 0], 'from-1': ['a whole number, at least -1', x => whole(x) && x >= -1],
      number: ['a number', finite],
  prob: ['a number from 0 to 1', x => finite(x) && x >= 0 && x <= 1], ms: ['a time in milliseconds', x => finite(x) && x >= 0 && x < 1e12],
  time: ['a time in milliseconds', x => finite(x) && abs(x) < 1e12], text: ['text', x => typeof x === 'string'],
      bool: ['true or false', x => typeof x === 'boolean'],
};
for (const name in WORD_SETS) TYPES[name] = ['one of ' + WORD_SETS[name].join(', '), x => WORD_SETS[name].includes(x)];
const isObject = x => x !== null && typeof x === 'object' && !Array.isArray(x);

function broken(place, given, expected) {
  const text = given === undefined ? WORDS.missing : JSON.stringify(given);
  throw new Error(say(WORDS.broken, {place, given: text.length > 60 ? text.slice(0, 57) + '...' : text, expected}));
}
function checkScalar(type, value, place) {
  const name = type.replace(/[!?]/g, '');
  if (value === null && type.includes('?')) return;
  if (!TYPES[name][1](value)) broken(place, value, TYPES[name][0]);
}
function checkRecord(shape, data, place) {
  if (!isObject(data)) broken(place, data, 'an object');
  for (const name in SHAPES[shape]) {
    const type = SHAPES[shape][name], at = place + '.' + name, value = data[name];
    if (value === undefined) { if (type.includes('!')) broken(at, undefined, 'a value'); continue; }
    if (type[0] === '[') checkList(type.slice(1), value, at);
    else if (type[0] === '{') { if (!isObject(value)) broken(at, value, 'an object');
        for (const key in value) checkRecord(type.slice(1), value[key], at + '.' + key); }
    else if (type[0] === '(') {
      const types = type.slice(1, -1).split(' ');
      if (!Array.isArray(value)) broken(at, value, 'a list');
      value.forEach((row, i) => {
        if (!Array.isArray(row) || row.length !== types.length) broken(at + '[' + i + ']', row, 'a list of ' + types.length);
        row.forEach((cell, k) => checkScalar(types[k], cell, at + '[' + i + '][' + k + ']'));
      });
    } else checkScalar(type, value, at);
  }
}
function checkList(shape, data, place) {
  if (!Array.isArray(data)) broken(place, data, 'a list');
  data.forEach((item, i) => checkRecord(shape, item, place + '[' + i + ']'));
}
function checkSteps(steps, place) {
  checkList('step', steps, place);
  steps.forEach((step, i) => {
    const nodes = nodesOf(step), at = place + '[' + i + ']', taken = new Set();
    nodes.forEach((node, k) => {
      const here = at + '.nodes[' + k + ']';
      if (node.parent >= k) broken(here + '.parent', node.parent, 'a number from -1 to ' + (k - 1));
      const judged = node.state === 'accepted' || node.state === 'rejected';
      if (judged && node.parent >= 0 && nodes[node.parent].state !== 'accepted') broken(here + '.state', node.state,
          'a node that is judged to have an accepted parent');
      if (node.state === 'accepted' && taken.has(node.parent)) broken(here + '.state', node.state,
          'at most one accepted child of each node');
      if (node.state === 'accepted') taken.add(node.parent);
    });
    for (const name of ['top', 'residual']) for (const [k, record] of (step[name] || NONE).entries())
      if (record.at >= nodes.length) broken(at + '.' + name + '[' + k + '].at', record.at, 'a number from -1 to ' + (nodes.length - 1));
  });
}
function checkTrace(data) {   // throws an Error whose message can be shown as it is
  if (!isObject(data) || data.format !== 'specviz-trace') throw new Error(WORDS.notTrace);
  if (data.version !== 1) {
    if (whole(data.version) && data.version > 1) throw new Error(say(WORDS.version, {v: data.version}));
    broken('version', data.version, '1');
  }
  if (!isObject(data.meta)) broken('meta', data.meta, 'an object');
  checkSteps(data.steps, 'steps');
  if (data.plain !== undefined) checkList('plain', data.plain, 'plain');
  for (const name of ['stats', 'compare']) if (data[name] !== undefined && data[name] !== null && !isObject(data[name])) broken(name,
      data[name], 'an object');
  return data;
}
function parseTrace(text) {
  let data;
  try { data = JSON.parse(text.replace(/^\uFEFF/, '')); } catch (error) { throw new Error(WORDS.notJson); }
  return checkTrace(data);
}

// ---- a run and its running sums; `stats` of the `end` message is the truth where it is there ------------------------
class Run {
  constructor(id, meta) {
    Object.assign(this, {id, meta: meta || {}, seq: -1, steps: [], plain: [], stats: null, compare: null, reason: '', note: '', numLost: 0,
      numTokens: 0, numDrafted: 0, numAccepted: 0, numDecode: 0, decodeTokens: 0, decodeMs: 0, isShared: false, isTree: false,
          isRepeating: false, text: ''});
    this.gain = {step: -1, tokens: 0, took: 0, plain: 0};      // running sums of `speedUp`
    this.rows = {decode: [], accepted: [], rejected: [], unjudged: [], tokens_per_step: [], draft_ms: [], verify_ms: [], other_ms: [],
        tokens: [], seconds: []};
    this.records = [];        // decode step number (from 0) → index of its record
    this.grams = new Map(); this.recent = []; this.numSeen = 0;
  }

  addStep(step) {
    const row = this.rows, accepted = numAccepted(step), drafted = numDrafted(step), tokens = numTokens(step),
        rejected = count(step, 'rejected');
    this.steps.push(step);
    this.numTokens += tokens; this.numDrafted += drafted; this.numAccepted += accepted;
    if (step.num_rows > 1 && !isPrefill(step)) this.isShared = true;
    if (!this.isTree && !isChain(step)) this.isTree = true;
    if (!isPrefill(step)) {
      this.records.push(this.steps.length - 1);
      this.numDecode++;
      this.decodeTokens += tokens;
      this.decodeMs += stepMs(step);
    }
    row.decode.push(this.numDecode);
    row.accepted.push(accepted); row.rejected.push(rejected); row.unjudged.push(max(0, drafted - accepted - rejected));
    row.tokens_per_step.push(this.numDecode ? this.decodeTokens / this.numDecode : null);
    for (const name of ['draft_ms', 'verify_ms', 'other_ms']) row[name].push(step[name]);
    row.tokens.push(this.numTokens); row.seconds.push((step.t0_ms + stepMs(step)) / 1000);
    for (const token of emittedOf(step)) { this.text += token.text; this.watchLoop(token); }
  }

  watchLoop(token) {          // the same eight tokens three times, not overlapping: a loop, which is easy to draft
    this.recent.push(token.id === null ? token.text : token.id);
    this.numSeen++;
    if (this.isRepeating || this.recent.length < 8) return;
    if (this.recent.length > 8) this.recent.shift();
    const gram = this.recent.join('\u0000'), [seen, free] = this.grams.get(gram) || [0, 0];
    if (this.numSeen < free) return;
    this.grams.set(gram, [seen + 1, this.numSeen + 8]);
    if (seen === 2) { this.isRepeating = true; this.grams.clear(); }
  }

  rate() { return this.decodeMs > 0 && this.decodeTokens ? 1000 * this.decodeTokens / this.decodeMs : null; }
  plainRate() {
    const took = this.plain.slice(1).reduce((sum, token) => sum + token.ms, 0);
    return took > 0 ? 1000 * (this.plain.length - 1) / took : null;
  }

  speedUp() {                 // plain over speculative time for the same tokens after the first, up to the last step both runs have
    const gain = this.gain;
    while (gain.step + 1 < this.records.length) {
      const step = this.steps[this.records[gain.step + 1]], n = numTokens(step);
      if (gain.tokens + n > this.plain.length - 1) break;
      for (let k = 0; k < n; k++) gain.plain += this.plain[++gain.tokens].ms;
      gain.took += stepMs(step); gain.step++;
    }
    return gain.tokens && gain.took > 0 && !this.isShared ? {value: gain.plain / gain.took, tokens: gain.tokens} : null;
  }

  plainMs(i) {                // plain decoding's milliseconds for as many tokens at the same place; null until they are measured
    const from = i ? this.rows.tokens[i - 1] : 0, to = this.rows.tokens[i];
    if (to > this.plain.length) return null;
    let sum = 0;
    for (let k = from; k < to; k++) sum += this.plain[k].ms;
    return sum;
  }

  isGreedy(step) {
    const meta = this.meta, temperature = [meta.temperature, meta.sampling && meta.sampling.temperature, meta.config
        && meta.config.temperature].find(finite);
    if (temperature !== undefined) return temperature === 0;
    const judged = nodesOf(step).filter(node => node.state === 'accepted' || node.state === 'rejected');
    return judged.length > 0 && judged.every(node => !finite(node.u) && (node.p === 0 || node.p === 1));
  }

  file() {
    return {format: 'specviz-trace', version: 1, meta: this.meta, steps: this.steps, plain: this.plain, stats: this.stats,
        compare: this.compare};
  }
}

let plotly = null;            // one load per page, shared by all viewers
function loadPlotly(address) {
  if (global.Plotly) return Promise.resolve();
  if (!address) return Promise.reject(new Error(WORDS.notLoaded));
  return plotly = plotly || new Promise((resolve, reject) => {
    const idle = global.requestIdleCallback || (run => setTimeout(run, 50));
    idle(() => {
      const script = el('script');
      script.src = address;
      script.onload = () => global.Plotly ? resolve() : reject(new Error(WORDS.notPlotly));
      script.onerror = () => reject(new Error(WORDS.notLoaded));
      document.head.append(script);
    }, {timeout: 2000});
  }).catch(error => { plotly = null; throw error; });
}

function thin(xs, ys) {       // every n-th point and the last one
  const stride = ceil(xs.length / MAX_POINTS);
  if (stride <= 1) return [xs, ys];
  const keep = (_, i) => i % stride === 0 || i === xs.length - 1;
  return [xs.filter(keep), ys.filter(keep)];
}

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

function decisionRow(step, i, run) {
  const node = nodesOf(step)[i], judged = node.state === 'accepted' || node.state === 'rejected', greedy = run.isGreedy(step);
  const token = el('span', 'sv-row-token', el('span', 'sv-mark'), tokenChip(node.text, node.state === 'accepted' ? 'draft' : node.state));
  const atOne = greedy || !judged, p = atOne && finite(node.p_t1) ? node.p_t1 : node.p, q = atOne && finite(node.q_t1) ? node.q_t1 : node.q;
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
  const {token, probs, probsT1, accept, argmax} = WORDS.columns, rule = step.rule || run.meta.verification,
      verdict = Object.hasOwn(WORDS.columns, rule) ? WORDS.columns[rule] : accept;
  if (step.rule) say1(say(WORDS.byRule, {rule: step.rule}));
  out.append(box('sv-row sv-row-head', ...[token, greedy ? probsT1 : probs, greedy ? argmax : verdict].map(text => el('span', null, text))));
  let numUnjudged = 0;
  nodes.forEach((node, i) => {
    if (node.state === 'window') return;
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

function ranked(rows, chosen, label) {       // rows of [text, value] or [text, p, q] as bars
  const out = el('div', 'sv-ranked');
  for (const [text, ...values] of rows) {
    const bars = values.length > 1 ? [pair(...values)] : [bar(label, values[0]), el('b', 'sv-num', prob(values[0]))];
    out.append(box('sv-rank' + (chosen === text ? ' is-chosen' : ''), el('span', 'sv-rank-token', shown(text) || '␣'), ...bars));
  }
  return out;
}

const panels = {
  outcome(step, run) {
    const out = el('div', 'sv-panel'), last = closing(step), end = pathEnd(step), greedy = run.isGreedy(step);
    if (!last) { out.append(el('p', 'sv-say', run.reason && WORDS.reasons[run.reason] || WORDS.noEnd)); return out; }
    const title = text => { out.append(el('p', 'sv-result', tokenSpan(last, last.origin, run.isEnd(last)), el('small', null, text))); };
    const top = (step.top || NONE).find(record => record.at === end), residual = (step.residual || NONE).find(record => record.at === end)
        || (step.residual || NONE)[0];
    if (last.origin === 'correction' && residual) {
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
    const where = top.at < 0 ? WORDS.textSoFar : '“' + shown(nodes[top.at].text) + '”';
    out.append(el('p', 'sv-say', say(top.temperature_one ? WORDS.topT1 : WORDS.topAt, {where})));
    const next = nodes.find(node => node.parent === top.at && node.state === 'accepted')
        || (top.at === pathEnd(step) ? closing(step) : null);
    out.append(ranked(top.rows.slice(0, 8).map(row => [row[1], row[2], row[3]]), next && next.text));
    return out;
  },
  cache(step) {
    const out = el('div', 'sv-panel'), kv = step.kv || {};
    for (const name in kv) {
      const {before, fed, after} = kv[name], largest = max(1, before + fed, after), back = max(0, before + fed - after);
      const parts = {before: min(before, after), kept: max(0, min(fed, after - before)), back};
      const track = el('span', 'sv-track', ...Object.keys(parts).map(kind => part('sv-fill is-' + kind, parts[kind] / largest)));
      const text = say(WORDS.cacheRow, {before, fed, after}) + (back ? '; ' + say(WORDS.cacheBack, {n: back}) : '');
      out.append(box('sv-cache', el('strong', null, WORDS.caches[name] || name), track, el('small', 'sv-num', text)));
    }
    if (!Object.keys(kv).length) out.append(el('p', 'sv-quiet', WORDS.noCache));
    if (step.draft_by) out.append(el('p', 'sv-say', say(WORDS.draftBy, {name: step.draft_by}) + '.'));
    if (finite(step.num_pooled)) out.append(el('p', 'sv-quiet', say(WORDS.pooled, {n: step.num_pooled}) + '.'));
    if (step.draft_stop) out.append(el('p', 'sv-say', WORDS.stopLabel + (WORDS.stops[step.draft_stop] || step.draft_stop) + '.'));
    if (step.record_ms) out.append(el('p', 'sv-quiet', say(WORDS.record, {n: ms(step.record_ms)}) + '.'));
    return out;
  },
  tree(step, threshold, onThreshold) {            // stands in the place of the rows; the outcome stays below
    const slider = set(el('input'), {type: 'range', min: 0, max: 0.5, step: 0.01, value: threshold}), text = el('span'),
        picture = box('sv-tree-box');
    const draw = () => { text.textContent = say(WORDS.threshold, {q: (+slider.value).toFixed(2)});
        picture.replaceChildren(treePicture(step, +slider.value)); };
    slider.oninput = () => { onThreshold(+slider.value); draw(); };
    draw();
    return box('sv-rows sv-tree', nodesOf(step).some(node => finite(drafterProb(node))) && el('label', 'sv-quiet', text, slider), picture);
  },
};

const drafterProb = node => finite(node.q) ? node.q : node.q_t1;
function treePicture(step, threshold) {      // tidy: a leaf takes the next row, a parent the middle of its children; it never moves
  const all = nodesOf(step), children = new Map([[-1, []]]), place = new Map(), W = 90, H = 24;
  const big = node => node.state === 'accepted' || node.state === 'rejected' || !(drafterProb(node) < threshold);
  all.forEach((node, i) => { if (big(node) && children.has(node.parent)) { children.get(node.parent).push(i); children.set(i, []); } });
  let rows = 0, depth = 0;
  const stack = [[-1, 0, false]];
  while (stack.length) {
    const [i, d, back] = stack.pop(), inner = children.get(i);
    depth = max(depth, d);
    if (!inner.length) place.set(i, [d, rows++]);
    else if (back) place.set(i, [d, (place.get(inner[0])[1] + place.get(inner[inner.length - 1])[1]) / 2]);
    else { stack.push([i, d, true]); for (const child of inner.slice().reverse()) stack.push([child, d + 1, false]); }
  }
  const width = (depth + 1) * W + 8, height = rows * H + 8;
  const picture = svg('svg', {viewBox: '0 0 ' + width + ' ' + height, width, height, role: 'tree',
      'aria-label': say(WORDS.treeLabel, {n: all.length})});
  for (const [i, [d, r]] of place) if (i >= 0) {
    const [pd, pr] = place.get(all[i].parent), x0 = pd * W + 80, x1 = d * W + 4, y0 = pr * H + 15, y1 = r * H + 15;
    picture.append(svg('path', {class: 'is-' + all[i].state, d: `M${x0},${y0} C${x0 + 8},${y0} ${x1 - 8},${y1} ${x1},${y1}`}));
  }
  for (const [i, [d, r]] of place) {
    const node = all[i], group = svg('g', {class: i < 0 ? 'is-context' : 'is-' + node.state, role: 'treeitem'});
    const label = i < 0 ? WORDS.context : Array.from(shown(node.text)).slice(0, 10).join('') || '␣';
    group.append(svg('rect', {x: d * W + 4, y: r * H + 5, width: 76, height: 20, rx: 5}),
        svg('text', {x: d * W + 10, y: r * H + 19}, label));
    if (i >= 0) group.append(svg('title', {}, [shown(node.text), 'p', prob(node.p), 'q', prob(node.q),
        WORDS.states[node.state]].join(' ')));
    picture.append(group);
  }
  return picture;
}

// ---- the viewer -----------------------------------------------------------------------------------------------------
function mount(root, options) {
  options = options || {};
  root.classList.add('sv');
  root.replaceChildren();

  const uid = 'sv' + Math.random().toString(36).slice(2, 8);
  const button = (cls, label, action, name) => {
    const node = el('button', 'sv-btn ' + cls, name ? icon(name) : label);
    node.onclick = action;
    return set(node, name ? {type: 'button', 'aria-label': label, title: label} : {type: 'button'});
  };

  // skeleton
  const dot = el('span', 'sv-dot'), statusText = el('span', 'sv-status-text', WORDS.noRun), config = el('span', 'sv-config'),
      badge = el('div', 'sv-badge');
  badge.hidden = true;
  const top = box('sv-top', box('sv-status', dot, box('sv-status-lines', statusText, config)), badge);
  const heads = {}, headRow = el('div', 'sv-heads');
  for (const name in WORDS.heads) {
    const value = el('span', 'sv-head-value sv-num', WORDS.dash), sub = el('span', 'sv-head-sub'), info = el('button', 'sv-info', 'i'),
        about = el('div', 'sv-about');
    about.hidden = true; about.id = uid + name;
    set(info, {type: 'button', 'aria-label': say(WORDS.about, {name: WORDS.heads[name].label}), 'aria-expanded': 'false',
        'aria-controls': about.id});
    info.onclick = () => explain(about.hidden ? name : null);
    const head = box('sv-head', box('sv-head-label', el('span', null, WORDS.heads[name].label), info), value, sub, about);
    head.dataset.name = name;
    heads[name] = {head, value, sub, info, about};
    headRow.append(head);
  }
  const notes = el('div', 'sv-notes');

  const first = button('sv-icon sv-far', WORDS.first, () => visit(0), 'first'),
      previous = button('sv-icon', WORDS.previous, () => visit(view.at - 1), 'previous');
  const play = button('sv-icon sv-play', WORDS.play, () => view.playing ? pause() : start(), 'play');
  const next = button('sv-icon', WORDS.next, () => visit(view.at + 1), 'next'),
      last = button('sv-icon sv-far', WORDS.last, () => visit(size() - 1), 'last');
  const scrubber = el('input', 'sv-scrub'), label = el('output', 'sv-label sv-num', WORDS.noStep), speed = el('select', 'sv-speed'),
      live = button('sv-live', WORDS.live, () => { pause(); follow(); });
  set(scrubber, {type: 'range', min: 0, max: 0, value: 0, 'aria-label': WORDS.scrubber});
  scrubber.oninput = () => visit(+scrubber.value);
  set(speed, {'aria-label': WORDS.speed});
  for (const [value, text] of [[0.25, '¼×'], [0.5, '½×'], [1, '1×'], [2, '2×'], [4, '4×']])
    speed.append(set(el('option', null, text), {value}));
  speed.value = '1';
  const controls = box('sv-bar', box('sv-buttons', first, previous, play, next, last), scrubber, label, box('sv-pace', speed, live));

  const toggle = set(el('input'), {type: 'checkbox', checked: '', 'aria-label': WORDS.showRejected}),
      legend = set(box('sv-legend'), {role: 'list'});
  toggle.onchange = () => root.classList.toggle('hide-rejected', !toggle.checked);
  for (const kind in WORDS.legend) {
    const sample = el('span', 'sv-tok sv-sample is-' + kind, 'Ab'), isToggle = kind === 'rejected';
    legend.append(set(el(isToggle ? 'label' : 'span', 'sv-key', isToggle && toggle, sample, WORDS.legend[kind]), {role: 'listitem'}));
  }
  const strip = el('div', 'sv-strip');
  set(strip, {tabindex: 0, role: 'group', 'aria-label': WORDS.stripLabel, 'aria-live': 'off'});
  const inspector = set(el('section', 'sv-inspector'), {tabindex: -1, 'aria-label': WORDS.scrubber});
  const main = box('sv-main', box('sv-left', legend, strip), inspector);

  const chartRow = el('div', 'sv-charts'), tableBox = el('div', 'sv-data');
  tableBox.hidden = true;
  const chooser = set(el('input'), {type: 'file', accept: '.json,application/json', hidden: ''});
  chooser.onchange = () => { if (chooser.files[0]) openFile(chooser.files[0]); chooser.value = ''; };
  const save = button('', WORDS.save, saveFile), open = button('', WORDS.open, () => chooser.click());
  const tableButton = button('', WORDS.table, () => { tableBox.hidden = !tableBox.hidden;
      set(tableButton, {'aria-pressed': !tableBox.hidden}); drawTable(); });
  set(tableButton, {'aria-pressed': false});
  const problem = set(box('sv-problem'), {role: 'alert', hidden: ''}), announce = set(box('sv-sr'), {role: 'status'});
  root.append(top, headRow, notes, problem, controls, main, chartRow, tableBox, box('sv-foot', save, open, tableButton, chooser), announce);

  // what is known (run) and what is looked at (view)
  let run, view, formulas = {};
  const size = () => run.steps.length;
  const past = new Set();     // runs that this page has left: late messages of theirs change nothing
  const held = new Map();     // messages that came too early, by seq
  let asked = null;

  function reset(id, meta) {
    if (run && run.id !== undefined) past.add(run.id);
    if (view) pause();
    past.delete(id);
    held.clear(); asked = null;
    run = new Run(id, meta);
    run.isEnd = token => run.reason === 'eos' && size() > 0 && emittedOf(run.steps[size() - 1]).slice(-1)[0] === token;
    view = {at: -1, live: true, playing: false, drawn: 0, chunks: [], dimmed: null, home: -1, pending: false, tab: view ? view.tab
        : 'outcome', node: null, threshold: 0, zoom: null};
    strip.replaceChildren(el('p', 'sv-empty', WORDS.emptyStrip));
    root.classList.remove('replay');
    problem.hidden = true;
    scrubber.max = 0; scrubber.value = 0; label.textContent = WORDS.noStep;
    showBadge(); inspect();
  }

  // ---- messages
  function take(message) {
    if (!isObject(message) || typeof message.type !== 'string') return;
    if (message.type === 'resync') return resynced(message);
    if (message.type === 'start' || message.type === 'trace') return begin(message);
    if (message.seq === undefined) return apply(message);
    if (message.run !== run.id) {
      if (!past.has(message.run)) { held.clear(); held.set(message.seq, message); ask(message.run, 0); }
      return;
    }
    if (message.seq <= run.seq) return;
    if (message.seq > run.seq + 1) { held.set(message.seq, message); ask(run.id, run.seq + 1); return; }
    apply(message);
    drain();
  }

  function begin(message) {
    if (message.type === 'trace') {
      let data;
      try { data = checkTrace(message.trace); } catch (error) { return complain(error.message); }
      show(data, message.run, message);
    } else {
      reset(message.run, message.meta);
      setUp(message);
    }
    run.seq = message.seq || 0;
    schedule();
  }

  function setUp(message) {
    if (message.formulas) formulas = message.formulas;
    run.note = typeof message.note === 'string' ? message.note : '';
    setStatus(message.status);
    prepareCharts(message);
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
    if (size()) select(size() - 1, true);
    dim(size() - 1);
  }

  function apply(message) {
    if (message.seq !== undefined) run.seq = message.seq;
    try {
      if (message.steps) checkSteps(message.steps, 'steps');
      if (message.tokens) checkList('plain', message.tokens, 'tokens');
    } catch (error) { return complain(error.message); }
    for (const step of message.steps || NONE) run.addStep(step);
    for (const token of message.tokens || NONE) run.plain.push(token);
    if (message.type === 'end') {
      run.stats = message.stats || null; run.compare = message.compare || null; run.reason = message.reason || '';
      view.shown = null;
      if (size()) announce.textContent = spoken(size() - 1) + '. ' + (WORDS.reasons[run.reason] || '');
    }
    if (message.type === 'error') complain(message.error && message.error.message || '');
    if (message.status) setStatus(message.status);
    schedule();
  }

  function drain() { while (held.has(run.seq + 1)) { const message = held.get(run.seq + 1); held.delete(message.seq); apply(message); } }

  function ask(id, from) {    // a gap: fetch what is missing, once; if that fails go on without it and say so
    if (asked) return;
    const question = asked = {id, from}, done = answer => {
      if (asked !== question) return;
      clearTimeout(timer);
      resynced(isObject(answer) ? answer : {messages: answer || []});
    };
    const timer = setTimeout(() => done(null), 5000);
    if (!options.onResync) return done(null);
    Promise.resolve().then(() => options.onResync(id, from)).then(answer => { if (answer !== undefined) done(answer); }, () => done(null));
  }

  function resynced(answer) {
    const question = asked;
    asked = null;
    const waiting = new Map(held);
    for (const message of Array.isArray(answer.messages) ? answer.messages : []) take(message);
    for (const [seq, message] of waiting) if (message.run === run.id && seq > run.seq) held.set(seq, message);
    drain();
    if (!held.size) return;
    if (question && question.id !== run.id) reset(question.id, {});       // its start is gone for good: show at least the rest
    const seq = min(...held.keys());
    run.numLost += seq - run.seq - 1;
    run.seq = seq - 1;
    drain();
    schedule();
  }

  function schedule() { if (!view.pending) { view.pending = true; requestAnimationFrame(flush); } }
  function complain(text) { problem.textContent = text; problem.hidden = !text; }

  function setStatus(text) {
    if (typeof text !== 'string' || !text) return;
    const state = (/^[a-z]+/i.exec(text) || [''])[0].toLowerCase();
    dot.className = 'sv-dot is-' + (['active', 'off', 'paused', 'waiting', 'error', 'recorded'].includes(state) ? state : 'other');
    statusText.textContent = text;
  }

  // ---- once per animation frame, however many messages came
  function flush() {
    view.pending = false;
    if (size() && !view.chunks.length) strip.replaceChildren();
    const fresh = document.createDocumentFragment();
    for (; view.drawn < size(); view.drawn++) {
      if (view.drawn % CHUNK === 0) {
        const node = set(el('span', 'sv-chunk'), {'data-first': view.drawn});
        view.chunks.push({node, live: true});
        fresh.append(node);
      }
      const chunk = view.chunks[view.chunks.length - 1];
      if (chunk.live) chunk.node.append(stepSpan(run.steps[view.drawn], view.drawn)); else bare(chunk);
    }
    const atEnd = strip.scrollHeight - strip.scrollTop - strip.clientHeight < 60;
    strip.append(fresh);
    if (run.reason === 'eos') markEnd();
    scrubber.max = max(0, size() - 1);
    if (view.live) follow(atEnd); else showLabel();
    showHeads(); showNotes(); showConfig(); showBadge();
    drawCharts(); drawTable();
  }

  function stepSpan(step, i) {
    const span = el('span', 'sv-step'), tokens = emittedOf(step), rejected = isChain(step)
        && nodesOf(step).find(node => node.state === 'rejected');
    span.dataset.i = i;
    for (const token of tokens) {
      const node = tokenSpan(token, token.origin, run.isEnd(token));
      if (token.origin === 'correction' && rejected && rejected.text !== '') {      // small above the token that took its place
        const word = el('span', 'sv-over'), hasSpace = /^ \S/.test(token.text);      // the space may hang at the end of the line before
        if (hasSpace) fill(word, {text: token.text.slice(1)}); else word.append(...node.childNodes);
        word.append(el('span', 'sv-rejected', shown(rejected.text) || '␣'));
        node.replaceChildren(hasSpace ? ' ' : '', word);
      }
      span.append(node);
    }
    return span;
  }

  function markEnd() {
    const at = size() - 1, old = spanOf(at);
    if (!old || old.dataset.end) return;
    const fresh = set(stepSpan(run.steps[at], at), {'data-end': 1});
    fresh.className = old.className;
    old.replaceWith(fresh);
  }

  // Far chunks are one text node each: a page with many thousand spans slows everything on it.
  const stepsOf = chunk => run.steps.slice(+chunk.node.dataset.first, +chunk.node.dataset.first + CHUNK);
  function bare(chunk) {
    chunk.live = false;
    chunk.node.textContent = stepsOf(chunk).map(step => emittedOf(step).map(token => token.text).join('')).join('');
  }
  function spans(chunk) {
    chunk.live = true;
    chunk.node.replaceChildren(...stepsOf(chunk).map((step, k) => stepSpan(step, +chunk.node.dataset.first + k)));
  }
  function keepNear(home) {
    if (home === view.home && view.kept === view.chunks.length) return;
    view.home = home; view.kept = view.chunks.length;
    view.chunks.forEach((chunk, c) => {
      const near = abs(c - home) <= NEAR;
      if (near && !chunk.live) { spans(chunk); dimIn(chunk, c); } else if (!near && chunk.live) bare(chunk);
    });
  }
  function spanOf(i) { const chunk = view.chunks[floor(i / CHUNK)]; return chunk && chunk.live ? chunk.node.children[i % CHUNK] : null; }

  // ---- moving through the steps
  function showLabel() {
    const step = run.steps[view.at];
    label.textContent = !step ? WORDS.noStep : isPrefill(step) ? WORDS.prompt
        : say(WORDS.stepOf, {i: run.rows.decode[view.at], n: run.numDecode});
    scrubber.value = max(0, view.at);
    set(scrubber, {'aria-valuetext': label.textContent});
    scrubber.style.setProperty('--sv-done', (size() > 1 ? view.at / (size() - 1) * 100 : 0) + '%');
    previous.disabled = first.disabled = view.at <= 0;
    next.disabled = last.disabled = view.at >= size() - 1;
    set(live, {'aria-pressed': view.live});
  }

  function select(i, quiet) {
    const old = strip.querySelector('.sv-step.current');
    if (old) old.classList.remove('current');
    keepNear(floor(i / CHUNK));
    const now = spanOf(i);
    if (now && !quiet) now.classList.add('current');
    if (i !== view.at) view.node = null;
    view.at = i;
    showLabel();
    if (run.steps[i] !== view.shown) inspect();
  }

  function follow(scroll) {   // live: the newest step, nothing dimmed
    view.live = true;
    if (root.classList.contains('replay')) { root.classList.remove('replay'); dim(null); }
    if (size()) select(size() - 1); else showLabel();
    if (scroll !== false) strip.scrollTop = strip.scrollHeight;
    drawCharts();
  }

  function visit(i, keepPlaying) {
    if (!size()) return;
    if (!keepPlaying) pause();
    i = max(0, min(size() - 1, i));
    view.live = false;
    root.classList.add('replay');
    select(i);
    dim(i);
    const span = spanOf(i);
    if (span) reveal(span);
    drawCharts();
    if (!keepPlaying) announce.textContent = spoken(i);
  }

  function pick(i) {          // chosen by pointer: the page around may want to know
    if (i === undefined) return;
    visit(i);
    if (options.onPick) options.onPick(i);
  }

  function reveal(span) {     // scroll the strip only, never the page under the reader
    const box = strip.getBoundingClientRect(), at = span.getBoundingClientRect();
    if (at.top < box.top + 24) strip.scrollTop += at.top - box.top - 40;
        else if (at.bottom > box.bottom - 24) strip.scrollTop += at.bottom - box.bottom + 40;
  }

  function spoken(i) {
    const step = run.steps[i], end = closing(step);
    return (isPrefill(step) ? WORDS.saidPrompt : say(WORDS.said,
        {i: run.rows.decode[i], accepted: numAccepted(step), drafted: numDrafted(step)})) +
      (end && shown(end.text) ? say(WORDS.saidThen, {origin: WORDS.origins[end.origin], text: shown(end.text)}) : '');
  }

  function dim(i) {           // everything after step i; null: nothing
    const before = view.dimmed;
    view.dimmed = i;
    const home = i === null ? Infinity : floor(i / CHUNK), was = before === null ? -1 : floor(before / CHUNK);
    view.chunks.forEach((chunk, c) => { chunk.node.classList.toggle('future', c > home); if (c === home || c === was) dimIn(chunk, c); });
  }
  function dimIn(chunk) {
    if (!chunk.live) return;
    for (const span of chunk.node.children) span.classList.toggle('future', view.dimmed !== null && +span.dataset.i > view.dimmed);
  }

  function showPlay(name) { play.replaceChildren(icon(name)); set(play, {'aria-label': WORDS[name], title: WORDS[name]}); }
  function pause() { view.playing = false; clearTimeout(view.timer); showPlay('play'); }
  function start() {          // the recorded clock, scaled; steps faster than the screen are passed over, never stretched
    if (!size()) return;
    if (view.at >= size() - 1) visit(0);
    view.playing = true;
    showPlay('pause');
    let clock = run.rows.seconds[view.at], then = performance.now();
    const tick = () => {
      if (!view.playing) return;
      const now = performance.now(), seconds = run.rows.seconds;
      clock += (now - then) / 1000 * +speed.value; then = now;
      let at = view.at;
      while (at + 1 < seconds.length && seconds[at + 1] <= clock) at++;
      if (at !== view.at) visit(at, true);
      if (at >= size() - 1) return pause();
      view.timer = setTimeout(tick, max(16, min(200, (seconds[at + 1] - clock) * 1000 / +speed.value)));
    };
    tick();
  }

  // ---- figures, notes, badge
  function showHeads() {
    const stats = run.stats, words = WORDS.heads, unit = text => el('small', null, text);
    const set = (name, value, sub, mood) => { heads[name].value.replaceChildren(...[].concat(value)); heads[name].sub.textContent = sub;
        heads[name].head.dataset.mood = mood || ''; };
    const pick = (name, running) => stats && name in stats ? stats[name] : running;       // the run's own summary where it is there
    const gain = run.speedUp() || {}, value = pick('speed_up', gain.value), n = pick('num_compared_tokens', gain.tokens),
        shared = pick('shared', run.isShared);
    if (shared) set('speed_up', WORDS.dash, words.speed_up.shared);
    else if (finite(value)) set('speed_up', [value.toFixed(2), unit('×')],
        say(value < 1 ? words.speed_up.slower : words.speed_up.over, {n}), value < 1 ? 'loss' : 'gain');
    else set('speed_up', WORDS.dash, words.speed_up.wait);
    const perStep = pick('tokens_per_step', run.numDecode ? run.decodeTokens / run.numDecode : null);
    set('tokens_per_step', finite(perStep) ? perStep.toFixed(2) : WORDS.dash, finite(perStep)
        ? say(words.tokens_per_step.sub, {tokens: run.decodeTokens, steps: run.numDecode}) : '');
    const drafted = pick('num_draft_tokens', run.numDrafted), accepted = pick('num_accepted_draft_tokens', run.numAccepted);
    if (drafted) set('draft_acceptance_rate', [(accepted / drafted * 100).toFixed(0), unit('%')],
        say(run.isTree ? words.draft_acceptance_rate.tree : words.draft_acceptance_rate.sub, {accepted, drafted}));
    else set('draft_acceptance_rate', WORDS.dash, run.numDecode ? words.draft_acceptance_rate.none : '');
    const fast = pick('tokens_per_s', run.rate()), slow = pick('plain_tokens_per_s', run.plainRate());
    set('tokens_per_s', finite(fast) ? rate(fast) : WORDS.dash, finite(slow) ? say(words.tokens_per_s.plain, {n: rate(slow)})
        : words.tokens_per_s.wait);
  }

  function explain(name) {
    for (const key in heads) {
      const {about, info} = heads[key], open = key === name;
      about.hidden = !open; set(info, {'aria-expanded': open});
      if (!open) continue;
      about.replaceChildren();
      for (const from of FORMULAS_OF[key]) {
        const entry = formulas[from];
        if (!entry) continue;
        about.append(el('strong', null, entry.label || from), el('p', 'sv-formula', entry.formula));
        if (entry.note) about.append(el('p', null, entry.note));
        if (entry.source) about.append(el('p', 'sv-quiet', WORDS.source + ': ' + entry.source));
      }
      if (!about.childNodes.length) about.append(el('p', null, WORDS.heads[key].label));
    }
  }

  function showNotes() {
    const meta = run.meta, texts = [];
    if (run.note) texts.push(run.note);
    if (run.stats && 'repeating' in run.stats ? run.stats.repeating : run.isRepeating) texts.push(WORDS.repeating);
    if (run.isShared) texts.push(WORDS.sharedNote);
    if (meta.config && meta.config.lossless === false) texts.push(WORDS.lossy);
    if (isObject(meta.requested) && Object.keys(meta.requested).length) {
      const list = source => Object.keys(meta.requested).map(key => key + '=' + source[key]).join(', ');
      if (list(meta.requested) !== list(meta.config || {})) texts.push(say(WORDS.requested,
          {a: list(meta.requested), b: list(meta.config || {})}));
    }
    if (meta.dropped_nodes) texts.push(say(WORDS.dropped, {n: meta.dropped_nodes}));
    if (run.numLost) texts.push(say(WORDS.lost, {n: run.numLost}));
    const key = texts.join('\n');
    if (key !== notes.dataset.key) { notes.dataset.key = key; notes.replaceChildren(...texts.map(text => el('p', 'sv-note', text))); }
  }

  function showConfig() {     // read back from the engine, never from the form
    const meta = run.meta, own = isObject(meta.config) ? meta.config : {}, name = x => isObject(x) ? x.name || x.label || x.id : x;
    const parts = [name(meta.target), meta.drafter && '+ ' + name(meta.drafter), name(meta.method), finite(own.k) && 'K=' + own.k,
        own.tree && 'tree ' + name(own.tree), own.dtype, own.quantization, own.device, own.threads && own.threads + (own.threads === 1 ? ' thread' : ' threads')];
    config.textContent = parts.filter(part => part && (typeof part === 'string' || finite(part))).join(' · ');
  }

  function badgeOf(compare) {
    if (!compare) return run.plain.length && !run.reason && size() ? ['wait', say(WORDS.measuring, {n: run.plain.length})] : null;
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

  function showBadge() {
    const found = badgeOf(run.compare);
    badge.hidden = !found;
    if (!found) return;
    badge.className = 'sv-badge is-' + found[0];
    badge.replaceChildren(el('strong', null, found[1]));
    if (found[2]) badge.append(el('small', null, found[2]));
  }

  // ---- inspector
  function inspect() {
    const step = run.steps[view.at];
    if (!step) { inspector.replaceChildren(el('p', 'sv-empty', WORDS.emptyStep)); return; }
    const i = run.rows.decode[view.at], drafted = numDrafted(step), facts = el('span', 'sv-quiet'), time = el('div', 'sv-time'),
        names = el('div', 'sv-time-names');
    const title = el('h3', null, isPrefill(step) ? WORDS.promptTitle : drafted ? say(WORDS.stepTitle, {i}) : say(WORDS.plainTitle, {i}));
    const said = drafted ? [say(WORDS.verdictOf, {accepted: numAccepted(step), drafted})] : [];
    if (step.num_rows > 1) said.push(step.num_rows === 2 ? WORDS.sharedOne : say(WORDS.shared, {n: step.num_rows - 1}));
    if (step.source && WORDS[step.source]) said.push(WORDS[step.source]);
    facts.textContent = said.join(' · ');
    const total = stepMs(step) || 1;
    for (const name in WORDS.phases) {
      time.append(part('sv-phase is-' + name, step[name] / total));
      names.append(el('span', null, el('i', 'sv-swatch is-' + name), WORDS.phases[name] + ' ',
          el('b', 'sv-num', say(WORDS.msOf, {a: ms(step[name])}))));
    }
    const tabNames = ['outcome', 'top', 'cache'].concat(isChain(step) ? [] : ['tree']);
    const tab = tabNames.includes(view.tab) ? view.tab : 'outcome';
    const rows = tab === 'tree' ? panels.tree(step, view.threshold, value => { view.threshold = value; }) : decisionList(step, run);
    rows.addEventListener('click', event => {
      const row = event.target.closest('button.sv-row');
      if (!row) return;
      view.node = +row.dataset.node; view.tab = 'top';
      inspect();
      const again = inspector.querySelector('[data-node="' + view.node + '"]');
      if (again) again.focus();
    });
    if (view.node !== null) {
      const chosen = rows.querySelector('[data-node="' + view.node + '"]');
      if (chosen) chosen.classList.add('is-chosen');
    }
    const tabs = set(el('div', 'sv-tabs'), {role: 'tablist'});
    for (const name of tabNames) {
      const node = set(el('button', 'sv-tab', WORDS.tabs[name]),
          {type: 'button', 'data-tab': name, role: 'tab', 'aria-selected': name === tab});
      node.onclick = () => {
        view.tab = name;
        inspect();
        const again = inspector.querySelector('[data-tab="' + name + '"]');
        if (again) again.focus();
      };
      tabs.append(node);
    }
    const panel = set(panels[tab === 'tree' ? 'outcome' : tab](step, run, view.node), {role: 'tabpanel'});
    const old = inspector.querySelector('.sv-rows'), scroll = old && view.shown === step ? old.scrollTop : 0;
    inspector.replaceChildren(box('sv-inspect-head', title, facts), box('sv-times', time, names), rows, tabs, panel);
    rows.scrollTop = scroll;
    view.shown = step;
  }

  // ---- charts: figures come from Python, only numbers are filled in here
  let charts = [], figures = null, turn = null, restUntil = 0, chartState = 'none', chartDraws = 0, numResets = 0;
  const theme = () => document.body.classList.contains('dark') ? 'dark' : 'light';
  const chartKey = () => [theme(), run.id, size(), run.plain.length, view.at, view.live, view.zoom, numResets, run.stats ? 1 : 0].join();
  const onScreen = global.IntersectionObserver ? new IntersectionObserver(entries => {
    for (const entry of entries) {
      const chart = charts.find(c => c.plot === entry.target);
      if (chart) chart.hidden = !entry.isIntersecting;
    }
    drawCharts();
  }) : null;

  function prepareCharts(message) {
    if (!message.figures || !message.figures.light) { if (!figures) chartRow.replaceChildren(); return; }
    figures = message.figures;
    if (chartState === 'ready') { charts.forEach(chart => { chart.key = null; }); return; }
    if (chartState === 'loading') return;
    chartState = 'loading';
    chartRow.replaceChildren(el('p', 'sv-note', WORDS.chartsLoading));
    loadPlotly(message.plotly).then(() => {
      chartRow.replaceChildren();
      charts = Object.keys(figures.light).map(name => {
        const plot = set(el('div', 'sv-plot'), {role: 'img'}), keys = el('div', 'sv-keys'), head = el('h3');
        chartRow.append(set(box('sv-chart', box('sv-chart-head', head, keys), plot), {'data-chart': name}));
        if (onScreen) onScreen.observe(plot);
        return {name, plot, keys, head, key: null, drawnAt: 0, hidden: false};
      });
      chartState = 'ready';
      drawCharts();
    }).catch(chartsMissing);
  }

  function chartsMissing(error) {
    chartState = 'missing';
    chartRow.replaceChildren(el('p', 'sv-note', say(WORDS.noCharts, {why: error.message})));
  }

  function span() {           // decode steps [from, to) that the per-step charts show
    const n = run.records.length;
    if (view.zoom) return [max(0, floor(view.zoom[0]) - 2), min(n, ceil(view.zoom[1]) + 1)];
    const to = view.live ? n : min(n, max(WINDOW, run.rows.decode[view.at] + WINDOW / 2));
    return [max(0, to - WINDOW), to];
  }

  function series(name) {     // the `meta` of a trace in Python → [x, y]
    if (name === 'speculative') return thin([0].concat(run.rows.seconds.filter(s => s > 0)),
        [run.numTokens - run.decodeTokens].concat(run.rows.tokens.filter((_, i) => run.rows.seconds[i] > 0)));
    if (name === 'plain') return thin(run.plain.map(token => max(0, token.t_ms / 1000)), run.plain.map((_, i) => i + 1));
    const [from, to] = span(), stride = max(1, ceil((to - from) / MAX_POINTS)), xs = [], ys = [];
    for (let k = from; k < to; k += stride) { const i = run.records[k]; xs.push(k + 1);
        ys.push(name === 'plain_ms' ? run.plainMs(i) : run.rows[name] ? run.rows[name][i] : null); }
    return [xs, ys];
  }

  function drawCharts() {     // one chart per frame, the longest undrawn first
    const stale = chart => !chart.hidden && chart.key !== chartKey();
    if (turn || chartState !== 'ready' || !charts.some(stale)) return;
    turn = requestAnimationFrame(() => {
      turn = null;
      const now = performance.now(), waiting = charts.filter(stale);
      if (!waiting.length) return;
      const chart = waiting.reduce((a, b) => a.drawnAt <= b.drawnAt ? a : b),
          wait = max(restUntil, chart.drawnAt && chart.drawnAt + CHART_MS) - now;
      if (wait > 0) { turn = setTimeout(() => { turn = null; drawCharts(); }, wait); return; }
      const isFirst = !chart.drawnAt;
      try { drawOne(chart); } catch (error) { return chartsMissing(error); }
      restUntil = isFirst ? 0 : now + min(500, CHART_SHARE * (performance.now() - now));
      drawCharts();
    });
  }

  function drawOne(chart) {
    const figure = figures[theme()][chart.name], perStep = figure.layout.meta === 'per step', filled = ([x, y]) => ({x, y});
    const data = figure.data.map(trace => ({...trace, ...filled(series(trace.meta))}));
    const title = isObject(figure.layout.title) ? figure.layout.title.text : chart.name;     // another run may have other words
    if (chart.head.textContent !== title) { chart.head.textContent = title; set(chart.plot, {'aria-label': say(WORDS.chartLabel, {title})}); }
    const layout = {...figure.layout, datarevision: chartKey(), autosize: true, title: undefined, uirevision: numResets,
      xaxis: {...figure.layout.xaxis}, yaxis: {...figure.layout.yaxis}};
    let cut = false;
    if (perStep) {
      const [from, to] = span();
      layout.xaxis.range = view.zoom || [from + 0.5, max(from + 20, to) + 0.5];
      cut = chart.name === 'acceptance' && capped(data, layout);
      const cursor = run.steps[view.at] && !isPrefill(run.steps[view.at]) ? run.rows.decode[view.at] : 0;
      layout.shapes = cursor && !view.live ? [mark(cursor, layout)] : [];
    } else if (!view.live && run.steps[view.at] && run.rows.seconds[view.at] > 0
        && root.classList.contains('replay')) layout.shapes = [mark(run.rows.seconds[view.at], layout)];
    layout.annotations = (figure.layout.annotations || NONE).map(note => placed(note, data, layout)).filter(Boolean);
    const isNew = !chart.plot.data;
    chart.key = chartKey(); chart.drawnAt = performance.now(); chartDraws++;
    global.Plotly.react(chart.plot, data, layout, {responsive: true, displaylogo: false, displayModeBar: false, doubleClick: false});
    showKeys(chart, figure, cut);
    if (isNew && perStep) {
      chart.plot.on('plotly_click', event => pick(run.records[event.points[0].x - 1]));
      chart.plot.on('plotly_relayout', change => {
        if ('xaxis.range[0]' in change) view.zoom = [change['xaxis.range[0]'], change['xaxis.range[1]']];
        drawCharts();
      });
      chart.plot.on('plotly_doubleclick', () => { view.zoom = null; numResets++; drawCharts(); });
    }
  }

  const mark = (x, layout) => ({type: 'line', xref: 'x', yref: 'paper', x0: x, x1: x, y0: 0, y1: 1,
      line: {width: 1.5, dash: 'dot', color: layout.font.color}});

  function capped(data, layout) {            // many unjudged nodes of a tree must not flatten what was judged
    const of = name => (data.find(trace => trace.meta === name) || {y: NONE}).y, accepted = of('accepted'), rejected = of('rejected'),
        unjudged = of('unjudged'), mean = of('tokens_per_step');
    let judged = 1, all = 1;
    accepted.forEach((n, i) => { judged = max(judged, n + rejected[i], mean[i] || 0); all = max(all, n + rejected[i] + unjudged[i], mean[i] || 0); });
    const isCut = all > 1.9 * judged + 1;
    layout.yaxis.range = [0, (isCut ? judged * 1.35 + 0.6 : all * 1.12)];
    return isCut;
  }

  function placed(note, data, layout) {      // an annotation of the figure with its place and number, or null while there is none
    if (note.name === 'speed_up') {
      const value = run.stats ? run.stats.speed_up : (run.speedUp() || {}).value;
      return finite(value) ? {...note, visible: true, text: note.text.replace('{}', value.toFixed(2))} : null;
    }
    const trace = data.find(one => one.meta === note.name);
    let i = trace ? trace.y.length - 1 : -1;
    if (layout.meta !== 'per step' && i > 0) i = floor(i * 0.55);       // beside the middle of a rising line there is always room
    while (i >= 0 && !finite(trace.y[i])) i--;
    if (i < 0 || trace.y.length < 2) return null;
    const extra = layout.meta === 'per step' ? {xref: 'paper', x: 1, yshift: 2} : note.name === 'plain'
        ? {x: trace.x[i], xanchor: 'left', xshift: 4} : {x: trace.x[i], xshift: -4};
    return {...note, visible: true, y: trace.y[i], text: note.text.replace('{}', trace.y[i].toFixed(2)), ...extra};
  }

  function showKeys(chart, figure, cut) {
    const key = theme() + cut;
    if (chart.keysFor === key) return;
    chart.keysFor = key;
    chart.keys.replaceChildren(...figure.data.map(trace => {
      const swatch = el('i', 'sv-swatch' + (trace.stackgroup ? ' is-area' : ' is-line') + (trace.fillpattern ? ' has-pattern' : ''));
      swatch.style.setProperty('--c', trace.line.color);
      if (trace.line.dash === 'dash') swatch.classList.add('is-dash');
      return el('span', null, swatch, trace.name + (cut && trace.meta === 'unjudged' ? ' (' + WORDS.cutUnjudged + ')' : ''));
    }));
  }

  function drawTable() {
    if (tableBox.hidden) return;
    const [from, to] = span(), table = el('table'), head = el('tr'), number = x => finite(x)
        ? (Number.isInteger(x) ? String(x) : x.toFixed(2)) : WORDS.dash;
    head.append(...WORDS.tableHead.map(text => set(el('th', null, text), {scope: 'col'})));
    table.append(head);
    for (let k = from; k < to; k++) {
      const i = run.records[k], r = run.rows, line = el('tr');
      for (const value of [k + 1, r.accepted[i], r.rejected[i], r.unjudged[i], r.tokens_per_step[i], r.draft_ms[i], r.verify_ms[i],
          r.other_ms[i], run.plainMs(i)]) line.append(el('td', 'sv-num', number(value)));
      table.append(line);
    }
    tableBox.replaceChildren(table);
  }

  // ---- files
  function saveFile() {
    const url = URL.createObjectURL(new Blob([JSON.stringify(run.file())], {type: 'application/json'}));
    const link = set(el('a'), {href: url, download: 'specviz-trace.json'});
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  function openFile(file) {   // a broken file leaves the present view untouched
    if (file.size > MAX_BYTES) return complain(say(WORDS.tooLarge, {n: (file.size / 1e6).toFixed(1)}) + WORDS.stay);
    const reader = new FileReader();
    reader.onerror = () => complain(WORDS.unreadable + WORDS.stay);
    reader.onload = () => {
      let data;
      try { data = parseTrace(reader.result); } catch (error) { return complain(error.message + WORDS.stay); }
      show(data, 'file:' + file.name + ':' + Date.now(), {status: say(WORDS.opened, {name: file.name})});
    };
    reader.readAsText(file);
  }

  // ---- keyboard, pointer, theme
  root.addEventListener('keydown', event => {
    const tag = event.target.tagName, {key} = event;
    if (event.ctrlKey || event.metaKey || event.altKey || tag === 'SELECT' || tag === 'TEXTAREA' || tag === 'INPUT'
        && event.target !== scrubber) return;
    if (event.target === scrubber && key.startsWith('Arrow') || tag === 'BUTTON' && (key === ' ' || key === 'Enter')) return;
    if (key === 'Escape' && Object.values(heads).some(head => !head.about.hidden)) { explain(null); return; }
    const action = {ArrowLeft: () => visit(view.at - 1), ArrowRight: () => visit(view.at + 1), Home: () => visit(0),
        End: () => visit(size() - 1),
                    Escape: () => live.click(), ' ': () => play.click(), Enter: () => inspector.focus()}[key];
    if (action) { event.preventDefault(); action(); }
  });
  root.addEventListener('click', event => { if (!event.target.closest('.sv-info, .sv-about')) explain(null); });
  strip.addEventListener('click', event => {
    const step = event.target.closest('.sv-step'), chunk = event.target.closest('.sv-chunk');
    if (!chunk) return;
    pick(+(step ? step.dataset.i : chunk.dataset.first));
  });
  let scrolling = false;
  strip.addEventListener('scroll', () => {   // bare text that scrolls into sight becomes tokens again
    if (scrolling || view.chunks.length <= 2 * NEAR + 1) return;
    scrolling = true;
    requestAnimationFrame(() => {
      scrolling = false;
      const middle = strip.scrollTop + strip.clientHeight / 2;
      let low = 0, high = view.chunks.length - 1;
      while (low < high) {
        const mid = (low + high + 1) >> 1;
        if (view.chunks[mid].node.offsetTop <= middle) low = mid; else high = mid - 1;
      }
      keepNear(low);
    });
  }, {passive: true});
  new MutationObserver(() => drawCharts()).observe(document.body, {attributes: true, attributeFilter: ['class']});

  reset(undefined, {});
  showLabel();
  root.dataset.ready = '1';
  return {
    take, visit, follow, open: openFile,
    trace: () => run.file(),
    state: () => ({run: run.id, seq: run.seq, numSteps: size(), numDecode: run.numDecode, numPlain: run.plain.length,
        numTokens: run.numTokens, numAccepted: run.numAccepted, numDrafted: run.numDrafted,
      numLost: run.numLost, numHeld: held.size, at: view.at, live: view.live, playing: view.playing, text: run.text,
          speedUp: run.speedUp(), charts: chartState, chartDraws,
      numSpans: strip.querySelectorAll('.sv-tok').length, pending: view.pending}),
  };
}

const FORMULAS_OF = {speed_up: ['speed_up'], tokens_per_step: ['tokens_per_step'],
    draft_acceptance_rate: ['draft_acceptance_rate', 'acceptance_rate_alpha'], tokens_per_s: ['tokens_per_s', 'plain_tokens_per_s']};

function style(css) {         // once per page
  if (document.getElementById('specviz-style')) return;
  const node = el('style', null, css);
  node.id = 'specviz-style';
  document.head.append(node);
}

global.SpecViz = {mount, style, parseTrace, WORDS};
})(window);
