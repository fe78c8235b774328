// The controls: to a step, playback on the recorded clock, live. It knows when steps happened, not what is in them.
function makePlayer(host) {
  const {button} = host;
  const first = button('sv-icon sv-far', WORDS.first, () => host.visit(0), 'first'),
      previous = button('sv-icon', WORDS.previous, () => host.visit(host.view.at - 1), 'previous'),
      play = button('sv-icon sv-play', WORDS.play, toggle, 'play'),
      next = button('sv-icon', WORDS.next, () => host.visit(host.view.at + 1), 'next'),
      last = button('sv-icon sv-far', WORDS.last, () => host.visit(host.size() - 1), 'last');
  const scrubber = el('input', 'sv-scrub'), label = el('output', 'sv-label sv-num', WORDS.noStep), speed = el('select', 'sv-speed'),
      live = button('sv-live', WORDS.live, () => { pause(); host.follow(); });
  set(scrubber, {type: 'range', min: 0, max: 0, value: 0, 'aria-label': WORDS.scrubber});
  scrubber.oninput = () => host.visit(+scrubber.value);
  set(speed, {'aria-label': WORDS.speed});
  for (const [value, text] of [[0.25, '¼×'], [0.5, '½×'], [1, '1×'], [2, '2×'], [4, '4×']])
    speed.append(set(el('option', null, text), {value}));
  speed.value = '1';
  const node = box('sv-bar', box('sv-buttons', first, previous, play, next, last), scrubber, label, box('sv-pace', speed, live));
  let timer = null;

  function draw() {           // writes only: no size is read here
    const {run, view} = host, n = run.steps.length, step = run.steps[view.at];
    scrubber.max = max(0, n - 1);
    label.textContent = !step ? WORDS.noStep : isPrefill(step) ? WORDS.prompt
        : say(WORDS.stepOf, {i: run.rows.decode[view.at], n: run.numDecode});
    scrubber.value = max(0, view.at);
    set(scrubber, {'aria-valuetext': label.textContent});
    scrubber.style.setProperty('--sv-done', (n > 1 ? view.at / (n - 1) * 100 : 0) + '%');
    previous.disabled = first.disabled = view.at <= 0;
    next.disabled = last.disabled = view.at >= n - 1;
    set(live, {'aria-pressed': view.live});
  }

  function show(name) { play.replaceChildren(icon(name)); set(play, {'aria-label': WORDS[name], title: WORDS[name]}); }
  function pause() { host.view.playing = false; clearTimeout(timer); show('play'); }
  function toggle() { if (host.view.playing) pause(); else start(); }
  function start() {          // the recorded clock, scaled; steps faster than the screen are passed over, never stretched
    if (!host.size()) return;
    if (host.view.at >= host.size() - 1) host.visit(0);
    host.view.playing = true;
    show('pause');
    let clock = host.run.rows.seconds[host.view.at], then = performance.now();
    const tick = () => {
      if (!host.view.playing) return;
      const now = performance.now(), seconds = host.run.rows.seconds;
      clock += (now - then) / 1000 * +speed.value; then = now;
      let at = host.view.at;
      while (at + 1 < seconds.length && seconds[at + 1] <= clock) at++;
      if (at !== host.view.at) host.visit(at, true);
      if (at >= host.size() - 1) return pause();
      timer = setTimeout(tick, max(16, min(200, (seconds[at + 1] - clock) * 1000 / +speed.value)));
    };
    tick();
  }
  return {node, scrubber, draw, pause, start, toggle};
}
