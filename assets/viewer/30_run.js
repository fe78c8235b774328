
// ---- a run and its running sums; `stats` of the `end` message is the truth where it is there ------------------------
class Run {
  constructor(id, meta) {
    Object.assign(this, {id, meta: meta || {}, seq: -1, steps: [], plain: [], stats: null, compare: null, reason: '', note: '', numLost: 0,
      numTokens: 0, numDrafted: 0, numAccepted: 0, numDecode: 0, decodeTokens: 0, decodeMs: 0, isShared: false, mostAtOnce: 1, disturbed: '',
          isTree: false,
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
    if (step.num_rows > 1 && !isPrefill(step)) { this.isShared = true; this.mostAtOnce = Math.max(this.mostAtOnce, step.num_rows); }
    if (!isPrefill(step)) this.disturbed = this.disturbed || step.disturbed || '';
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
      for (let k = 0; k < n; k++) {
        const token = this.plain[++gain.tokens];
        gain.plain += token.ms;
        this.disturbed = this.disturbed || token.disturbed || '';
      }
      gain.took += stepMs(step); gain.step++;
    }
    return gain.tokens && gain.took > 0 && !this.isShared && !this.disturbed ? {value: gain.plain / gain.took, tokens: gain.tokens} : null;
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
