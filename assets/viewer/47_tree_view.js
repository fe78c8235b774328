// The Tree view: the draft of one step as a tree, with one node in full beside it. A chain is a tree without branches and shown as such.
WORDS.treeView = {title: 'Tree', label: 'The draft of this step as a tree', probs: 'Probabilities', whole: 'Whole tree',
    hidden: '{n} not shown',
  window: 'Lookahead window: each row guesses one place further; fed, never judged', rootSaid: 'text so far, ending in “{text}”',
  endSaid: '“{text}”, {origin}', nodeSaid: '“{text}”, {state}, p {p}, q {q}',
      none: 'Nothing was drafted in this step: there is one token, and no tree.',
  chain: 'A chain: each token has one guess behind it.',
  tree: '{n} nodes, {depth} deep; the bold path is what the target accepted.',
      lookahead: '{n} guesses from the pool, and a window of {w} entries.',
  context: 'The last token of the text so far. Every node of the draft continues from here.'};

const MOST_SHRUNK = 0.78;     // smaller letters could not be read: a tree that is wider still scrolls
const FOLD = 24;              // so many nodes that were never judged are shown at once; of more, only their roots until one asks for them
VIEWS.push({name: 'tree', title: WORDS.treeView.title, mount(host) {
  const words = WORDS.treeView, node = set(el('section', 'sv-tree'), {'aria-label': words.label}), phases = makePhases(host);
  const slider = set(el('input'), {type: 'range', min: 0, max: 0.5, step: 0.01, value: host.view.threshold}),
      sliderText = el('span', 'sv-num'),
      sliderBox = el('label', 'sv-tree-threshold', sliderText, slider), whole = set(el('input'), {type: 'checkbox'}),
          wholeBox = el('label', 'sv-tree-whole', whole, words.whole),
      probs = set(el('input'), {type: 'checkbox'}), fact = el('span', 'sv-quiet'),
      picture = el('div', 'sv-tree-box'), detail = el('div', 'sv-tree-detail');
  node.append(phases.node, box('sv-tree-bar', fact, el('label', 'sv-tree-probs', probs, words.probs), sliderBox, wholeBox),
      box('sv-tree-body', picture, detail));
  // root: -1 while the text so far is chosen, which is no token of the step
  let layout = null, drawn = '', drawnStep = null, root = null, scale = 1;      // scale: of the picture, so that a little too wide is not cut
  slider.oninput = () => { host.view.threshold = +slider.value; draw(); };
  probs.onchange = whole.onchange = () => draw();

  const items = () => picture.querySelectorAll('[role=treeitem]');
  const itemOf = n => [...items()].find(item => item.dataset.n === String(n));
  const current = step => host.view.node !== null && layout.place.has(host.view.node) ? host.view.node : nodesOf(step).length
      ? telling(step) : closing(step) ? 'end' : -1;

  function mark(step, withScroll) {
    const chosen = root !== null ? root : current(step), item = itemOf(chosen) || items()[0];
    for (const one of items()) set(one, {'aria-selected': one === item, tabindex: one === item ? 0 : -1});
    if (withScroll && item) keepInSight(chosen);
    if (chosen === -1) detail.replaceChildren(el('p', 'sv-say', words.context));
    else if (chosen === 'end') detail.replaceChildren(panels.outcome(step, host.run));
    else detail.replaceChildren(decisionDetail(step, chosen, host.run));
    return item;
  }

  function keepInSight(n) {
    const at = layout.place.get(n);
    if (!at) return;
    const H = probs.checked ? TREE.tall : TREE.row, x = at[0] * TREE.column * scale, y = at[1] * H * scale, W = TREE.column * scale,
        {clientWidth: w, clientHeight: h} = picture;
    if (x < picture.scrollLeft + 10) picture.scrollLeft = x - 20;
    else if (x + W > picture.scrollLeft + w) picture.scrollLeft = x + W + 20 - w;
    if (y < picture.scrollTop + 6) picture.scrollTop = y - H;
    else if (y + H > picture.scrollTop + h - 6) picture.scrollTop = y + 2 * H - h;
  }

  function draw() {
    const {run, view} = host, step = run.steps[view.at];
    phases.draw();
    node.dataset.phase = step ? PHASES[view.phase] : '';
    sliderText.textContent = say(WORDS.threshold, {q: (+slider.value).toFixed(2)});
    if (!step) {
      drawnStep = layout = null;
      picture.replaceChildren(el('p', 'sv-quiet', WORDS.emptyStep));
      detail.replaceChildren();
      return;
    }
    sliderBox.classList.toggle('is-off', !nodesOf(step).some(one => one.state === 'unjudged' && finite(drafterProb(one))));
    const folded = !whole.checked && count(step, 'unjudged') > FOLD, key = [run.id, view.at, slider.value, probs.checked, folded, picture.clientWidth,
        run.reason, run.steps.length === view.at + 1].join(), isNew = step !== drawnStep;
    wholeBox.classList.toggle('is-off', count(step, 'unjudged') <= FOLD);
    const hadFocus = picture.contains(document.activeElement);
    if (isNew) root = null;
    if (key !== drawn || isNew) {
      drawn = key; drawnStep = step;
      layout = treeLayout(step, +slider.value, folded);
      const before = run.steps[view.at - 1], last = before && emittedOf(before).slice(-1)[0];
      const tree = treePicture(step, layout, {probs: probs.checked, greedy: run.isGreedy(step), root: last ? last.text : WORDS.context}),
          {width, height} = tree.viewBox.baseVal;
      scale = max(MOST_SHRUNK, min(1, (picture.clientWidth - 20) / width));
      picture.replaceChildren(set(tree, {width: width * scale, height: height * scale}));
      const n = numDrafted(step), w = count(step, 'window');
      fact.textContent = !nodesOf(step).length ? (isPrefill(step) ? WORDS.prefillWhy : n ? WORDS.unknownNodes : words.none)
          : w ? say(words.lookahead, {n, w}) : isChain(step) ? words.chain : say(words.tree,
              {n, depth: depthsOf(step).reduce((a, b) => max(a, b), 0)});
      if (layout.numHidden > 0) fact.textContent += ' ' + say(words.hidden, {n: layout.numHidden}) + '.';
      if (isNew || view.node === null) {       // begin with the root at the left and in the middle
        picture.scrollLeft = 0;
        picture.scrollTop = layout.place.get(-1)[1] * (probs.checked ? TREE.tall : TREE.row) * scale - picture.clientHeight / 2 + 20;
      }
    }
    const item = mark(step, view.node !== null);
    if (hadFocus && item) item.focus({preventScroll: true});
  }

  function choose(n) {
    root = n === -1 ? -1 : null;
    if (n === -1) mark(host.shownStep(), true); else host.choose(n);
    const item = itemOf(n);
    if (item) item.focus({preventScroll: true});
  }
  picture.addEventListener('keydown', event => {      // the four arrows walk the tree while it has the focus
    const at = event.target.closest && event.target.closest('[role=treeitem]');
    if (!at || !layout) return;
    const {order, children} = layout, n = order.find(one => String(one) === at.dataset.n), k = order.indexOf(n),
        inner = children.get(n) || NONE;
    const to = {ArrowDown: order[k + 1], ArrowUp: order[k - 1], ArrowRight: inner.includes('end') ? 'end'
        : inner.find(i => nodesOf(host.shownStep())[i].state === 'accepted'),
      ArrowLeft: n === -1 ? undefined : layout.parentOf(n), Home: order[0], End: order[order.length - 1]};
    if (!(event.key in to)) return;
    event.preventDefault();
    const target = to[event.key] === undefined && event.key === 'ArrowRight' ? inner[0] : to[event.key];
    if (target !== undefined) choose(target);
  });
  let drag = null;            // pan by dragging; a click that did not move chooses
  picture.addEventListener('pointerdown', event => {
    if (event.button !== 0 || event.pointerType === 'touch') return;
    drag = {x: event.clientX, y: event.clientY, left: picture.scrollLeft, top: picture.scrollTop, moved: false};
  });
  picture.addEventListener('pointermove', event => {
    if (!drag) return;
    if (!(event.buttons & 1)) { drag = null; return; }
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && abs(dx) + abs(dy) < 5) return;
    drag.moved = true;
    picture.classList.add('is-dragged');
    picture.scrollLeft = drag.left - dx; picture.scrollTop = drag.top - dy;
  });
  picture.addEventListener('click', event => {
    const moved = drag && drag.moved, at = event.target.closest('[role=treeitem]');
    drag = null;
    picture.classList.remove('is-dragged');
    if (!moved && at) choose(layout.order.find(one => String(one) === at.dataset.n));
  });
  return {node, draw, phases: true};
}});
