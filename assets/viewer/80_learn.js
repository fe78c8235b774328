// The Learn view: the list of lessons with what is done, and the teacher's page. It knows the course as data; 81_lesson.js plays it.
WORDS.learn = {title: 'Learn', head: 'Speculative decoding in ten minutes',
  intro: 'Short lessons on recorded runs of a real model. Nothing is computed, so everything works offline; each lesson asks you to predict first.',
  loading: 'Loading the lessons …', failed: 'The lessons could not be loaded: {why}', done: '{n} of {of} lessons done', start: 'Start',
  go: 'Continue at {i} of {n}', again: 'Again', stops: '{n} stops', isDone: 'done', teacher: 'For teachers: a 45-minute plan', back: 'Back to the lessons',
  begin: 'Begin', next: 'Continue with “{title}”', reset: 'Forget my progress', projector: 'Projector mode', print: 'Print this page'};

const inWords = (node, words) => { node.append(...words.map(([style, text]) => style ? el(style, null, text) : text)); return node; };

function blockNode(block) {
  if (block.kind === 'table') {
    const row = (cells, tag) => el('tr', null, ...cells.map(cell => inWords(el(tag), cell)));
    return box('sv-prose-table', el('table', null, row(block.rows[0], 'th'), ...block.rows.slice(1).map(cells => row(cells, 'td'))));
  }
  if (block.items) return el(block.kind === 'ol' ? 'ol' : 'ul', null, ...block.items.map(item => inWords(el('li'), item)));
  return inWords(el(['h1', 'h2', 'h3'].includes(block.kind) ? block.kind : 'p'), block.words);
}

const progress = {            // which stop of each lesson comes next, or 'done'; kept in this browser where it allows that
  key: 'specviz-lessons', held: {},
  read() { try { const kept = JSON.parse(localStorage.getItem(this.key)); if (isObject(kept)) this.held = kept; } catch (error) { /* private window */ }
    return this.held; },
  write(id, value) { this.held[id] = value; this.keep(); },
  forget() { this.held = {}; this.keep(); },
  keep() { try { localStorage.setItem(this.key, JSON.stringify(this.held)); } catch (error) { /* lasts as long as the page */ } },
};

EXTRAS.push(host => {         // the course and recordings, each asked for once
  if (!host.options.library) return;
  const kept = new Map(), words = WORDS.learn;
  host.fetch = name => {
    if (!kept.has(name)) kept.set(name, Promise.resolve().then(() => host.options.library(name)).then(data => {
      if (!isObject(data) || data.error) throw new Error(data && data.error || WORDS.unreadable);
      return data;
    }).catch(error => { kept.delete(name); throw error; }));
    return kept.get(name);
  };
  host.course = () => host.fetch('course');
  host.showRecording = async name => {        // false if a later wish overtook this one
    const wish = host.wish = {}, [course, data] = await Promise.all([host.course(), host.fetch(name)]);
    if (host.wish !== wish) return false;
    const run = course.runs.find(one => one.name === name), title = data.meta && data.meta.title || run && run.title || name;
    host.show(checkTrace(data), 'recorded:' + name, {...course.look, status: say(WORDS.opened, {name: title}), name});
    return true;
  };
});

VIEWS.push({name: 'learn', title: WORDS.learn.title, controls: false, charts: false, when: options => !!options.library, mount(host) {
  const words = WORDS.learn, node = set(el('section', 'sv-learn'), {'aria-label': words.title, tabindex: -1});
  let page = 'lessons';

  function lessonCard(lesson, i, state) {
    const isDone = state === 'done', at = finite(state) && state > 0 && state < lesson.stops.length ? state : 0;
    const open = set(el('button', 'sv-lesson-open', el('strong', null, lesson.title), el('span', 'sv-quiet', lesson.summary)),
        {type: 'button', 'data-lesson': lesson.id});
    open.onclick = () => host.lesson.open(lesson, at);
    const note = isDone ? '✓ ' + words.isDone : at ? say(words.go, {i: at + 1, n: lesson.stops.length}) : say(words.stops, {n: lesson.stops.length});
    return el('li', isDone ? 'is-done' : null, box('sv-lesson-number', String(i + 1)), open, el('span', 'sv-lesson-state', note));
  }

  function drawLessons(course) {
    const held = progress.read(), lessons = course.lessons, done = lessons.filter(lesson => held[lesson.id] === 'done').length,
        next = lessons.find(lesson => held[lesson.id] !== 'done');
    const bar = set(el('progress'), {max: lessons.length, value: done, 'aria-label': say(words.done, {n: done, of: lessons.length})});
    const go = next && host.button('sv-primary', done || held[next.id] ? say(words.next, {title: next.title}) : words.begin,
        () => host.lesson.open(next, finite(held[next.id]) ? held[next.id] : 0));
    const buttons = box('sv-learn-buttons', course.teacher.length > 0 && host.button('', words.teacher, () => turn('teacher')),
        host.projector && host.button('', words.projector, () => host.projector(true)),
        Object.keys(held).length > 0 && host.button('', words.reset, () => { progress.forget(); draw(); }));
    node.replaceChildren(el('h2', null, words.head), el('p', 'sv-quiet', words.intro),
        box('sv-learn-top', go || null, box('sv-learn-done', bar, el('span', 'sv-quiet', say(words.done, {n: done, of: lessons.length})))),
        el('ol', 'sv-lessons', ...lessons.map((lesson, i) => lessonCard(lesson, i, held[lesson.id]))), buttons);
  }

  function drawTeacher(course) {
    node.replaceChildren(box('sv-learn-buttons', host.button('', words.back, () => turn('lessons')), host.button('', words.print, () => print())),
        box('sv-prose', ...course.teacher.map(blockNode)));
  }

  function turn(name) { page = name === 'teacher' ? 'teacher' : 'lessons'; draw(); node.focus({preventScroll: true}); host.tell('view'); }
  function draw() {
    host.course().then(course => (page === 'teacher' ? drawTeacher : drawLessons)(course),
        error => node.replaceChildren(el('p', 'sv-note', say(words.failed, {why: error.message}))));
  }
  host.learnPage = name => { if (name !== undefined) turn(name); return page; };
  node.append(el('p', 'sv-quiet', words.loading));
  let drawnFor = null;
  return {node, draw() { const key = page + JSON.stringify(progress.read()); if (key !== drawnFor) { drawnFor = key; draw(); } },
      leave() { drawnFor = null; }};
}});
