// The view Race: two recorded timelines, each with a stopwatch, replayed on one clock. Nothing is timed here.
WORDS.race = {
  title: 'Race', lane: 'Lane {n}', start: 'Start', go: 'Continue', again: 'Again', pause: 'Pause', bar: 'Time of the race', tokens: '{n} of {of} tokens', rate: '{n} tokens/s',
  first: 'first', ready: 'Ready: {n} tokens each.', level: 'Level.', ahead: '{name}: ahead by {n}.', aheadOne: '{name}: ahead by one token.',
  won: '{name} finished first: {n} tokens in {a} s against {b} s, {r}× as fast.', even: 'A dead heat: {n} tokens in {a} s each.', lost: 'Drafting lost time here.',
  overtook: '{name} is ahead for good from token {n} on, at {t} s.', always: '{name} is ahead from the first token to the last.', overtakes: 'overtaking', finish: 'finish',
  here: 'Recorded one after the other on this machine, never at the same time.', same: 'Recorded one after the other on the same machine, never at the same time.',
  other: 'Recorded on different machines or in different set-ups: the race compares those too.', unknown: 'The recordings do not name their machines.',
  textsDiffer: 'The two texts differ: this is a race of speeds, not of the same words.', promptsDiffer: 'The prompts differ, and so do the texts: more or less may be easy to guess.',
  noPlain: 'Plain decoding was not measured in this run. Choose another run for this lane.', shared: 'Steps of this run were shared with other answers: its times are not its own.',
  empty: 'No run to race yet.', prefill: 'Reading the prompt is not part of the race.',
};
const RACE_TOKENS = 300;      // tokens kept on the screen in each lane

function timelineOf(run, isPlain) {          // [{ms, tokens}] from the first decode step on, and the milliseconds of each token
  const blocks = [];
  let clock = 0;
  if (isPlain) for (const token of run.plain.slice(1)) blocks.push({ms: clock += token.ms, tokens: [{...token, origin: 'plain'}]});
  else for (const i of run.records) { clock += stepMs(run.steps[i]); blocks.push({ms: clock, tokens: emittedOf(run.steps[i])}); }
  const tokens = blocks.flatMap(block => block.tokens), times = blocks.flatMap(block => block.tokens.map(() => block.ms));
  const lead = isPlain ? run.plain.slice(0, 1) : run.steps.filter(isPrefill).flatMap(emittedOf);
  return {run, isPlain, tokens, times, lead, endMs: clock, name: isPlain || isPlainRun(run) ? WORDS.shelf.plain : methodName(run)};
}

function raceResult(a, b) {   // over the tokens that both have: who is ahead for good, from which token on, and both times
  const n = min(a.times.length, b.times.length);
  let leader = null, from = 0;
  for (let i = 0; i < n; i++) {
    const now = a.times[i] < b.times[i] ? a : b.times[i] < a.times[i] ? b : leader;
    if (now !== leader) { leader = now; from = i; }
  }
  return {n, leader, from, aMs: n ? a.times[n - 1] : 0, bMs: n ? b.times[n - 1] : 0};
}

const {round} = Math;
VIEWS.push({name: 'race', title: WORDS.race.title, controls: false, charts: false, mount(host) {
  const words = WORDS.race, {shelf} = host, capital = text => text.replace(/^./u, c => c.toUpperCase());
  const lanes = [makeLane(0), makeLane(1)];
  let result = null, clock = 0, endMs = 1, playing = false, drawnFor = null, frame = 0;

  function makeLane(n) {
    const select = set(el('select', 'sv-speed sv-pick'), {'aria-label': say(words.lane, {n: n + 1})}), setup = el('span', 'sv-quiet'), watch = el('span', 'sv-watch sv-num'),
        rate = el('span', 'sv-num'), count = el('span', 'sv-num sv-quiet'), first = el('span', 'sv-tag is-exact', words.first), text = el('div', 'sv-race-text'),
        fill = el('span', 'sv-fill'), note = el('p', 'sv-quiet sv-lane-note');
    const lane = {n, select, setup, watch, rate, count, first, text, fill, note, shown: 0, line: null, chosen: null,
      node: box('sv-lane', select, setup, box('sv-lane-head', watch, first, box('sv-lane-rate', rate, count)), el('span', 'sv-track', fill), text, note)};
    select.onchange = () => choose(lane, select.value);
    return lane;
  }

  const play = host.button('sv-primary', words.start, () => playing ? pause() : start()), scrub = set(el('input', 'sv-range'), {type: 'range', min: 0, max: 1000, value: 0,
      'aria-label': words.bar}), now = el('output', 'sv-race-now sv-num'), speed = set(el('select', 'sv-speed'), {'aria-label': WORDS.speed}), marks = box('sv-race-marks');
  for (const [value, text] of [[0.25, '¼×'], [0.5, '½×'], [1, '1×'], [2, '2×'], [4, '4×']]) speed.append(set(el('option', null, text), {value}));
  speed.value = '1';
  scrub.oninput = () => { const at = scrub.value / 1000 * endMs; pause(); seek(at); };
  const verdict = el('p', 'sv-verdict-line'), notes = box('sv-race-notes');
  const body = box('sv-race', box('sv-lanes', lanes[0].node, lanes[1].node), box('sv-race-bar', play, box('sv-race-track', marks, scrub), now, speed), verdict, notes),
      none = el('p', 'sv-note', words.empty);

  // ---- who runs
  function fillMenus() {
    for (const lane of lanes) {
      const group = (label, options) => options.length ? [set(el('optgroup', null, ...options.map(([value, text]) => set(el('option', null, text), {value}))), {label})] : [];
      const two = (run, id) => [[id + '|', capital(runTitle(run))], ...(run.plain.length > 2 ? [[id + '|plain', [capital(WORDS.shelf.plain), run.meta.title || clipped(promptOf(run), 32)].filter(Boolean).join(' · ')]] : [])];
      lane.select.replaceChildren(...group(WORDS.shelf.now, host.run.numDecode ? two(host.run, 'now') : []), ...group(WORDS.shelf.page, shelf.runs().flatMap(run => two(run, 'run:' + run.id))),
          ...group(WORDS.shelf.recorded, shelf.names().map(({name, title}) => ['rec:' + name + '|', title])), set(el('option', null, WORDS.shelf.file), {value: 'file'}));
      if (lane.chosen && ![...lane.select.options].some(option => option.value === lane.chosen)) lane.chosen = null;
      lane.select.value = lane.chosen || (lane.n ? 'now|' : 'now|plain');
      if (!lane.select.value) lane.select.value = 'now|';
    }
  }

  async function choose(lane, value) {
    if (value === 'file') {
      lane.select.value = lane.chosen || (lane.n ? 'now|' : 'now|plain');
      shelf.open(run => { lane.chosen = 'run:' + run.id + '|'; fillMenus(); setUp(); });
      return;
    }
    lane.chosen = value;
    await setUp();
  }

  async function runFor(lane) {
    const [id, kind] = lane.select.value.split('|'), isPlain = kind === 'plain';
    const run = id === 'now' ? host.run : id.startsWith('run:') ? shelf.runs().find(one => 'run:' + one.id === id) : await shelf.recording(id.slice(4));
    return run ? timelineOf(run, isPlain) : null;
  }

  let wish = 0;
  async function setUp() {
    const mine = ++wish;
    let lines;
    try { lines = await Promise.all(lanes.map(runFor)); } catch (error) { host.complain(say(WORDS.shelf.missing, {why: error.message})); return; }
    if (mine !== wish || !lines[0] || !lines[1]) return;
    pause();
    lanes.forEach((lane, i) => {
      lane.line = lines[i];
      lane.setup.textContent = setupOf(lines[i].run);
      lane.note.textContent = lines[i].run.isShared ? words.shared : !lines[i].times.length || !i && !lane.chosen && lane.select.value === 'now|' ? words.noPlain : '';
      begin(lane, 0);
    });
    if (lines[0].name === lines[1].name) lines.forEach((line, i) => { line.name += ' (' + say(words.lane, {n: i + 1}).toLowerCase() + ')'; });
    result = raceResult(...lines);
    endMs = max(1, ...lines.map(line => line.times.length ? line.times[result.n - 1] || line.endMs : 0));
    showMarks(); showNotes();
    seek(0);
  }

  function showMarks() {
    const at = (ms, text, cls) => { const mark = set(el('i', 'sv-race-mark ' + cls, el('small', null, text)), {title: text}); mark.style.left = (ms / endMs * 100).toFixed(2) + '%';
        mark.dataset.side = ms < 0.12 * endMs ? 'start' : ms > 0.88 * endMs ? 'end' : ''; return mark; };
    marks.replaceChildren(...(result.leader && result.from > 0 ? [at(result.leader.times[result.from], words.overtakes, 'is-over')] : []));
  }

  function showNotes() {
    const [a, b] = lanes.map(lane => lane.line), sameRun = a.run === b.run, key = run => JSON.stringify([run.meta.machine, isObject(run.meta.config) && run.meta.config.device]);
    const known = isObject(a.run.meta.machine) && isObject(b.run.meta.machine), isHere = sameRun && !/^(file|recorded):/.test(String(a.run.id)) && host.message().type !== 'trace';
    const same = a.tokens.length > 0 && b.tokens.length > 0 && a.tokens.slice(0, result.n).every((token, i) => token.text === b.tokens[i].text);
    const texts = [isHere ? words.here : sameRun || known && key(a.run) === key(b.run) ? words.same : known ? words.other : words.unknown];
    if (!same && result.n) texts.push(promptOf(a.run) !== promptOf(b.run) ? words.promptsDiffer : words.textsDiffer);
    texts.push(words.prefill);
    notes.replaceChildren(...texts.map(text => el('span', 'sv-quiet', text)));
  }

  // ---- the clock
  function seek(ms) {
    clock = max(0, min(endMs, ms));
    const {n} = result, counts = lanes.map(lane => drawLane(lane));
    scrub.value = round(clock / endMs * 1000);
    scrub.style.setProperty('--sv-done', clock / endMs * 100 + '%');
    now.textContent = (clock / 1000).toFixed(2) + ' s';
    set(scrub, {'aria-valuetext': now.textContent});
    const [a, b] = lanes.map(lane => lane.line), seconds = x => (x / 1000).toFixed(2), isOver = clock >= endMs;
    lanes.forEach(lane => { lane.first.hidden = !n || result.aMs === result.bMs || lane.line !== (result.aMs < result.bMs ? a : b) || clock < min(result.aMs, result.bMs); });
    if (!n) verdict.textContent = '';
    else if (isOver) {
      const isA = result.aMs <= result.bMs, [won, wonMs, lostMs] = isA ? [a, result.aMs, result.bMs] : [b, result.bMs, result.aMs], isLoss = won.isPlain && a.run === b.run;
      const turn = result.leader ? say(result.from ? words.overtook : words.always, {name: capital(result.leader.name), n: result.from + 1, t: seconds(result.leader.times[result.from])}) : '';
      verdict.textContent = result.aMs === result.bMs ? say(words.even, {n, a: seconds(wonMs)}) : [say(words.won, {name: capital(won.name), n, a: seconds(wonMs), b: seconds(lostMs),
          r: (lostMs / wonMs).toFixed(2)}), isLoss && words.lost, turn].filter(Boolean).join(' ');
    } else if (!clock) verdict.textContent = say(words.ready, {n});
    else {
      const gap = counts[0] - counts[1], name = capital((gap > 0 ? a : b).name);
      verdict.textContent = !gap ? words.level : say(abs(gap) === 1 ? words.aheadOne : words.ahead, {name, n: abs(gap) + ' tokens'});
    }
    play.textContent = playing ? words.pause : isOver ? words.again : clock ? words.go : words.start;
  }

  function begin(lane, n) {    // the text up to token n, of which only the end is kept; before all stands what the prompt's pass gave
    lane.text.replaceChildren(...(n ? NONE : lane.line.lead.map(token => tokenSpan(token, 'plain', false))));
    lane.shown = n;
  }
  function drawLane(lane) {
    const {line} = lane, {n} = result, ownEnd = n ? line.times[n - 1] : 0, at = min(clock, ownEnd);
    let count = 0, low = 0, high = n;
    while (low < high) { const mid = (low + high) >> 1; if (line.times[mid] <= clock) low = mid + 1; else high = mid; }
    count = low;
    lane.watch.textContent = (at / 1000).toFixed(2) + ' s';
    lane.rate.textContent = say(words.rate, {n: count && at ? rate(count / at * 1000) : WORDS.dash});
    lane.count.textContent = say(words.tokens, {n: count, of: n});
    lane.fill.style.width = (n ? count / n * 100 : 0) + '%';
    lane.fill.className = 'sv-fill is-' + (line.isPlain || isPlainRun(line.run) ? 'plain' : 'kept');
    if (count < lane.shown || count - lane.shown > RACE_TOKENS) begin(lane, max(0, count - RACE_TOKENS));
    for (; lane.shown < count; lane.shown++) { const token = line.tokens[lane.shown]; lane.text.append(tokenSpan(token, token.origin, false)); }
    while (lane.text.childNodes.length > RACE_TOKENS) lane.text.firstChild.remove();
    lane.text.scrollTop = lane.text.scrollHeight;
    return count;
  }

  function start() {
    if (!result || !result.n) return;
    if (clock >= endMs) seek(0);
    playing = true;
    let then = performance.now();
    const tick = time => {
      if (!playing) return;
      const passed = max(0, time - then);
      then = max(then, time);
      seek(clock + passed * +speed.value);
      if (clock >= endMs) { pause(); host.announce(verdict.textContent); return; }
      frame = requestAnimationFrame(tick);
    };
    seek(clock);
    frame = requestAnimationFrame(tick);
  }
  function pause() { playing = false; cancelAnimationFrame(frame); if (result) seek(clock); }

  function draw() {
    const {run} = host;
    none.hidden = run.numDecode > 0; body.hidden = !run.numDecode;
    const key = [run.id, run.numDecode, run.plain.length, run.reason, shelf.runs().length, shelf.names().length].join();
    if (!run.numDecode || playing || key === drawnFor) return;
    drawnFor = key;
    fillMenus();
    setUp();
  }
  shelf.hear(() => { if (host.shownView === 'race') draw(); });
  return {node: box('sv-view', none, body), draw, leave: pause};
}});
