// The answer as text: one span per token, coloured by who wrote it. It knows steps and the place in view, nothing of figures or charts.
// The text is cut into paragraphs at line breaks, so that a change lays out a few lines and not the whole answer; far from the place in
// view it is bare text: a page with many thousand spans slows everything on it.
const CHUNK = 24;             // steps per chunk at least; a chunk ends at a line break, or after twice as many
const PARAGRAPH = 480;        // steps of a paragraph at most, where the answer has no line break
// tokens made spans at once on each side of the place in view: what a screen shows, so that a far jump is quick ...
const NEAR = 200;
const WIDE = 700;             // ... and after a moment of rest; spans farther away become bare text again
const REST_MS = 120;

const rejectedAtOf = step => isChain(step) ? nodesOf(step).findIndex(node => node.state === 'rejected') : -1;

// How wide a text is, in small digits, by a guess at its letters: measuring would lay out the page for every word.
const widthOf = text => Array.from(text).reduce((sum, letter) => sum + (/[\s.,;:!'’|iljtfrI()]/.test(letter) ? 0.66 : /[a-z]/.test(letter) ? 1.3 : 1.6), 0);

// From the correction of step i to the next one that has a struck-out word above it: the room of the word above the first.
function roomAbove(run, i) {
  let room = 0, begun = false;
  for (const step of run.steps.slice(i, i + 4)) {
    const isStruck = rejectedAtOf(step) >= 0;
    for (const token of emittedOf(step)) {
      if (token.origin === 'correction' && isStruck) { if (begun) return room; begun = true; }
      if (begun) room += widthOf(token.text);
    }
  }
  return Infinity;
}
function crowd(span, i, run) {       // a long struck-out word gives way to the next one; in full it stands in the step's details
  const word = span && span.querySelector('.sv-rejected'), room = word ? roomAbove(run, i) : Infinity;
  if (word && word.textContent.length + 1 > room) word.style.maxWidth = max(1, room - 0.6) + 'ch';
}

function stepSpan(step, i, run) {
  const span = el('span', 'sv-step'), rejectedAt = rejectedAtOf(step), rejected = nodesOf(step)[rejectedAt], path = acceptedPath(step);
  span.dataset.i = i;
  let k = 0;
  for (const token of emittedOf(step)) {
    const node = tokenSpan(token, token.origin, run.isEnd(token)), at = token.origin === 'draft' ? path[k++] : 'end';
    if (at !== undefined) node.dataset.n = at;
    if (token.origin === 'correction' && rejected && rejected.text !== '') {      // small above the token that took its place
      const word = el('span', 'sv-over'), hasSpace = /^ \S/.test(token.text);      // the space may hang at the end of the line before
      if (hasSpace) fill(word, {text: token.text.slice(1)}); else word.append(...node.childNodes);
      word.append(set(el('span', 'sv-rejected', shown(rejected.text) || '␣'), {'data-n': rejectedAt}));
      node.replaceChildren(hasSpace ? ' ' : '', word);
    }
    if (/^ \S/.test(token.text)) node.classList.add('has-space');
    span.append(node);
  }
  crowd(span, i, run);
  return span;
}

function makeStrip(host) {
  const strip = set(el('div', 'sv-strip'), {tabindex: 0, role: 'group', 'aria-label': WORDS.stripLabel, 'aria-live': 'off'});
  let chunks, paragraph, drawn, dimmed, home, kept, current, resting = null;

  function reset() {
    clearTimeout(resting);
    chunks = []; paragraph = null; drawn = 0; dimmed = null; home = -1; kept = 0; current = null;
    strip.replaceChildren(el('p', 'sv-empty', WORDS.emptyStrip));
  }

  const endsLine = i => { const last = emittedOf(host.run.steps[i]).slice(-1)[0]; return !!last && last.text.endsWith('\n'); };
  function place(i) {         // index of the chunk that holds step i
    let low = 0, high = chunks.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (chunks[mid].first <= i) low = mid; else high = mid - 1; }
    return low;
  }
  function spanOf(i) {
    const chunk = chunks[place(i)];
    return chunk && chunk.live && i < chunk.first + chunk.size ? chunk.node.children[i - chunk.first] : null;
  }

  function flush() {          // the steps that came since; true if the reader was at the end
    const {run} = host, atEnd = strip.scrollHeight - strip.scrollTop - strip.clientHeight < 60;
    if (drawn < run.steps.length && !chunks.length) strip.replaceChildren();
    const {tokens} = run.rows, isFar = i => tokens[i] + WIDE < tokens[tokens.length - 1];      // a whole recording: most of it stays bare
    for (; drawn < run.steps.length; drawn++) {
      let chunk = chunks[chunks.length - 1];
      const lineEnd = drawn > 0 && endsLine(drawn - 1);
      if (!chunk || chunk.size >= 2 * CHUNK || chunk.size >= CHUNK && lineEnd) {
        if (!paragraph || lineEnd || drawn - paragraph.first >= PARAGRAPH) {
          paragraph = {node: el('div', 'sv-para'), first: drawn};
          strip.append(paragraph.node);
        }
        chunk = {node: set(el('span', 'sv-chunk'), {'data-first': drawn}), first: drawn, size: 0, live: !isFar(drawn)};
        chunks.push(chunk);
        chunk.node.classList.toggle('future', dimmed !== null && drawn > dimmed);
        paragraph.node.append(chunk.node);
      }
      chunk.size++;
      if (!chunk.live) { chunk.node.append(emittedOf(run.steps[drawn]).map(token => token.text).join('')); continue; }
      const span = stepSpan(run.steps[drawn], drawn, run);
      span.classList.toggle('future', dimmed !== null && drawn > dimmed);
      chunk.node.append(span);
      if (rejectedAtOf(run.steps[drawn]) >= 0) for (let i = max(0, drawn - 3); i < drawn; i++) crowd(spanOf(i), i, run);
    }
    return atEnd;
  }

  function markEnd() {        // the end of the text is known only after its step was drawn
    const at = host.run.steps.length - 1, old = spanOf(at);
    if (!old || old.dataset.end) return;
    const fresh = set(stepSpan(host.run.steps[at], at, host.run), {'data-end': 1});
    fresh.className = old.className;
    old.replaceWith(fresh);
    if (current === old) current = fresh;
  }

  const stepsOf = chunk => host.run.steps.slice(chunk.first, chunk.first + chunk.size);
  function bare(chunk) {
    chunk.live = false;
    chunk.node.textContent = stepsOf(chunk).map(step => emittedOf(step).map(token => token.text).join('')).join('');
  }
  function spans(chunk) {
    chunk.live = true;
    chunk.node.replaceChildren(...stepsOf(chunk).map((step, k) => stepSpan(step, chunk.first + k, host.run)));
  }
  function keepNear(c, reach) {
    const tokens = host.run.rows.tokens, begin = chunk => chunk.first ? tokens[chunk.first - 1] : 0,
        end = chunk => tokens[chunk.first + chunk.size - 1], from = begin(chunks[c]), to = end(chunks[c]);
    const away = chunk => max(0, begin(chunk) - to, from - end(chunk));
    for (const chunk of chunks) {
      const tokensAway = away(chunk);
      if (tokensAway <= reach && !chunk.live) { spans(chunk); dimIn(chunk); } else if (tokensAway > WIDE && chunk.live) bare(chunk);
    }
  }
  function settle(c) {        // what lies around the place in view; it stays where it is while the rest is filled in
    if (c === home && kept === chunks.length) return;
    home = c; kept = chunks.length;
    keepNear(c, NEAR);
    clearTimeout(resting);
    if (!chunks.every(chunk => chunk.live)) resting = setTimeout(() => {
      const mark = current && current.isConnected ? current : null, before = mark && mark.getBoundingClientRect().top;
      if (home < chunks.length) keepNear(home, WIDE);
      if (mark) strip.scrollTop += mark.getBoundingClientRect().top - before;
    }, REST_MS);
  }

  function dim(i) {           // everything after step i; null: nothing
    const before = dimmed;
    dimmed = i;
    const now = i === null ? Infinity : place(i), was = before === null ? -1 : place(before);
    chunks.forEach((chunk, c) => { chunk.node.classList.toggle('future', c > now); if (c === now || c === was) dimIn(chunk); });
  }
  function dimIn(chunk) {
    if (!chunk.live) return;
    let i = chunk.first;
    for (const span of chunk.node.children) span.classList.toggle('future', dimmed !== null && i++ > dimmed);
  }

  function select(i, isQuiet) {
    if (current) {
      current.classList.remove('current');
      current.querySelectorAll('.chosen').forEach(one => one.classList.remove('chosen'));
    }
    settle(place(i));
    current = isQuiet ? null : spanOf(i);
    if (!current) return;
    current.classList.add('current');
    if (host.view.node !== null) current.querySelectorAll('[data-n="' + host.view.node + '"]').forEach(one => one.classList.add('chosen'));
  }

  function reveal(i) {        // scroll the strip only, never the page under the reader; the one place that reads sizes after a change
    const span = spanOf(i);
    if (!span) return;
    const view = strip.getBoundingClientRect(), at = span.getBoundingClientRect();
    if (at.top < view.top + 24) strip.scrollTop += at.top - view.top - 40;
    else if (at.bottom > view.bottom - 24) strip.scrollTop += at.bottom - view.bottom + 40;
  }

  strip.addEventListener('click', event => {
    const token = event.target.closest('[data-n]'), step = event.target.closest('.sv-step'), chunk = event.target.closest('.sv-chunk');
    if (!chunk) return;
    const n = token ? token.dataset.n : null;
    host.pick(+(step ? step.dataset.i : chunk.dataset.first), n === null || n === 'end' ? n : +n);
  });
  let scrolling = false;
  strip.addEventListener('scroll', () => {   // bare text that scrolls into sight becomes tokens again
    if (scrolling || chunks.every(chunk => chunk.live)) return;
    scrolling = true;
    requestAnimationFrame(() => {
      scrolling = false;
      const middle = strip.scrollTop + strip.clientHeight / 2;
      let low = 0, high = chunks.length - 1;
      while (low < high) {
        const mid = (low + high + 1) >> 1;
        if (chunks[mid].node.offsetTop <= middle) low = mid; else high = mid - 1;
      }
      if (!chunks.length) return;
      home = low; kept = chunks.length;
      keepNear(low, WIDE);
    });
  }, {passive: true});

  reset();
  return {node: strip, reset, flush, markEnd, select, dim, reveal, toEnd() { strip.scrollTop = strip.scrollHeight; },
      numSpans: () => strip.querySelectorAll('.sv-tok').length};
}
