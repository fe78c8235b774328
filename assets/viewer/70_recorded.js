// What a recorded run would have come to with another draft length or other costs: specviz/what_if.py in the browser, number for number
// (a test compares them). Pure functions of a trace file's records; the reasons stand there.
const mean = list => list.length ? list.reduce((sum, x) => sum + x, 0) / list.length : null;
function middle(list) {
  const sorted = list.slice().sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

function levelsOf(step) {     // drafted tokens by depth; where nodes are unknown a chain is supposed; window nodes are no guesses
  const depths = [], counts = [];
  for (const node of nodesOf(step)) {
    const depth = node.parent < 0 ? 0 : depths[node.parent] + 1;
    depths.push(depth);
    if (node.state === 'window') continue;
    while (counts.length <= depth) counts.push(0);
    counts[depth]++;
  }
  return nodesOf(step).length ? counts : new Array(step.num_drafted || 0).fill(1);
}
const numFed = step => step.kv && step.kv.target ? step.kv.target.fed : 1 + (nodesOf(step).length || step.num_drafted || 0);

function guessesOf(meta, decode) {           // per decoded token: true, false, or null where nobody asked; null where the run does not tell
  const sampling = isObject(meta.sampling) ? meta.sampling : meta, promise = meta.promise === undefined ? 'distribution' : meta.promise;
  if (meta.guesses_by_text !== true || !(promise === 'text' || promise === 'distribution' && sampling.temperature === 0)) return null;
  if (!decode.every(isChain)) return null;
  return decode.flatMap(step => emittedOf(step).map(token => token.origin === 'draft' ? true : token.origin === 'correction'
      || step.draft_stop === 'confidence' ? false : null));
}

function expectedSteps(known, depth, chance) {      // chance 0: the most steps, 1: the fewest
  const ahead = new Float64Array(known.length + 1);
  for (let start = known.length - 1; start >= 0; start--) {
    let total = 1, reached = 1;
    for (let length = 0; length <= depth && start + length + 1 < known.length && reached; length++) {
      const guess = known[start + length], right = length === depth ? 0 : guess === null ? chance : +guess;
      total += reached * (1 - right) * ahead[start + length + 1];
      reached *= right;
    }
    ahead[start] = total;
  }
  return ahead[0];
}

function checkedCost(cost) {  // a table as specviz/cost.py writes it, or null
  const rising = (list, least) => Array.isArray(list) && list.length > 0 && list.every((x, i) => Number.isInteger(x) && x >= (i ? list[i - 1] + 1 : least));
  const times = x => Array.isArray(x) && x.every(ms => finite(ms) && ms > 0);
  const good = isObject(cost) && rising(cost.num_tokens, 1) && cost.num_tokens[0] === 1 && rising(cost.context_lengths, 0) && Array.isArray(cost.verify_ms)
      && cost.verify_ms.length === cost.context_lengths.length && cost.verify_ms.every(row => times(row) && row.length === cost.num_tokens.length)
      && (cost.draft_ms === null || finite(cost.draft_ms) && cost.draft_ms > 0) && typeof cost.measured === 'string';
  return good ? cost : null;
}
function costRow(cost, context) {            // T(M) at a context length: linear between the measured ones, the last slope beyond
  const lengths = cost.context_lengths;
  if (lengths.length === 1 || context <= lengths[0]) return cost.verify_ms[0];
  let i = lengths.length - 2;
  while (i > 0 && lengths[i] > context) i--;
  const share = max(0, (context - lengths[i]) / (lengths[i + 1] - lengths[i]));
  return cost.verify_ms[i].map((low, k) => low + share * (cost.verify_ms[i + 1][k] - low));
}

class Recorded {              // see what_if.Recorded: depth, guesses, unitMs, levelMs, overheadMs, costs ("measured", "steps" or "")
  constructor(run) {
    const decode = this.decode = run.steps.filter(step => !isPrefill(step)), {meta, plain} = run;
    this.guesses = guessesOf(meta, decode);
    this.levels = decode.map(levelsOf);
    this.accepted = decode.map(step => finite(step.num_accepted) ? step.num_accepted : count(step, 'accepted'));
    this.depth = max(0, ...this.levels.map(levels => levels.length));
    this.isTree = !decode.every(isChain);
    this.alphas = alphaByDepth(decode);
    const judged = this.alphas.reduce((sum, one) => sum + one.judged, 0);
    this.alpha = judged ? this.alphas.reduce((sum, one) => sum + one.accepted, 0) / judged : 0;
    this.unitMs = mean(plain.slice(1).map(token => token.ms));
    const numLevels = this.levels.reduce((sum, levels) => sum + levels.length, 0);
    this.levelMs = numLevels ? decode.reduce((sum, step) => sum + step.draft_ms, 0) / numLevels : 0;
    this.overheadMs = mean(decode.map(step => step.other_ms)) || 0;
    this.costs = ''; this.points = [];
    this.context = 0;
    const lengths = decode.filter(step => step.kv && step.kv.target).map(step => step.kv.target.before);
    if (lengths.length) this.context = floor(mean(lengths) + 0.5);
    if (this.unitMs && decode.length && decode.every(step => !(step.num_rows > 1) && step.source !== 'aggregate')) this.verification(meta.cost);
  }

  verification(given) {
    const cost = checkedCost(given), singleMs = this.unitMs - this.overheadMs;
    if (cost && cost.num_tokens.length > 1) {
      const row = costRow(cost, this.context);
      this.costs = 'measured';
      this.points = cost.num_tokens.map((size, i) => [size, row[i] / row[0]]);
      return;
    }
    const sizes = new Map();
    for (const step of this.decode) sizes.set(numFed(step), (sizes.get(numFed(step)) || []).concat(step.verify_ms));
    const points = [...sizes].filter(([size]) => size > 1).sort((a, b) => a[0] - b[0]).map(([size, times]) => [size, middle(times) / singleMs]);
    if (points.length && singleMs > 0) { this.costs = 'steps'; this.points = [[1, 1], ...points]; }
  }

  v(numTokens) {
    const {points} = this;
    if (!points.length) return null;
    const found = points.findIndex(([size]) => size >= numTokens), after = found < 0 ? points.length - 1 : found;
    const [left, low] = points[max(0, after - 1)], [right, high] = points[max(1, after)];
    return low + (numTokens - left) / (right - left) * (high - low);
  }

  outcome(depth, draftFactor = 1, verifyFactor = 1) {
    if (!depth || !this.decode.length) return {depth: 0, tokensPerStep: 1, least: 1, most: 1, exact: true, speedUp: this.unitMs ? 1 : null};
    const numTokens = this.decode.reduce((sum, step) => sum + emittedOf(step).length, 0);
    let tokensPerStep, least = null, most = null;
    if (!this.guesses) tokensPerStep = this.estimated(depth);
    else [tokensPerStep, least, most] = [this.alpha, 0, 1].map(chance => numTokens / expectedSteps(this.guesses, depth, chance));
    return {depth, tokensPerStep, least, most, exact: least !== null && least === most,
        speedUp: this.speedUp(depth, tokensPerStep, draftFactor, verifyFactor)};
  }

  estimated(depth) {
    let longer = 0;
    for (let i = 1; i <= depth - this.depth; i++) longer += this.alpha ** i;
    return 1 + mean(this.accepted.map(n => min(n, depth))) + mean(this.accepted.map(n => +(n === this.depth))) * longer;
  }

  speedUp(depth, tokensPerStep, draftFactor, verifyFactor) {
    if (!this.points.length) return null;
    const singleMs = this.unitMs - this.overheadMs;
    let tookMs = 0;
    this.decode.forEach((step, i) => {
      const levels = this.levels[i], grows = levels.length === this.depth && this.depth < depth;
      const sum = list => list.reduce((a, b) => a + b, 0), numLevels = grows ? depth : min(levels.length, depth);
      const fed = numFed(step) - sum(levels) + sum(levels.slice(0, depth)) + (grows ? depth - levels.length : 0);
      tookMs += draftFactor * this.levelMs * numLevels + singleMs * (1 + verifyFactor * (this.v(fed) - 1)) + this.overheadMs;
    });
    return this.unitMs * tokensPerStep * this.decode.length / tookMs;
  }

  best(deepest, draftFactor, verifyFactor) {
    const all = Array.from({length: deepest + 1}, (_, depth) => this.outcome(depth, draftFactor, verifyFactor));
    return all.every(one => one.speedUp !== null) ? all.reduce((a, b) => b.speedUp > a.speedUp ? b : a) : null;
  }

  breakEven(numTokens) {      // tokens that a step with a chain of M - 1 drafts must give to take as long as plain decoding
    return ((numTokens - 1) * this.levelMs + (this.unitMs - this.overheadMs) * this.v(numTokens) + this.overheadMs) / this.unitMs;
  }
}

function alphaByDepth(decode) {              // [{judged, accepted}] by depth: parents with a judged child, and those with an accepted one
  const found = [];
  for (const step of decode) {
    const depths = [], parents = new Map();
    for (const node of nodesOf(step)) {
      depths.push(node.parent < 0 ? 0 : depths[node.parent] + 1);
      if (node.state === 'accepted' || node.state === 'rejected') parents.set(node.parent, parents.get(node.parent) || node.state === 'accepted');
    }
    for (const [parent, hit] of parents) {
      const depth = parent < 0 ? 0 : depths[parent] + 1;
      while (found.length <= depth) found.push({judged: 0, accepted: 0});
      found[depth].judged++;
      found[depth].accepted += hit;
    }
  }
  return found;
}

let lastRecorded = {key: '', value: null};   // worked out once per state of a run, whoever asks
function recordedOf(run) {
  const key = [run.id, run.steps.length, run.plain.length].join();
  if (lastRecorded.key !== key || lastRecorded.run !== run) lastRecorded = {key, run, value: new Recorded(run)};
  return lastRecorded.value;
}
