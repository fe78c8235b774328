// The address says what is shown: #trace=…&step=41&view=why, #lesson=…&stop=3, #view=learn. Read at the beginning and whenever it changes,
// written while a recorded run is looked at. It knows places, not what is in them.
EXTRAS.push(host => {
  const {options} = host, KEYS = ['trace', 'step', 'phase', 'view', 'lesson', 'stop', 'page', 'projector'];
  let reading = 0, timer = null, waiting = null;
  const read = () => new URLSearchParams(location.hash.replace(/^#/, ''));
  const number = text => /^\d{1,6}$/.test(text || '') ? +text : null;

  function place() {          // the present place as the address has it; null: nothing that could be opened again
    const out = new URLSearchParams(), {run, view, shownView} = host, lesson = host.lesson && host.lesson.now(), name = host.message().name;
    if (host.root.classList.contains('projector')) out.set('projector', '1');
    if (lesson) { out.set('lesson', lesson.id); out.set('stop', lesson.stop); return out; }
    if (shownView === 'learn') {
      out.set('view', 'learn');
      if (host.learnPage && host.learnPage() !== 'lessons') out.set('page', host.learnPage());
      return out;
    }
    if (!name && !options.alone) return null;
    if (name) out.set('trace', name);
    if (!view.live && run.steps[view.at]) out.set('step', run.rows.decode[view.at]);
    if (view.phase < PHASES.length - 1) out.set('phase', PHASES[view.phase]);
    if (shownView !== 'tokens') out.set('view', shownView);
    return out;
  }

  function write() {
    if (reading) return;
    const now = place(), old = read();
    if (!now && !KEYS.some(key => old.has(key))) return;
    const text = now ? now.toString() : '', address = location.pathname + location.search + (text ? '#' + text : '');      // whole: a bare hash would follow <base>
    if (location.hash.replace(/^#/, '') === text) return;
    try { history.replaceState(history.state, '', address); } catch (error) { return; }      // a frame without an address of its own
    if (parent !== window && /\.static\.hf\.space$/.test(location.hostname))
      parent.postMessage({queryString: '', hash: text ? '#' + text : ''}, 'https://huggingface.co');
  }

  async function go() {
    const wish = read();
    if (!KEYS.some(key => wish.has(key))) return;
    reading++;
    try {
      if (host.projector && wish.has('projector')) host.projector(wish.get('projector') === '1');
      const name = wish.get('trace'), lessonName = wish.get('lesson');
      if (lessonName && host.course) {
        const lesson = (await host.course()).lessons.find(one => one.id === lessonName), now = host.lesson.now(), stop = number(wish.get('stop')) || 1;
        if (lesson && now && now.id === lessonName) { if (now.stop !== stop) await host.lesson.show(stop - 1); }
        else if (lesson) await host.lesson.open(lesson, stop - 1);
        return;
      }
      if (name && host.course && name !== host.message().name && !await host.showRecording(name)) return;
      if (!host.size()) { if (!name) waiting = wish; } else visitPlace(wish);
      openPlace(wish);
    } catch (error) { host.complain(error.message); }
    finally { reading--; }
  }
  function visitPlace(wish) {
    const step = number(wish.get('step'));
    if (step === null) return;
    const i = host.run.rows.decode.indexOf(step);
    if (i >= 0) host.visit(i);
    if (i >= 0 && PHASES.includes(wish.get('phase'))) host.setPhase(PHASES.indexOf(wish.get('phase')));
  }
  function openPlace(wish) {
    const view = wish.get('view') || 'tokens';
    if (host.lesson && view === 'learn') host.lesson.end();
    host.openView(view);
    if (view === 'learn' && host.learnPage) host.learnPage(wish.get('page') || 'lessons');
  }

  host.hear(what => {
    if (what === 'run' && waiting && host.size()) { const wish = waiting; waiting = null; reading++; visitPlace(wish); reading--; }
    if (what === 'run' && !KEYS.some(key => read().has(key))) return;      // the first view needs no address
    clearTimeout(timer);
    timer = setTimeout(write, 120);
  });
  addEventListener('hashchange', go);
  Promise.resolve().then(go);       // once the page's first message has been taken
});
