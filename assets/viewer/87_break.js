// The Break it view: one classic fault at a time is put into a tiny model's decoding, and the meter finds it.
WORDS.breakIt = {title: 'Break it', label: 'Break it: the classic faults, one at a time', head: 'Break it',
  intro: 'Speculative decoding is easy to get slightly wrong, and the text still reads well. Each switch puts one classic fault into a tiny built-in model, outside the engine’s own code. The meter says whether the text is still the target’s.',
  list: 'Faults', again: 'Run it again', right: 'right', wrong: 'wrong', why: 'Why the meter turns red', honestWhy: 'Nothing is broken', faster: 'Why anyone would do it',
  greedy: 'shown in greedy text', law: 'shown in 6,000 short texts', pace: '{a} words per step; honest decoding of the same drafts has {b}.',
  network: 'Here the text comes from a tiny network with random weights, through the real engine and its cache. Its syllables mean nothing; only that both lines are equal matters.',
  faults: {
    '': {title: 'Nothing broken', right: 'the engine as it is', text: 'This is what honest decoding looks like: counts wander around the law as chance has it, and the meter stays green. It turns red by mistake once in a million readings.'},
    softmax_q: {title: 'Softmax q for chosen drafts', right: 'a chosen token: accept with p(x)', wrong: 'a chosen token: accept with min(1, p(x) / q(x))',
      text: 'The drafter took its most probable word; nothing was drawn. How likely that word was to be drafted is therefore 1, not its softmax q. Dividing by q accepts it far too often, and the drafter’s favourites crowd out the rest.'},
    p_for_residual: {title: 'p instead of the residual', right: 'after a rejection: draw from max(0, p − q), normalised', wrong: 'after a rejection: draw from p',
      text: 'Acceptance alone already brings the words that the drafter likes up to their due share. Drawing the correction from the whole of p adds to them once more. The residual is exactly what is still missing.'},
    shared_u: {title: 'One u for all siblings', right: 'each sibling: a random number of its own', wrong: 'each sibling: the same random number',
      text: 'The second sibling is only tried because u was too high for the first. Holding the same high u against it asks a question whose answer is known: it is nearly always rejected. Its share goes to the words that were not drafted at all.'},
    bonus_after_rejection: {title: 'Bonus after a rejection', right: 'a rejection: emit the correction and stop', wrong: 'a rejection: emit the correction and one more',
      text: 'The target’s row behind a rejected draft says what follows that draft. But the text has the correction there. The extra word continues a text that does not exist, so it fits the word before it badly: single words look right, pairs do not.'},
    drops_unlikely: {title: 'Dropping unlikely draws', right: 'stop drafting by the distribution or the depth', wrong: 'stop drafting where the drawn word has a low q',
      text: 'Throwing an unlikely draw away looks like thrift. But the position is then decided anew, so likely words get two chances and unlikely ones one. It distorts the text even if drafter and target agree perfectly.'},
    typical: {title: 'Typical acceptance', right: 'accept with min(1, p(x) / q(x))', wrong: 'accept if p(x) > min(0.09, 0.3 · exp(−H(p)))',
      text: 'A word that is likely enough always passes, however much more often the drafter proposes it than the target would write it. Steps may get longer; the text follows neither model. At temperature 0 nothing changes. specviz offers the rule under its name and labels the run as lossy.'},
    no_rollback: {title: 'Forgotten rollback', right: 'cache: keep the accepted path, drop the rest', wrong: 'cache: keep everything that was fed',
      text: 'Keys and values of rejected drafts stay in the cache. From then on every token attends to words that are not in the text and stands too far back. Nothing crashes; after the first rejection the text is simply another one, and hardly any draft is accepted.'},
    run_on: {title: 'Running on past the end', right: 'look for the end at every token of a block', wrong: 'look for the end at the last token of a block',
      text: 'Plain decoding stops at the end token. Here it lies inside a block of accepted drafts, and only the block’s last token is looked at. The answer runs on with text that the target, having ended, would never have written.'},
  }};

VIEWS.push({name: 'break', title: WORDS.breakIt.title, controls: false, charts: false, when: options => !!(options.library || options.museum), mount(host) {
  const words = WORDS.breakIt, node = set(el('section', 'sv-break'), {'aria-label': words.label}), desk = makeDesk(host), list = set(box('sv-faults'), {role: 'radiogroup', 'aria-label': words.list});
  const names = Object.keys(words.faults), seen = new Map(), detail = el('div', 'sv-fault'), note = set(el('span', 'sv-quiet sv-run-note'), {role: 'status'});
  const again = host.button('', words.again, () => run()), isText = name => name === 'no_rollback' || name === 'run_on';
  const honestCase = {softmax_q: 'rejection chosen', shared_u: 'rejection tree'};
  let now = '', state = null;
  again.hidden = !desk.canRun;
  const recordOf = name => name || 'rejection chain';
  const switches = new Map(names.map(name => {
    const light = el('i', 'sv-light'), one = set(el('button', 'sv-switch', light, el('span', null, words.faults[name].title)), {type: 'button', role: 'radio', 'data-fault': name});
    one.onclick = () => choose(name, true);
    list.append(one);
    return [name, {one, light}];
  }));
  list.addEventListener('keydown', event => {
    const by = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
    if (!by) return;
    event.preventDefault(); event.stopPropagation();
    const name = names[(names.indexOf(now) + by + names.length) % names.length];
    choose(name, true);
    switches.get(name).one.focus();
  });

  function light(name, result) {
    seen.set(name, greenOf(result));
    const {light} = switches.get(name);
    light.className = 'sv-light ' + (seen.get(name) ? 'is-green' : 'is-red');
    light.textContent = seen.get(name) ? '✓' : '✗';
  }

  function draw() {
    const fault = words.faults[now];
    for (const [name, {one}] of switches) set(one, {'aria-checked': name === now, tabindex: name === now ? 0 : -1});
    const lines = box('sv-lines', box('sv-line is-wrong', fault.wrong ? el('b', null, words.wrong) : '', el('code', null, fault.wrong || '')), box('sv-line is-right', el('b', null, words.right), el('code', null, fault.right)));
    const pace = el('p', 'sv-quiet sv-pace-note');
    detail.replaceChildren(box('sv-fault-head', el('h3', null, fault.title), again, note), lines, state ? meterPicture(state) : box('sv-meter'),
        box('sv-because', el('h4', null, now ? words.why : words.honestWhy), el('p', null, fault.text), pace),
        ...state ? [state.kind === 'text' ? writtenPicture(state) : lawPicture(state), state.kind === 'text' ? el('p', 'sv-quiet', words.network) : exactNote(state)] : NONE);
    if (state && state.kind === 'law' && now && state.num_steps) desk.recorded(honestCase[now] || 'rejection chain').then(honest => {
      const perStep = one => (one.num_tokens / one.num_steps).toFixed(2);
      if (honest) pace.textContent = say(words.pace, {a: perStep(state), b: perStep(honest)});
    }, () => {});
  }

  function choose(name, isAsked) {
    now = name; state = null;
    desk.stop();
    again.disabled = false;
    if (isAsked && desk.canRun) return run();
    note.textContent = '';
    draw();
    desk.recorded(recordOf(name)).then(result => {
      if (now !== name || state || !result) return;
      state = result; note.textContent = desk.canRun ? WORDS.museum.recorded : WORDS.museum.noServer;
      light(name, result); draw();
    }, error => { note.textContent = say(WORDS.museum.failed, {why: error.message}); });
  }

  function run() {
    const name = now;
    again.disabled = true;
    note.textContent = WORDS.museum.starting;
    draw();
    desk.run(isText(name) ? {fault: name} : {fault: name, seed: floor(Math.random() * 2147483647)}, answer => {
      if (answer.state) { state = answer.state; if (!answer.error && (answer.done || state.kind === 'law' && state.reading)) light(name, state); }
      note.textContent = answer.error ? say(WORDS.museum.failed, {why: answer.error}) : answer.done ? WORDS.museum.live : answer.note;
      if (answer.done) { again.disabled = false; if (state) host.announce(words.faults[name].title + ': ' + (greenOf(state) ? WORDS.museum.fits : WORDS.museum.off)); }
      draw();
    });
  }

  node.append(el('h3', null, words.head), el('p', 'sv-lead', words.intro), box('sv-break-body', list, detail));
  choose('', false);
  for (const name of names) desk.recorded(recordOf(name)).then(result => { if (result && !desk.canRun) light(name, result); }, () => {});
  return {node, leave() { desk.stop(); again.disabled = false; }};
}});
