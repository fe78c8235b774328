// Runs as rows of a comparison: figures, small pictures, and the table as JSON, CSV and Markdown. It knows nothing of how runs came about.
WORDS.table_of = {
  columns: {name: 'method', tokens_per_s: 'tokens/s', speed_up: 'speed-up', tokens_per_step: 'tokens per step', draft_acceptance_rate: 'drafts accepted',
    draft_ms: 'draft ms', verify_ms: 'verify ms', identical: 'text'},
  identical: 'identical', baseline: 'baseline', partly: 'identical so far', tie: 'rounding tie at {n}', differs: 'differs at {n}', sampling: 'sampled', lossy: 'lossy', prompt: 'prompt', run: 'setup',
  accepted: 'Accepted drafts in each step, of at most {n}', tokens: '{n} tokens in {s} s; grey: plain decoding',
};
const ROW_FORMULA = {tokens_per_s: 'tokens_per_s', speed_up: 'speed_up', tokens_per_step: 'tokens_per_step', draft_acceptance_rate: 'draft_acceptance_rate',
  draft_ms: 'step_times', verify_ms: 'step_times'};

function rowOf(run) {         // numbers, or null where there is nothing to measure
  const stats = run.stats || {}, steps = run.records.map(i => run.steps[i]), gain = stats.speed_up !== undefined ? stats.speed_up : (run.speedUp() || {}).value;
  const drafted = run.numDrafted;
  return {name: methodName(run), tokens_per_s: run.rate(), speed_up: finite(gain) ? gain : null, tokens_per_step: run.numDecode ? run.decodeTokens / run.numDecode : null,
    draft_acceptance_rate: drafted ? run.numAccepted / drafted : null, draft_ms: mean(steps.map(step => step.draft_ms)), verify_ms: mean(steps.map(step => step.verify_ms)),
    identical: textWord(run.compare), prompt: promptOf(run), run: setupOf(run)};
}
function plainRowOf(run) {
  const took = run.plain.slice(1).map(token => token.ms);
  return {name: WORDS.shelf.plain, tokens_per_s: run.plainRate(), speed_up: 1, tokens_per_step: 1, draft_acceptance_rate: null, draft_ms: null, verify_ms: mean(took),
    identical: WORDS.table_of.baseline, prompt: promptOf(run), run: setupOf(run)};
}
function textWord(compare) {
  const words = WORDS.table_of;
  if (!isObject(compare)) return '';
  if (compare.mode === 'lossy') return words.lossy;
  if (compare.mode === 'sampling') return words.sampling;
  if (compare.identical === true) return compare.partial ? words.partly : words.identical;
  return compare.identical === false && finite(compare.index) ? say(compare.tie ? words.tie : words.differs, {n: compare.index + 1}) : '';
}
const CELLS = {tokens_per_s: x => rate(x), speed_up: x => x.toFixed(2) + '×', tokens_per_step: x => x.toFixed(2), draft_acceptance_rate: x => (x * 100).toFixed(0) + ' %',
  draft_ms: x => ms(x), verify_ms: x => ms(x)};
const cellText = (name, value) => name in CELLS ? finite(value) ? CELLS[name](value) : WORDS.dash : value || WORDS.dash;

// Texts of a file are not trusted: a cell that begins like a formula would be run by a spreadsheet.
const quoted = value => { const text = value === null ? '' : String(value); return '"' + (typeof value === 'string' && /^[=+\-@\t\r]/.test(text) ? "'" : '') + text.replace(/"/g, '""') + '"'; };
function tableText(rows, kind) {
  const names = Object.keys(WORDS.table_of.columns), all = [...names, 'run', 'prompt'];
  if (kind === 'json') return JSON.stringify({format: 'specviz-comparison', version: 1, rows}, null, 1);
  if (kind === 'csv') return [all.map(quoted).join(','), ...rows.map(row => all.map(name => quoted(row[name])).join(','))].join('\r\n') + '\r\n';
  const cell = text => String(text).replace(/[\\`*_[\]<>|]/g, '\\$&').replace(/\s+/g, ' '), line = cells => '| ' + cells.join(' | ') + ' |';
  return [line(names.map(name => WORDS.table_of.columns[name])), line(names.map(name => name in CELLS ? '--:' : '---')),
    ...rows.map(row => line(names.map(name => cell(cellText(name, row[name])))))].join('\n') + '\n\n' + [...new Set(rows.map(row => row.run))].map(cell).join('  \n') + '\n';
}

// Small pictures, all of one comparison on the same scales.
function acceptedPicture(run, most) {        // a bar per step: accepted over drafted
  const steps = run.records.map(i => run.steps[i]), W = 220, H = 44, stride = ceil(steps.length / W), picture = svg('svg', {viewBox: `0 0 ${W} ${H}`, class: 'sv-spark', role: 'img',
      preserveAspectRatio: 'none', 'aria-label': say(WORDS.table_of.accepted, {n: most})});
  const shown = steps.filter((_, i) => i % stride === 0), w = W / max(20, shown.length);
  shown.forEach((step, i) => {
    const drafted = min(most, numDrafted(step)) / most * H, accepted = min(most, numAccepted(step)) / most * H, x = (i * w).toFixed(2), width = max(0.4, w * 0.82).toFixed(2);
    if (drafted) picture.append(svg('rect', {x, width, y: (H - drafted).toFixed(2), height: drafted.toFixed(2), class: 'is-drafted'}));
    if (accepted) picture.append(svg('rect', {x, width, y: (H - accepted).toFixed(2), height: accepted.toFixed(2), class: 'is-accepted'}));
  });
  return picture;
}
function tokensPicture(run, endMs, most) {   // tokens over time, plain decoding in grey
  const W = 220, H = 44, line = timelineOf(run, false), plain = timelineOf(run, true);
  const path = ({times}) => { const stride = max(1, ceil(times.length / 120)); return 'M0,' + H + times.map((t, i) => i % stride && i < times.length - 1 ? '' : ` L${(t / endMs * W).toFixed(1)},${(H - (i + 1) / most * H).toFixed(1)}`).join(''); };
  return svg('svg', {viewBox: `0 0 ${W} ${H}`, class: 'sv-spark', role: 'img', preserveAspectRatio: 'none', 'aria-label': say(WORDS.table_of.tokens, {n: run.decodeTokens, s: (line.endMs / 1000).toFixed(2)})},
    svg('path', {d: path(plain), class: 'is-plain'}), svg('path', {d: path(line), class: 'is-run'}));
}
