// Plays one lesson: a card over the controls that opens views, visits steps, points at things and asks before it shows. It knows a lesson as
// data, with steps by index and texts as words; what happened in a step is the recording's business.
WORDS.lesson = {of: 'Lesson {i} of {n}', stop: 'Stop {i} of {n}', back: 'Back', next: 'Next', finish: 'Finish', more: 'Next lesson',
  close: 'End the lesson', reveal: 'Show the answer', right: 'Right.', wrong: 'Not quite: the answer is “{answer}”.', told: 'The answer is “{answer}”.',
  predict: 'Predict first', failed: 'This lesson cannot go on: {why}', ended: 'Lesson ended.', hidden: 'Hidden until you answer', keys: 'Keys: n next, b back, 1 to 4 answer'};
WORDS.help.groups.push(['In a lesson', [['n b', 'the next stop, the stop before'], ['1 2 3', 'an answer']]]);

// Where the things are that a stop may point at; of several the first that can be seen.
const FOCUS = {
  step: ['.sv-step.current', '.sv-ribbon'], draft: ['.sv-ribbon', '.sv-why-list', '.sv-rows'], node: ['.sv-row.is-chosen', '.sv-why-detail'],
  verdict: ['.sv-why-detail', '.sv-rows'], outcome: ['.is-outcome', '.sv-panel'], times: ['.sv-times'], caches: ['.is-cache'],
  tree: ['.sv-tree-box'], speed_up: ['.sv-head[data-name=speed_up]'], tokens_per_step: ['.sv-head[data-name=tokens_per_step]'],
  acceptance: ['.sv-head[data-name=draft_acceptance_rate]'], tokens_per_s: ['.sv-head[data-name=tokens_per_s]'], badge: ['.sv-badge'],
  race: ['.sv-race'], config: ['.sv-config'],
};

// A letter typed into nothing else: where nothing has the focus, or something in the viewer that takes no text.
function isForViewer(event, root) {
  const {target} = event;
  return root.isConnected && !event.ctrlKey && !event.metaKey && !event.altKey && (target === document.body || root.contains(target) && !target.closest('dialog, [popover]'))
      && (!/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) || target.type === 'range' || target.type === 'checkbox');
}

EXTRAS.push(host => {
  if (!host.options.library) return;
  const words = WORDS.lesson, {root, slot} = host, answered = new Map();
  let lesson = null, at = 0, turn = 0, before = null, isOurs = false;
  const ids = 'sv' + Math.random().toString(36).slice(2, 8), card = set(el('section', 'sv-lesson-card'), {'aria-labelledby': ids + 'title',
      'aria-describedby': ids + 'text', tabindex: -1, hidden: ''});
  slot.append(card);
  root.style.setProperty('--sv-covered', JSON.stringify(words.hidden));

  const seen = node => node.getClientRects().length > 0 && getComputedStyle(node).visibility !== 'hidden';
  function point(name) {
    for (const old of root.querySelectorAll('.sv-pointed')) old.classList.remove('sv-pointed');
    if (!lesson || !name) return;
    for (const selector of FOCUS[name] || NONE) for (const node of root.querySelectorAll(selector)) if (seen(node)) {
      node.classList.add('sv-pointed');
      const place = node.getBoundingClientRect();
      if (innerWidth > 900 && (place.bottom > innerHeight || place.top < 0)) node.scrollIntoView({block: 'nearest'});      // the card stays in sight
      return;
    }
  }
  const stop = () => lesson.stops[at], key = () => lesson.id + '/' + at, isOpen = () => stop().question && !answered.has(key());
  function cover() {          // what the question asks for stays hidden, also from screen readers, until it is answered
    const hides = lesson && isOpen() ? stop().question.hides : '';
    for (const name of ['step', 'figures']) root.classList.toggle('covers-' + name, hides === name);
    if (hides) host.announce('');
  }

  async function show(i) {
    const mine = ++turn;
    at = max(0, min(lesson.stops.length - 1, i));
    progress.write(lesson.id, progress.read()[lesson.id] === 'done' ? 'done' : at);
    isOurs = true;
    try { if (host.message().name !== stop().trace && !await host.showRecording(stop().trace)) return; }
    catch (error) { host.complain(say(words.failed, {why: error.message})); return end(); }
    finally { isOurs = false; }
    if (mine === turn && lesson) place(true);
  }

  function place(isFresh) {
    const {view, step, phase, node, focus} = stop();
    isOurs = true;
    cover();
    host.openView(host.views.some(one => one.name === view) ? view : 'tokens');
    host.visit(step, false, node);
    if (isOpen() && stop().question.hides === 'step') host.setPhase(1);
    else if (phase) host.setPhase(max(0, PHASES.indexOf(phase)));
    cover();
    isOurs = false;
    if (isFresh) draw();
    if (!isOpen()) { point(focus); requestAnimationFrame(() => { if (lesson) point(focus); }); } else point('');
    host.tell('lesson');
  }

  function draw() {
    const {text, question} = stop(), n = lesson.stops.length, number = lesson.number;
    const dots = box('sv-dots', ...lesson.stops.map((_, i) => {
      const dot = set(el('button', 'sv-stop'), {type: 'button', 'aria-label': say(words.stop, {i: i + 1, n})});
      if (i === at) set(dot, {'aria-current': 'step'});
      dot.onclick = () => show(i);
      return dot;
    }));
    const close = host.button('sv-icon', words.close, leave, 'close');
    const back = host.button('sv-back', words.back, () => show(at - 1)), last = at === n - 1, more = last && lesson.next,
        next = host.button('sv-primary sv-next', !last ? words.next : more ? words.more : words.finish, forward);
    back.disabled = at === 0;
    const said = set(box('sv-lesson-text', ...text.map(part => inWords(el('p'), part))), {id: ids + 'text'}), title = set(el('h3', null, lesson.title), {id: ids + 'title'});
    card.hidden = false;
    card.replaceChildren(box('sv-lesson-head', el('span', 'sv-quiet', say(words.of, {i: number, n: lesson.count})), title, dots, close),
        said, ...(question ? [ask(question, next)] : []), box('sv-lesson-foot', el('span', 'sv-quiet sv-key-help', words.keys), back, next));
    if (isOpen()) next.disabled = true;
    card.focus({preventScroll: true});
    const place = card.getBoundingClientRect();
    if (place.top < 0 || place.bottom > innerHeight) card.scrollIntoView({block: 'nearest'});
  }

  function ask(question, next) {
    const out = set(box('sv-ask'), {role: 'group', 'aria-label': words.predict}), verdict = set(el('div', 'sv-answer'), {'aria-live': 'polite'});
    const choices = question.choices.map((choice, i) => {
      const node = set(inWords(el('button', 'sv-btn sv-choice', el('b', 'sv-choice-key', String(i + 1))), choice), {type: 'button'});
      node.onclick = () => answer(i);
      return node;
    });
    const reveal = set(el('button', 'sv-link', words.reveal), {type: 'button'}), plain = choice => choice.map(part => part[1]).join('');
    function tell() {
      const chosen = answered.get(key()), right = plain(question.choices[question.answer]);
      choices.forEach((node, i) => { node.disabled = true; node.classList.toggle('is-right', i === question.answer);
          node.classList.toggle('is-wrong', i === chosen && i !== question.answer); });
      reveal.hidden = true;
      next.disabled = false;
      verdict.replaceChildren(inWords(el('p', null, el('strong', null, chosen === question.answer ? words.right
          : say(chosen === null ? words.told : words.wrong, {answer: right})), ' '), question.why));
    }
    function answer(i) {
      if (answered.has(key())) return;
      answered.set(key(), i);
      tell();
      place(false);
      next.focus({preventScroll: true});
    }
    reveal.onclick = () => answer(null);
    out.append(inWords(el('p', 'sv-ask-text', el('strong', null, words.predict + ': ')), question.ask), box('sv-choices', ...choices), reveal, verdict);
    if (answered.has(key())) tell();
    return out;
  }

  function forward() {
    if (isOpen()) return;
    if (at < lesson.stops.length - 1) return show(at + 1);
    progress.write(lesson.id, 'done');
    const {next} = lesson;
    if (next) return open(next, 0);
    leave();
  }

  function leave() {          // back to the list, where the keyboard goes on
    end();
    host.openView('learn');
    const page = root.querySelector('.sv-learn');
    if (page) page.focus({preventScroll: true});
  }

  function open(one, i) {
    if (!lesson) before = host.size() && (host.run.stats || host.message().name) ? {file: host.run.file(), id: host.run.id, message: host.message()} : null;
    host.course().then(({lessons}) => {
      const number = lessons.indexOf(one);
      lesson = {...one, number: number + 1, count: lessons.length, next: lessons[number + 1]};
      root.classList.add('has-lesson');
      show(i);
    });
  }

  function end(stay) {        // back to what was shown before the lesson, unless something newer is there
    if (!lesson) return;
    lesson = null; turn++;
    cover(); point('');
    card.hidden = true;
    root.classList.remove('has-lesson');
    const old = before;
    before = null;
    if (!stay && old) { isOurs = true; host.show(checkTrace(old.file), old.id, old.message); isOurs = false; }
    host.announce(words.ended);
    host.tell('lesson');
  }

  host.lesson = {open, end, now: () => lesson && {id: lesson.id, stop: at + 1}, show};
  host.hear(what => {
    if (!lesson || isOurs) return;
    if (what === 'run') end(true);                       // another run began: the lesson is over
    else if (what === 'move') point(host.view.at === stop().step && !isOpen() ? stop().focus : '');
  });
  document.addEventListener('keydown', event => {
    if (!lesson || !isForViewer(event, root)) return;
    const press = selector => { const node = card.querySelector(selector); if (node && !node.disabled) { event.preventDefault(); node.click(); } };
    if (event.key === 'n') press('.sv-next');
    else if (event.key === 'b') press('.sv-back');
    else if (/^[1-9]$/.test(event.key)) press('.sv-choice:nth-child(' + event.key + ')');
  });
});
