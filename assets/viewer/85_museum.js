// The table model's experiments: asking for them, and the pictures of what came out. It knows states as `specviz.museum` makes them.
WORDS.museum = {
  waiting: 'waiting: {n} before this one', starting: 'starting …', drawing: '{n} of {of} texts', fractions: 'working out the fractions …', writing: 'writing …',
  recorded: 'recorded result', live: 'just run here', failed: 'This could not be run: {why}', noServer: 'Recorded results. To run it yourself, start specviz on your machine.',
  fits: 'Green: it fits the target’s law', off: 'Red: this is not the target’s law', same: 'Green: the same text', differs: 'Red: another text from token {n} on',
  chance: 'p {p}: what chance alone would do', noChance: 'p {p}: chance does not do this', limit: 'one in a million', certain: 'p = 1', never: 'p = 10⁻¹²',
  meter: 'The meter: p-value {p}', gauge: ['χ²', 'degrees of freedom', 'p-value', 'distance from the law'],
  gaugeText: ['tokens the same', 'first difference'], none: 'none', wordsTitle: 'The first word', wordsNote: 'the target’s law over what was drawn, {n} texts',
  wordsHead: ['word', 'law over drawn', 'due', 'fractions say'], pairsTitle: 'All 64 texts of two words', pairsNote: 'rows: first word, columns: second; ▲ too often, ▼ too rarely, beyond 3.5 standard deviations',
  pair: '“{text}”: expected {a}, drawn {b}', equal: 'Every way that the dice can fall, in fractions: all {of} texts have exactly the target’s probability.',
  unequal: 'Every way that the dice can fall, in fractions: {n} of {of} texts have another probability than the target gives them; the laws are {d} apart.',
  noFractions: 'Its threshold has a logarithm in it, so there is no law in fractions; the draws alone tell.', sameText: 'Moreover, {n} of {of} texts are plain sampling’s own with their seed, word for word.',
  perStep: '{n} words per step', upper: 'upper line: with drafts', lower: 'lower line: plain decoding', end: 'end', missing: 'nothing',
};

const share = x => (100 * x).toFixed(x < 0.0995 ? 1 : 0) + ' %';
function chanceText(p) {
  if (p >= 0.001) return p.toFixed(3);
  if (!(p > 0)) return '< 10⁻³⁰⁰';
  const power = floor(Math.log10(p)), digits = String(-power).replace(/\d/g, d => '⁰¹²³⁴⁵⁶⁷⁸⁹'[d]);
  return (p / 10 ** power).toFixed(1) + '·10⁻' + digits;
}

// Runs one experiment and tells its states: `told({state?, note?, error?, done})`. A later one replaces it.
function makeDesk(host) {
  let turn = 0;
  const ask = message => Promise.resolve(host.options.museum(message)).then(answer => {
    if (!isObject(answer)) throw new Error(WORDS.unreadable);
    if (answer.error && !('done' in answer)) throw new Error(answer.error);
    return answer;
  });
  const later = wait => new Promise(resolve => setTimeout(resolve, wait));
  async function run(request, told) {
    const mine = ++turn;
    try {
      const {job} = await ask({do: 'start', request});
      while (mine === turn) {
        const answer = await ask({do: 'look', job}), {state, done} = answer;
        if (mine !== turn) return;
        const n = state && state.kind === 'law' ? state.counts.reduce((a, b) => a + b, 0) : 0, words = WORDS.museum;
        const note = answer.waiting ? say(words.waiting, {n: answer.waiting}) : !state ? words.starting : state.kind === 'text' ? words.writing
            : n < state.of ? say(words.drawing, {n, of: state.of}) : words.fractions;
        if (answer.error) throw new Error(answer.error);
        told({state, note: done ? '' : note, done});
        if (done) return;
        await later(200);
      }
    } catch (error) { if (mine === turn) told({error: error.message, done: true}); }
  }
  return {canRun: !!host.options.museum, run, stop: () => { turn++; },
    recorded: name => host.fetch ? host.fetch('museum').then(data => isObject(data.results) && data.results[name] || null) : Promise.resolve(null)};
}

const greenOf = state => state.kind === 'text' ? state.index === null : !state.reading || state.reading.fits;

function meterPicture(state) {
  const words = WORDS.museum, green = greenOf(state), node = box('sv-meter ' + (green ? 'is-green' : 'is-red')), isText = state.kind === 'text';
  const p = isText ? null : state.reading ? state.reading.p_value : 1, at = isText ? (green ? 0.03 : 0.97) : clamp(-Math.log10(max(p, 1e-13)) / 12);
  const verdict = isText ? (green ? words.same : say(words.differs, {n: state.index + 1})) : green ? words.fits : words.off;
  const scale = set(box('sv-meter-scale', el('i', 'sv-meter-red'), el('i', 'sv-meter-needle')), {role: 'img', 'aria-label': isText ? verdict : say(words.meter, {p: chanceText(p)})});
  scale.style.setProperty('--at', 100 * at + '%');
  const marks = isText ? NONE : [box('sv-meter-marks', el('span', null, words.certain), el('span', null, words.limit), el('span', null, words.never))];
  const n = isText ? (state.index === null ? state.tokens.length : state.index) : 0;
  const facts = isText ? [[words.gaugeText[0], n + ' / ' + max(state.tokens.length, state.plain.length)], [words.gaugeText[1], state.index === null ? words.none : state.index + 1]]
    : state.reading ? [state.reading.chi_square.toFixed(1), state.reading.freedom, chanceText(p), share(state.reading.distance)].map((value, i) => [words.gauge[i], value])
      : words.gauge.map(name => [name, WORDS.dash]);
  node.append(box('sv-meter-head', el('strong', null, verdict), !isText && state.reading && el('span', 'sv-quiet', say(green ? words.chance : words.noChance, {p: (p > 0 ? '= ' : '') + chanceText(p)}))),
      scale, ...marks, el('dl', 'sv-meter-facts', ...facts.map(([name, value]) => el('div', null, el('dt', null, name), el('dd', 'sv-num', String(value))))));
  return node;
}

function wordsPicture(state) {        // the first word: law over draws, and what the fractions say
  const words = WORDS.museum, size = state.words.length, n = state.counts.reduce((a, b) => a + b, 0), sums = list => state.words.map((_, i) =>
      list.slice(i * size, (i + 1) * size).reduce((a, b) => a + b, 0));
  const due = sums(state.expected), got = sums(state.counts).map(count => n ? count / n : 0), top = max(...due, ...got), exact = state.exact;
  const bar = (value, cls) => { const fill = el('i', cls); fill.style.width = 100 * value / top + '%'; return fill; };
  const rows = state.words.map((word, i) => el('tr', null, el('th', 'sv-word', shown(word)),
      el('td', 'sv-law', el('span', null, bar(due[i], 'is-law'), el('b', 'sv-num', share(due[i]))), el('span', null, bar(got[i], 'is-drawn'), el('b', 'sv-num', n ? share(got[i]) : WORDS.dash))),
      ...exact ? [el('td', 'sv-num', exact.words[i][0]), el('td', 'sv-num' + (exact.words[i][0] === exact.words[i][1] ? '' : ' is-off'), exact.words[i][1])]
        : [el('td', 'sv-quiet', WORDS.dash), el('td', 'sv-quiet', WORDS.dash)]));
  const head = el('tr', null, ...words.wordsHead.map(text => set(el('th', null, text), {scope: 'col'})));
  return box('sv-exhibit', el('h4', null, words.wordsTitle), el('p', 'sv-quiet', say(words.wordsNote, {n})), el('table', 'sv-words' + (greenOf(state) ? '' : ' is-red'), el('thead', null, head), el('tbody', null, ...rows)));
}

function pairsPicture(state) {        // 64 texts: how far each count is from what is due, in standard deviations
  const words = WORDS.museum, size = state.words.length, n = state.counts.reduce((a, b) => a + b, 0), grid = set(box('sv-pairs'), {role: 'img', 'aria-label': words.pairsTitle});
  grid.append(el('span'), ...state.words.map(word => el('span', 'sv-pairs-head', shown(word))));
  state.words.forEach((first, i) => {
    grid.append(el('span', 'sv-pairs-side', shown(first)));
    state.words.forEach((second, k) => {
      const law = state.expected[i * size + k], due = n * law, count = state.counts[i * size + k], z = due ? (count - due) / Math.sqrt(due * (1 - law)) : 0, far = abs(z) > 3.5;
      const cell = el('i', z > 0 ? 'is-over' : 'is-under', far ? (z > 0 ? '▲' : '▼') : '');
      cell.style.setProperty('--far', round2(min(1, abs(z) / 8)));
      cell.title = say(words.pair, {text: (first + second).trim(), a: due.toFixed(0), b: count});
      grid.append(cell);
    });
  });
  return box('sv-exhibit', el('h4', null, words.pairsTitle), el('p', 'sv-quiet', words.pairsNote), grid);
}
const round2 = x => Math.round(100 * x) / 100;

function exactNote(state) {
  const words = WORDS.museum, {exact} = state, texts = [];
  if (exact) texts.push(exact.equal ? say(words.equal, {of: exact.of}) : say(words.unequal, {n: exact.texts, of: exact.of, d: share(exact.distance)}));
  else if (exact === null && state.trial.fault) texts.push(words.noFractions);
  if (finite(state.num_same) && state.num_steps) texts.push(say(words.sameText, {n: state.num_same, of: state.counts.reduce((a, b) => a + b, 0)}));
  return set(box('sv-exact-note' + (exact && exact.equal ? ' is-equal' : ''), ...texts.map(text => el('p', null, text))), texts.length ? {} : {'data-empty': 1});
}

function lawPicture(state) { return box('sv-exhibits', wordsPicture(state), pairsPicture(state)); }

// Two texts, token above token. pairs: [ours, theirs], each a node or null; from: number of the first; index: the first difference or null.
function alignedTexts(pairs, from, index, pick) {
  const words = WORDS.museum, node = el('div', 'sv-aligned');
  pairs.forEach(([ours, theirs, breaks], i) => {
    const at = from + i, cls = index === null || at < index ? '' : at === index ? ' is-first' : ' is-after';
    const none = () => at === index ? el('em', null, words.missing) : el('span', null, '\u00a0');
    const pair = set(el(pick ? 'button' : 'span', 'sv-both' + cls, ours || none(), theirs || none()), {'data-at': at});
    if (pick) { pair.type = 'button'; pair.tabIndex = -1; pair.onclick = () => pick(at); }
    node.append(pair);
    if (breaks) node.append(el('br'));
  });
  return node;
}

function writtenPicture(state) {      // both texts of the tiny network
  const words = WORDS.museum, piece = text => text === '' ? el('span', 'sv-chip', words.end) : el('span', null, text), n = max(state.tokens.length, state.plain.length);
  const pairs = Array.from({length: n}, (_, i) => [i < state.tokens.length && piece(state.tokens[i]), i < state.plain.length && piece(state.plain[i])]);
  return box('sv-exhibit', el('p', 'sv-quiet', words.upper + ' · ' + words.lower), alignedTexts(pairs, 0, state.index));
}
